"""What the embedded broker does beyond the common contract: commits, limits, deduplication, a failing disk."""

import asyncio
import itertools
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.recorder import TOPIC, Recorder, declare, layout, message, numbered, publish
from popgate.adapters.sqlite import channel as sqlite_channel
from popgate.adapters.sqlite import delayed, delays, publishing
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.channel import SqliteChannel
from popgate.adapters.sqlite.messages import FETCH_BYTES_MAX, FETCH_COUNT_MAX, Fetched
from popgate.domain.errors import BrokerUnavailable, Conflict, QueueGone
from popgate.domain.names import BrokerQueue, Layout, TopicName
from popgate.ports.broker import Channel, Delivery, Outgoing, PublishStatus
from popgate.runtime.clocks import ManualClock
from support.engines import eventually
from unit.sqlite_store import WAIT_SECONDS, opened
from unit.stored_broker import BILLING, QUEUE, Store, started, store

__all__ = ["store"]

KIB = 1024
OTHER = layout(topic=TopicName("other"))


class BatchRecorder(Recorder):
    """Also records how many bytes came together."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_bytes: list[int] = []

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self.batch_bytes.append(sum(len(delivery.message.body) for delivery in deliveries))
        super().on_deliveries(deliveries)


# ---------------------------------------------------------------- publishing


async def test_a_copy_that_is_published_to_a_queue_again_is_stored_once(store: Store, tmp_path: Path) -> None:
    one, other = message(b"one"), message(b"other")
    for batch in ([one], [one, other, one], [other]):
        outcomes = await store.broker.publish([Outgoing(message=each, queue=BILLING.dead) for each in batch])
        assert {outcome.status for outcome in outcomes} == {PublishStatus.PUBLISHED}
    assert await store.ready(BILLING.dead) == 2
    await store.broker.publish([Outgoing(message=one, queue=QUEUE)])  # another queue, another copy of it
    assert await store.ready() == 1
    listener = Recorder()
    await store.broker.consume(BILLING.dead, BILLING, 10, listener)
    await listener.until_count(2)
    assert listener.bodies == [b"one", b"other"]


async def test_a_publish_that_many_groups_multiply_lets_other_jobs_run_in_between(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "STEP_BYTES_MAX", KIB)
    layouts = [layout(f"group-{number}") for number in range(8)]
    await declare(store.broker, *layouts)
    before = store.database.commit_count
    bodies = [bytes([number]) * (KIB // 2) for number in range(9)]
    large = asyncio.create_task(publish(store.broker, bodies))
    await eventually(lambda: store.database.commit_count > before)
    (outcome,) = await store.broker.publish([Outgoing(message=message(b"small"), queue=BILLING.dead)])
    assert outcome.status is PublishStatus.PUBLISHED
    assert not large.done(), "the small one did not wait for all copies of the large ones"
    await large
    for one in layouts:
        listener = Recorder()
        await store.broker.consume(one.queues[0], one, 10, listener)
        await listener.until_count(len(bodies))
        assert listener.bodies == bodies


async def test_a_large_publish_that_fails_in_the_middle_is_not_confirmed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "STEP_BYTES_MAX", KIB)
    await declare(store.broker, layout("another"))
    before = store.database.commit_count
    large = [Outgoing(message=message(bytes(KIB)), topic=TOPIC) for _ in range(40)]
    under_way = asyncio.create_task(store.broker.publish(large))
    await eventually(lambda: store.database.commit_count > before)
    await store.fail(failing=True)
    assert [outcome.status for outcome in await under_way] == [PublishStatus.FAILED] * len(large)


async def test_a_hungry_channel_has_the_message_when_the_publish_returns(store: Store) -> None:
    listener = Recorder()
    channel = await store.consume(3, listener)
    await channel.backlog()
    await publish(store.broker, numbered(1, 2))
    assert listener.bodies == numbered(1, 2)
    await publish(store.broker, numbered(3, 5))
    assert listener.bodies == numbered(1, 3)
    channel.ack(listener.tags[:2])
    await listener.until_count(5)
    assert listener.bodies == numbered(1, 5)


async def test_a_publish_whose_caller_has_left_is_delivered_all_the_same(store: Store) -> None:
    listener = Recorder()
    await store.consume(10, listener)
    publishing = asyncio.create_task(publish(store.broker, numbered(1, 3)))
    await asyncio.sleep(0)
    publishing.cancel()
    await listener.until_count(3)
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await publish(store.broker, [b"4"])
    assert listener.bodies == numbered(1, 4)


async def test_headers_that_can_not_be_stored_fail_their_message_only(store: Store) -> None:
    bad = Outgoing(message=message(b"bad", headers={"odd": object()}), topic=BILLING.subscription.topic)
    good = Outgoing(message=message(b"good"), topic=BILLING.subscription.topic)
    first, second = await store.broker.publish([bad, good])
    assert (first.status, second.status) == (PublishStatus.REFUSED, PublishStatus.PUBLISHED)
    assert "odd" in first.detail or "object" in first.detail
    assert await store.ready() == 1


# ---------------------------------------------------------------- consuming


async def test_a_queue_has_one_channel_at_a_time(store: Store) -> None:
    channel = await store.consume(10, Recorder())
    with pytest.raises(Conflict):
        await store.consume(10, Recorder())
    await channel.close()
    await store.consume(10, Recorder())


async def test_a_long_backlog_is_fetched_in_bites(store: Store) -> None:
    count = 2 * FETCH_COUNT_MAX + 100
    for start in range(1, count + 1, 500):
        await publish(store.broker, numbered(start, min(count, start + 499)))
    listener = BatchRecorder()
    await store.consume(65_535, listener)
    await listener.until_count(count)
    assert listener.bodies == numbered(1, count)
    assert len(listener.batch_bytes) == 3


async def test_a_fetch_is_bounded_in_bytes(store: Store) -> None:
    size = FETCH_BYTES_MAX // 2 + 1
    bodies = [bytes([number]) * size for number in range(5)]
    for body in bodies:
        await publish(store.broker, [body])
    listener = BatchRecorder()
    channel = await store.consume(100, listener)
    await listener.until_count(5)
    assert listener.bodies == bodies
    assert listener.batch_bytes == [2 * size, 2 * size, size]
    channel.requeue(listener.tags[::-1])
    await listener.until_count(10)
    assert listener.bodies[5:] == bodies
    assert max(listener.batch_bytes) == 2 * size


async def test_a_resize_gives_fresh_credit_beside_what_is_held(store: Store) -> None:
    await publish(store.broker, numbered(1, 20))
    listener = Recorder()
    channel = await store.consume(4, listener)
    await listener.until_count(4)
    await channel.resize(2)
    await listener.until_count(6)
    assert await channel.backlog() == 14
    channel.ack(listener.tags[:4])  # of the former credit: it buys nothing
    assert await channel.backlog() == 14
    channel.ack(listener.tags[4:5])
    await listener.until_count(7)
    assert await channel.backlog() == 13
    assert listener.bodies == numbered(1, 7)


async def test_what_is_given_back_comes_before_what_was_published_meanwhile(store: Store) -> None:
    await publish(store.broker, numbered(1, 3))
    listener = Recorder()
    channel = await store.consume(10, listener)
    await listener.until_count(3)
    channel.requeue(listener.tags[:2])
    await publish(store.broker, numbered(4, 5))
    await listener.until_count(7)
    assert listener.bodies[3:] == numbered(1, 2) + numbered(4, 5)


async def test_what_is_given_back_comes_first_also_where_the_disk_could_not_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail(*_: object, **__: object) -> Fetched:
        monkeypatch.undo()
        loop.call_soon_threadsafe(failed.set)
        raise sqlite3.OperationalError("disk I/O error")

    await publish(store.broker, numbered(1, 3))
    listener = Recorder()
    channel = await store.consume(10, listener)
    await listener.until_count(3)
    monkeypatch.setattr(sqlite_channel, "fetch_positions", fail)
    channel.requeue(listener.tags[:2])
    await failed.wait()
    await publish(store.broker, numbered(4, 4))
    await listener.until_count(6)
    assert listener.bodies[3:] == numbered(1, 2) + numbered(4, 4)


async def test_of_much_that_is_given_back_the_oldest_comes_first(store: Store) -> None:
    await publish(store.broker, numbered(1, 7))
    listener = Recorder()
    channel = await store.consume(6, listener)
    await listener.until_count(6)
    await channel.resize(0)
    channel.requeue(listener.tags[:3][::-1])
    channel.requeue(listener.tags[3:][::-1])
    await channel.resize(2)
    await listener.until_count(8)
    channel.ack(listener.tags[6:8])
    await listener.until_count(10)
    assert listener.bodies[6:] == numbered(1, 4)


async def test_evidence_is_what_is_on_the_disk(store: Store) -> None:
    await publish(store.broker, numbered(1, 10))
    listener = Recorder()
    channel = await store.consume(10, listener)
    await listener.until_count(10)
    channel.ack(listener.tags[:4])
    channel.ack(listener.tags[4:6])
    assert channel.settled_evidence() == 0
    before = store.database.commit_count
    await channel.flush()
    assert channel.settled_evidence() == 6
    assert store.database.commit_count - before == 1  # acks of one turn of the event loop are written together
    assert await store.stored() == 4


async def test_a_consumption_ends_with_the_process_and_all_that_is_unsettled_comes_again(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    async with started(tmp_path) as store:
        await declare(store.broker, BILLING)
        await publish(store.broker, numbered(1, 100))
        listener = Recorder()
        channel = await store.consume(60, listener)
        await listener.until_count(60)
        channel.ack([*listener.tags[:20:2], *listener.tags[50:]])
        channel.requeue(listener.tags[1:5:2])
        await channel.flush()
        for name in ("popgate.db", "popgate.db-wal"):  # as a crash leaves it
            (crashed / name).write_bytes((tmp_path / name).read_bytes())
    left = [*numbered(2, 20)[::2], *numbered(21, 50), *numbered(61, 100)]
    for folder in (crashed, tmp_path):
        async with started(folder) as store:
            assert await store.ready() == len(left)
            listener = Recorder()
            await store.consume(1000, listener)
            await listener.until_count(len(left))
            assert listener.bodies == left
            await publish(store.broker, [b"new"])
            assert listener.bodies == [*left, b"new"]


# ---------------------------------------------------------------- a disk that fails


async def test_publishes_on_a_failing_disk_are_refused_and_later_ones_delivered(store: Store) -> None:
    listener = Recorder()
    await store.consume(10, listener)
    await publish(store.broker, [b"1"])
    await store.fail(failing=True)
    with pytest.raises(BrokerUnavailable, match=r"popgate\.db"):
        await publish(store.broker, [b"lost"])
    assert store.broker.unavailable_reason() is not None
    await store.fail(failing=False)
    await publish(store.broker, numbered(2, 3))
    assert store.broker.unavailable_reason() is None
    await listener.until_count(3)
    assert listener.bodies == numbered(1, 3)
    assert await store.ready() == 0


async def flushed(channel: Channel) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        await channel.flush()


async def test_acks_on_a_failing_disk_are_written_later_in_their_order(store: Store) -> None:
    await publish(store.broker, numbered(1, 6))
    listener = Recorder()
    channel = await store.consume(6, listener)
    await listener.until_count(6)
    await store.fail(failing=True)
    channel.ack(listener.tags[:2])
    with pytest.raises(BrokerUnavailable):
        await flushed(channel)
    channel.ack(listener.tags[2:4])
    with pytest.raises(BrokerUnavailable):
        await flushed(channel)
    assert channel.settled_evidence() == 0
    assert await store.ready() == 0
    await store.fail(failing=False)
    await flushed(channel)
    assert channel.settled_evidence() == 4
    assert await store.stored() == 2


async def test_acks_are_tried_again_without_being_asked(store: Store) -> None:
    await publish(store.broker, numbered(1, 3))
    listener = Recorder()
    channel = await store.consume(6, listener)
    await listener.until_count(3)
    await store.fail(failing=True)
    channel.ack(listener.tags)
    with pytest.raises(BrokerUnavailable):
        await channel.flush()
    await store.fail(failing=False)
    async with asyncio.timeout(WAIT_SECONDS):
        while channel.settled_evidence() < 3:  # noqa: ASYNC110 - evidence must be polled
            await asyncio.sleep(0.02)


async def test_a_channel_that_closes_on_a_failing_disk_closes(store: Store) -> None:
    await publish(store.broker, numbered(1, 3))
    listener = Recorder()
    channel = await store.consume(6, listener)
    await listener.until_count(3)
    await store.fail(failing=True)
    channel.ack(listener.tags)
    await channel.close()
    assert channel.settled_evidence() == 0
    with pytest.raises(BrokerUnavailable):
        await channel.flush()
    await store.fail(failing=False)
    again = Recorder()
    await store.consume(6, again)
    await again.until_count(3)
    assert again.bodies == numbered(1, 3)


async def test_topology_on_a_failing_disk_stays_as_it_was(store: Store) -> None:
    other = layout("other")
    await publish(store.broker, [b"1"])
    await store.fail(failing=True)
    with pytest.raises(BrokerUnavailable):
        await store.broker.declare_group(other)
    with pytest.raises(BrokerUnavailable):
        await store.broker.delete_group(BILLING)
    with pytest.raises(BrokerUnavailable):
        await store.broker.delete_topic(BILLING.subscription.topic)
    await store.fail(failing=False)
    assert await store.ready(other.queues[0]) is None
    await publish(store.broker, [b"2"])
    listener = Recorder()
    await store.consume(10, listener)
    await listener.until_count(2)
    assert listener.bodies == numbered(1, 2)


async def test_a_closed_store_makes_the_broker_unavailable(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        broker = SqliteBroker(database)
        with pytest.raises(BrokerUnavailable):
            await broker.publish([])
        await broker.stop()
        await broker.start()
        await declare(broker, BILLING)
    assert broker.unavailable_reason() is not None
    with pytest.raises(BrokerUnavailable):
        await publish(broker, [b"1"])
    await broker.stop()


# ---------------------------------------------------------------- queues


async def test_adopting_needs_rabbitmq(store: Store) -> None:
    adopted = Layout(subscription=BILLING.subscription, queues=[BrokerQueue("theirs")], dead=BILLING.dead, adopted=True)
    assert not store.broker.capabilities.adopts_queues
    with pytest.raises(Conflict, match="RabbitMQ"):
        await store.broker.declare_group(adopted)
    assert (await store.broker.inspect(BrokerQueue("theirs"))).exists is False


async def test_a_deleted_queue_leaves_no_messages_behind(tmp_path: Path) -> None:
    async with started(tmp_path) as store:
        await declare(store.broker, BILLING)
        for start in range(1, 3001, 500):
            await publish(store.broker, numbered(start, start + 499))
        await store.broker.delete_group(BILLING)
        await declare(store.broker, BILLING)
        await publish(store.broker, [b"new"])
        # Stopped before the sweeper can be done: the next start continues.
    async with started(tmp_path) as store:
        async with asyncio.timeout(WAIT_SECONDS):
            while await store.stored() > 1:  # noqa: ASYNC110 - the sweeper sends no signal
                await asyncio.sleep(0)
        listener = Recorder()
        await store.consume(10, listener)
        await listener.until_count(1)
        assert listener.bodies == [b"new"]
        assert await store.ready() == 0


async def test_a_queue_is_inspected(store: Store) -> None:
    await publish(store.broker, numbered(1, 3))
    await store.consume(0, Recorder())
    facts = await store.broker.inspect(QUEUE)
    assert (facts.exists, facts.kind, facts.ready, facts.consumers) == (True, "unknown", 3, 1)


async def test_declared_queues_and_bindings_survive_a_restart(tmp_path: Path) -> None:
    wide = layout("wide", queue_count=3)
    async with started(tmp_path) as store:
        await declare(store.broker, wide, BILLING)
        await store.broker.delete_group(BILLING)
        await publish(store.broker, [b"1"], index=2)
    async with started(tmp_path) as store:
        await publish(store.broker, [b"2"], index=2)
        depths = await store.broker.depth([*wide.queues, wide.dead, QUEUE])
        assert [depth.ready for depth in depths] == [0, 0, 2, 0, None]
        with pytest.raises(QueueGone):
            await store.consume(10, Recorder())


async def test_delayed_messages_that_have_come_are_counted_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    async with started(tmp_path, clock) as store:
        await declare(store.broker, BILLING)
        later = Outgoing(message=message(b"later"), topic=BILLING.subscription.topic, delay_seconds=60.0)
        await store.broker.publish([later])
        clock.advance(60.0)
        store.broker.look_at_the_clock()
        async with asyncio.timeout(WAIT_SECONDS):
            while await store.ready() != 1:  # noqa: ASYNC110 - there is no signal for it
                await asyncio.sleep(0.01)
    async with started(tmp_path, clock) as store:
        assert await store.ready() == 1


async def test_a_step_of_due_messages_counts_their_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "DUE_BYTES_MAX", KIB)
    clock = ManualClock()
    layouts = [layout(f"group-{number}") for number in range(8)]
    async with started(tmp_path, clock) as store:
        await declare(store.broker, *layouts)
        bodies = [bytes([number]) * (KIB // 8) for number in range(10)]
        later = [Outgoing(message=message(body), topic=TOPIC, delay_seconds=60.0) for body in bodies]
        await store.broker.publish(later)
        before = store.database.commit_count
        listener = Recorder()
        await store.broker.consume(layouts[0].queues[0], layouts[0], 100, listener)
        clock.advance(60.0)
        store.broker.look_at_the_clock()
        await listener.until_count(len(bodies))
        assert listener.bodies == bodies
        assert store.database.commit_count - before >= len(bodies), "each step has one message and its eight copies"


async def test_delayed_messages_are_deleted_with_their_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed, "DUE_COUNT_MAX", 2)
    clock = ManualClock()
    async with started(tmp_path, clock) as store:
        await declare(store.broker, BILLING, OTHER)
        for topic, seconds in itertools.product((TOPIC, OTHER.subscription.topic), (60.0, 50.0, 40.0)):
            later = [Outgoing(message=message(topic.encode()), topic=topic, delay_seconds=seconds)] * 3
            await store.broker.publish(later)
        await store.broker.delete_group(BILLING)
        await store.broker.delete_topic(TOPIC)
        await declare(store.broker, BILLING)
        depths = await store.broker.depth([QUEUE, OTHER.queues[0]])
        assert [depth.delayed for depth in depths] == [0, 9]
        clock.advance(60.0)
        store.broker.look_at_the_clock()
        async with asyncio.timeout(WAIT_SECONDS):
            while await store.ready(OTHER.queues[0]) != 9:  # noqa: ASYNC110 - there is no signal for it
                await asyncio.sleep(0.01)
        assert await store.ready() == 0


# ---------------------------------------------------------------- any order of events


class Publish(NamedTuple):
    message_count: int


class Ack(NamedTuple):
    places: list[int]


class Requeue(NamedTuple):
    places: list[int]


class Resize(NamedTuple):
    prefetch: int


class Turn(NamedTuple):
    """Lets the event loop and the thread do their pending work."""


class Reopen(NamedTuple):
    prefetch: int


Step = Publish | Ack | Requeue | Resize | Turn | Reopen
PLACES = st.lists(st.integers(0, 30), min_size=1, max_size=5)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(Publish, st.integers(1, 8)),
    st.builds(Ack, PLACES),
    st.builds(Requeue, PLACES),
    st.builds(Resize, st.integers(0, 6)),
    st.builds(Turn),
    st.builds(Reopen, st.integers(0, 6)),
)


@given(script=st.lists(STEPS, max_size=40))
def test_whatever_happens_each_message_is_with_one_party_and_all_come_in_order(script: list[Step]) -> None:
    asyncio.run(play(script))


async def play(script: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with started(Path(folder)) as store:
            await declare(store.broker, BILLING)
            game = Game(store)
            await game.reopen(3)
            for step in script:
                await game.play(step)
            await game.finish()


class Game:
    """Plays steps on one queue and checks that the channel does only what is possible."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._published = 0
        self._acked: set[int] = set()
        self._publishing: list[asyncio.Task[None]] = []
        self._held: dict[int, int] = {}
        self._listener = Recorder()
        self._seen = 0
        self._channel: Channel | None = None

    def _take(self) -> None:
        """Check new deliveries: nothing that is held or acked may come, and tags only grow."""
        new = self._listener.deliveries[self._seen :]
        self._seen += len(new)
        for delivery in new:
            number = int(delivery.message.body)
            assert number not in self._held.values()
            assert number not in self._acked
            assert not self._held or delivery.tag > max(self._held)
            self._held[delivery.tag] = number

    def _tags(self, places: list[int]) -> list[int]:
        tags = list(self._held)
        return list({tags[place] for place in places if place < len(tags)})

    async def reopen(self, prefetch: int) -> None:
        if self._channel is not None:
            self._take()
            self._held.clear()
            await self._channel.close()
        self._listener = Recorder()
        self._seen = 0
        self._channel = await self._store.consume(prefetch, self._listener)

    async def play(self, step: Step) -> None:
        assert isinstance(self._channel, SqliteChannel)
        self._take()
        match step:
            case Publish(message_count):
                bodies = numbered(self._published, self._published + message_count - 1)
                self._published += message_count
                self._publishing.append(asyncio.create_task(publish(self._store.broker, bodies)))
                await asyncio.sleep(0)
            case Ack(places):
                tags = self._tags(places)
                self._channel.ack(tags)
                self._acked.update(self._held.pop(tag) for tag in tags)
            case Requeue(places):
                tags = self._tags(places)
                for tag in tags:
                    del self._held[tag]
                self._channel.requeue(tags)
            case Resize(prefetch):
                await self._channel.resize(prefetch)
            case Turn():
                await self._channel.backlog()
            case Reopen(prefetch):
                await self.reopen(prefetch)

    async def finish(self) -> None:
        """Check that every unacked message is there, once, in order, and that the counts agree."""
        await asyncio.gather(*self._publishing)
        await self.reopen(0)
        left = [number for number in range(self._published) if number not in self._acked]
        assert await self._store.ready() == len(left) == await self._store.stored()
        assert self._channel is not None
        await self._channel.resize(10_000)
        await self._listener.until_count(len(left))
        assert self._listener.bodies == [b"%d" % number for number in left]
        assert await self._channel.backlog() == 0
