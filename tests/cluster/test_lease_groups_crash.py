"""Kill -9 of the proxy in the middle of every step of a batch engine: each message is in exactly one batch.

The engine behaves like the Spark source (decision 12): ack what the sink has, lease the next epoch, read its
slices, extend, and repeat the same after any failure. On both brokers; `make crash` runs more rounds.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.conftest import assert_no_traceback
from popgate_client import Client, LeaseGroupMessage
from support.processes import wait_until
from support.proxy import ProxyProcess

ROUNDS, ROUNDS_FULL = 2, 40
BATCH, BATCH_FULL = 800, 5_000
SLICES = 3
LEASE_SECONDS = 300
RETRY_SECONDS = 60.0
STEP_SECONDS_MAX = 0.25
"""About the maximum seconds of a step: a kill comes anywhere in it, or right after it."""
TOPIC, GROUP = "orders", "lake"
STEPS = ("lease", "read", "extend", "ack")


class Engine:
    """A batch engine with a sink that keeps each epoch once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stream = client.lease_stream(TOPIC, GROUP, "query")
        self.sink: dict[int, list[list[LeaseGroupMessage]]] = {}
        self.epoch = 0
        self.published = 0

    def publish(self, count: int) -> None:
        bodies = [f"m{self.published + number}" for number in range(count)]
        assert all(result.ok for result in self._client.publish(TOPIC, *bodies))
        self.published += count

    def lease(self) -> None:
        formed = self._stream.lease(self.epoch + 1, BATCH_FULL, SLICES, LEASE_SECONDS)
        assert formed.lost == 0
        if formed.count:
            self.epoch += 1

    def read(self) -> None:
        """Read the slices of the present epoch; those already in the sink must be unchanged."""
        if self.epoch:
            slices = [self._stream.messages(self.epoch, number) for number in range(SLICES)]
            assert self.sink.setdefault(self.epoch, slices) == slices

    def read_again(self, after: str) -> None:
        """Check that the sink's slices are unchanged; after their ack they can't be read any more."""
        if after != "ack" and self.epoch in self.sink:
            self.read()

    def extend(self) -> None:
        assert {one["status"] for one in self._stream.extend(LEASE_SECONDS)} <= {"extended"}

    def ack(self) -> None:
        if self.epoch in self.sink:
            acked = self._stream.ack(self.epoch)
            assert acked.lost == 0
            assert acked.acked + acked.already_acked == sum(map(len, self.sink[self.epoch]))

    def bodies(self) -> list[str]:
        return [one.text for slices in self.sink.values() for part in slices for one in part]


@pytest.mark.crash
def test_every_message_is_in_exactly_one_batch(
    broker_flags: Sequence[str], tmp_path: Path, seed: int, full_run: bool
) -> None:
    chance = random.Random(seed)
    with (
        ProxyProcess(tmp_path / "proxy", *broker_flags) as proxy,
        Client(proxy.url, retry_seconds_max=RETRY_SECONDS) as client,
    ):
        client.put_topic(TOPIC, queues=4)
        client.put_group(TOPIC, GROUP)
        engine = Engine(client)
        for number in range(ROUNDS_FULL if full_run else ROUNDS):
            engine.publish(BATCH_FULL if full_run else BATCH)
            killed = STEPS[number % len(STEPS)]
            for name in STEPS:
                step: Callable[[], None] = getattr(engine, name)
                if name == killed:
                    kill_during(step, proxy, chance.uniform(0.0, STEP_SECONDS_MAX))
                else:
                    step()
                engine.read_again(name)
        drain(engine)
        assert sorted(engine.bodies()) == sorted(f"m{number}" for number in range(engine.published))
        wait_until(lambda: is_empty(client), timeout_seconds=30, what="the group to be empty")
        assert client.lease_groups(TOPIC, GROUP) == []
        assert_no_traceback(proxy)


def is_empty(client: Client) -> bool:
    """Tell whether the queue is empty; the pop also makes the broker deliver messages that are acked in the records
    only.
    """
    assert client.pop(TOPIC, GROUP) == []
    state = client.stats(TOPIC, GROUP)
    return all(state[name] == 0 for name in ("ready", "in_flight", "dead"))


def drain(engine: Engine) -> None:
    """Continue until every message has been in a batch."""
    deadline = time.monotonic() + RETRY_SECONDS
    while len(engine.bodies()) < engine.published:
        assert time.monotonic() < deadline, f"{len(engine.bodies())} of {engine.published} were in a batch"
        for step in (engine.lease, engine.read, engine.ack):
            step()


def kill_during(step: Callable[[], None], proxy: ProxyProcess, seconds: float) -> None:
    """Kill the proxy that long after `step` began, restart it, and let the step's repeats succeed."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(step)
        time.sleep(seconds)
        proxy.kill()
        proxy.start()
        running.result(RETRY_SECONDS)
