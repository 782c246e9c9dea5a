"""The memory of deleted topics is freed although the collector runs rarely."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate.engine.queue.host import QueueHost
from popgate.runtime import garbage
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, open_world

LEASE_SECONDS, LONG_SECONDS = 3.0, 600.0
TOPICS, QUEUES = 12, 4


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """The collector of a proxy does not come round in so short a time; only popgate itself may start it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def hosts() -> int:
    return sum(isinstance(one, QueueHost) for one in gc.get_objects())


async def use_and_delete(world: World, topic: str) -> None:
    await world.create(topic, queues=QUEUES)
    await world.publish(topic, "a", "b")
    assert bodies(await world.pop(topic, invisibility=LEASE_SECONDS)) == ["a"]
    await world.engine.deletions.delete_topic(topic)
    await world.let_pass(LONG_SECONDS)  # no timer refers to the queues any more
    world.broker.channels.clear()  # where the tests remember them


@pytest.mark.usefixtures("_no_collector")
async def test_deleted_topics_leave_no_queues_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "QUEUES_MIN", 3 * QUEUES)
    monkeypatch.setattr(garbage, "SECONDS_MIN", 0.0)
    async with open_world(folder / "data", clock=ManualClock()) as world:
        before = hosts()
        for number in range(TOPICS):
            await use_and_delete(world, f"t{number}")
            assert hosts() - before <= 3 * QUEUES + QUEUES
