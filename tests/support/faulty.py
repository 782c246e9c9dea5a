"""Ports that fail on demand: they wrap any real adapter and fail, stop or lose the calls that a test chooses.

This module owns when a call fails. The wrapped adapter does everything else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from itertools import count
from random import Random
from typing import Any, Generic, TypeVar, cast

from popgate.domain.assignment import Assignment
from popgate.domain.lease import GrantAnswer, LeaseRecord, SettleAnswer
from popgate.domain.names import BrokerQueue, CopyId, Layout, Subscription, TopicName
from popgate.ports.assignments import Assignments, StoredAssignment
from popgate.ports.broker import (
    Broker,
    Capabilities,
    Channel,
    Delivery,
    Listener,
    Outgoing,
    PublishOutcome,
    PublishStatus,
    QueueDepth,
    QueueFacts,
)
from popgate.ports.dedup import DedupEntry, DedupStore, Reservation
from popgate.ports.leases import AttemptLease, GrantRequest, LeaseStore, LoadedRecord, SettleEntry

T = TypeVar("T")

REACHED_SECONDS_MAX = 20.0


class Gate:
    """A stopped call. `reached` returns once it is stopped; `open` lets it continue, `fail` makes it raise.

    `reached` raises TimeoutError if the call never comes.
    """

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def reached(self) -> None:
        async with asyncio.timeout(REACHED_SECONDS_MAX):
            await self._reached.wait()

    def open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def fail(self, error: Exception) -> None:
        self._opened.set_exception(error)

    async def __call__(self) -> None:
        self._reached.set()
        await self._opened


class Faults:
    """Plans which fault happens to which call. A call is named `port.method`, such as "leases.grant" or
    "channel.resize".
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        """Every call that was begun, in order."""
        self._planned: dict[tuple[str, bool], list[Callable[[], Awaitable[None]]]] = {}

    def fail(self, call: str, error: Exception, *, times: int = 1, after: bool = False) -> None:
        """Make the next `times` such calls raise `error`, before they do anything, or `after` they have done all of
        it.
        """

        async def fault() -> None:
            raise error

        self._planned.setdefault((call, after), []).extend([fault] * times)

    def stop(self, call: str, *, after: bool = False) -> Gate:
        """Stop the next such call before it does anything, or `after` it has done all of it, until its gate opens."""
        gate = Gate()
        self._planned.setdefault((call, after), []).append(gate)
        return gate

    def heal(self) -> None:
        """Forget all planned faults that have not happened."""
        self._planned.clear()

    async def around(self, call: str, work: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(call)
        await self._meet(call, after=False)
        result = await work()
        await self._meet(call, after=True)
        return result

    async def _meet(self, call: str, *, after: bool) -> None:
        planned = self._planned.get((call, after))
        if planned:
            await planned.pop(0)()


def _cancels(task: asyncio.Task[Any]) -> Callable[[object], None]:
    def cancel(_: object) -> None:
        task.cancel()

    return cancel


class Interrupted(Generic[T]):
    """Work whose task is cancelled at one of its awaits, counted from 1.

    The cancellation comes as soon as it waits, or, if `answered`, once the awaited result exists but before the task
    sees it.
    """

    def __init__(self, work: Coroutine[Any, Any, T], at: int, *, answered: bool = False) -> None:
        self.happened = False
        self._work = work
        self._at = at
        self._answered = answered

    async def run(self) -> T:
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        steps, error = self._work.__await__(), None
        for number in count(1):
            try:
                waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as result:
                return cast(T, result.value)
            if number == self._at:
                self.happened = True
                if self._answered and waits_for is not None:
                    waits_for.add_done_callback(_cancels(task))  # before the task's own callback
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                error = thrown
        raise AssertionError("counting has no end")


class FaultyBroker:
    """A broker whose calls, deliveries and channels the test controls.

    `anonymous`: no delivery has a stable id, as on an adopted queue whose publishers do not use popgate.
    """

    def __init__(self, broker: Broker, faults: Faults, *, anonymous: bool = False) -> None:
        self.wrapped = broker
        self.faults = faults
        self.anonymous = anonymous
        self.says_returned = False
        """From now on every delivery is marked as redelivered and counted, as RabbitMQ marks its redeliveries."""
        self.mixing: Random | None = None
        """Shuffles deliveries that arrive together, from now on: RabbitMQ may redeliver messages in another order."""
        self.delays_count = 0
        """Number of coming deliveries that are delayed until `FaultyChannel.deliver_late` releases them."""
        self.channels: dict[BrokerQueue, FaultyChannel] = {}
        """The latest channel of each queue, ended ones included."""
        self.published: list[Outgoing] = []
        """Every message passed to publish, regardless of the result."""
        self._refusals: list[tuple[PublishStatus, bool]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.wrapped.capabilities

    async def start(self) -> None:
        await self.faults.around("broker.start", self.wrapped.start)

    async def stop(self) -> None:
        await self.wrapped.stop()

    def unavailable_reason(self) -> str | None:
        return self.wrapped.unavailable_reason()

    async def declare_topic(self, topic: TopicName) -> None:
        await self.faults.around("broker.declare_topic", lambda: self.wrapped.declare_topic(topic))

    async def delete_topic(self, topic: TopicName) -> None:
        await self.faults.around("broker.delete_topic", lambda: self.wrapped.delete_topic(topic))

    async def declare_group(self, layout: Layout) -> None:
        await self.faults.around("broker.declare_group", lambda: self.wrapped.declare_group(layout))

    async def delete_group(self, layout: Layout) -> None:
        await self.faults.around("broker.delete_group", lambda: self.wrapped.delete_group(layout))

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        return await self.faults.around("broker.inspect", lambda: self.wrapped.inspect(queue))

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        self.published += messages
        return await self.faults.around("broker.publish", lambda: self._publish(messages))

    async def _publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        if not self._refusals:
            return await self.wrapped.publish(messages)
        status, stored = self._refusals.pop(0)
        if stored:
            await self.wrapped.publish(messages)
        return [PublishOutcome(status=status, detail="says the test")] * len(messages)

    def refuse(self, status: PublishStatus, *, times: int = 1, stored: bool = False) -> None:
        """Answer the next `times` publishes with `status` for each message; none of them is stored, or all if
        `stored`.
        """
        self._refusals += [(status, stored)] * times

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        channel = FaultyChannel(queue, prefetch, listener, self)

        async def consume() -> Channel:
            channel.wrapped = await self.wrapped.consume(queue, layout, prefetch, channel)
            self.channels[queue] = channel
            return channel

        await self.faults.around("broker.consume", consume)
        channel.listen(asyncio.get_running_loop())
        return channel

    async def let_go(self, queue: BrokerQueue) -> None:
        await self.wrapped.let_go(queue)

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        return await self.faults.around("broker.depth", lambda: self.wrapped.depth(queues))

    async def oldest_at(self, queue: BrokerQueue) -> float | None:
        return await self.faults.around("broker.oldest_at", lambda: self.wrapped.oldest_at(queue))

    async def lose(self, queue: BrokerQueue, *, queue_gone: bool = False) -> None:
        """End the queue's channel as a broker would; its unacknowledged messages return to the queue."""
        await self.channels[queue].lose("lost by the test", queue_gone=queue_gone)


class FaultyChannel:
    """A channel that can be lost, and that can withhold acks from the broker, as a cut connection would."""

    def __init__(self, queue: BrokerQueue, prefetch: int, listener: Listener, broker: FaultyBroker) -> None:
        self.queue = queue
        self.prefetches = [prefetch]
        """The prefetch it was opened with, followed by every resize."""
        self.wrapped: Channel | None = None
        self.drops_acks = False
        """From now on acks are lost on their way; none of them counts when the channel ends."""
        self.ended = False
        self._listener = listener
        self._late: list[Delivery] = []
        self._early: list[Delivery] | None = []
        """Deliveries that arrived before `consume` returned, which may be stopped on its way."""
        self._broker = broker
        self._faults = broker.faults

    @property
    def unsettled_seconds_max(self) -> float | None:
        return self._channel.unsettled_seconds_max

    # ------------------------------------------------------------ the adapter's listener

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        if self.ended:
            return
        if self._broker.anonymous:
            for delivery in deliveries:
                delivery.message = delivery.message._replace(copy_id=CopyId(""))
                delivery.identified = False
        if self._broker.says_returned:
            for delivery in deliveries:
                delivery.returned, delivery.earlier_deliveries = True, 1
        if self._broker.mixing is not None:
            deliveries = self._broker.mixing.sample(deliveries, len(deliveries))
        late = deliveries[: self._broker.delays_count]
        self._broker.delays_count -= len(late)
        self._late += late
        self._pass_on(deliveries[len(late) :])

    def deliver_late(self) -> None:
        """Deliver the delayed messages, behind all that have arrived since."""
        late, self._late = self._late, []
        self._pass_on(late)

    def _pass_on(self, deliveries: Sequence[Delivery]) -> None:
        if self._early is not None:
            self._early += deliveries
        elif deliveries:
            self._listener.on_deliveries(deliveries)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pass earlier deliveries to the listener as soon as `consume` has returned."""
        loop.call_soon(self._deliver_early)

    def _deliver_early(self) -> None:
        early, self._early = self._early, None
        if early and not self.ended:
            self._listener.on_deliveries(early)

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        if not self.ended:
            self.ended = True
            self._listener.on_channel_lost(reason, queue_gone=queue_gone)

    # ------------------------------------------------------------ the engine's channel

    @property
    def _channel(self) -> Channel:
        assert self.wrapped is not None, "a channel is used after it was opened"
        return self.wrapped

    def ack(self, tags: Sequence[int]) -> None:
        if not self.drops_acks and not self.ended:
            self._channel.ack(tags)

    def requeue(self, tags: Sequence[int]) -> None:
        if not self.ended:
            self._channel.requeue(tags)

    async def flush(self) -> None:
        await self._faults.around("channel.flush", self._channel.flush)

    async def resize(self, prefetch: int) -> None:
        self.prefetches.append(prefetch)
        await self._faults.around("channel.resize", lambda: self._channel.resize(prefetch))

    async def backlog(self) -> int:
        return len(self._late) + await self._faults.around("channel.backlog", self._channel.backlog)

    def settled_evidence(self) -> int:
        return self._channel.settled_evidence()

    async def close(self) -> None:
        self.ended = True
        await self._faults.around("channel.close", self._channel.close)

    async def lose(self, reason: str, *, queue_gone: bool) -> None:
        if not self.ended:
            self.ended = True
            closing = asyncio.ensure_future(self._channel.close())
            await asyncio.sleep(0)  # the broker requeues before the engine notices: it may open the next channel
            self._listener.on_channel_lost(reason, queue_gone=queue_gone)
            await closing


class FaultyLeaseStore:
    """A lease store that fails on demand."""

    def __init__(self, leases: LeaseStore, faults: Faults) -> None:
        self.wrapped = leases
        self._faults = faults

    def unavailable_reason(self) -> str | None:
        return self.wrapped.unavailable_reason()

    async def claim(self, queue: BrokerQueue) -> int:
        return await self._faults.around("leases.claim", lambda: self.wrapped.claim(queue))

    async def restore(self, queue: BrokerQueue, records: Sequence[LoadedRecord], *, above: int) -> int:
        return await self._faults.around("leases.restore", lambda: self.wrapped.restore(queue, records, above=above))

    async def allow_mode(self, subscription: Subscription, generation: int) -> int:
        return await self._faults.around("leases.allow_mode", lambda: self.wrapped.allow_mode(subscription, generation))

    async def load(self, queue: BrokerQueue) -> list[LoadedRecord]:
        return await self._faults.around("leases.load", lambda: self.wrapped.load(queue))

    async def peek(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> dict[CopyId, LeaseRecord]:
        return await self._faults.around("leases.peek", lambda: self.wrapped.peek(queue, copy_ids))

    async def grant(self, request: GrantRequest) -> list[GrantAnswer]:
        return await self._faults.around("leases.grant", lambda: self.wrapped.grant(request))

    async def settle(self, entries: Sequence[SettleEntry]) -> list[SettleAnswer]:
        actions = {entry.action for entry in entries}
        call = f"leases.settle.{actions.pop()}" if len(actions) == 1 else "leases.settle"
        return await self._faults.around(call, lambda: self.wrapped.settle(entries))

    async def find_attempt(self, subscription: Subscription, attempt_id: str) -> list[AttemptLease]:
        return await self._faults.around(
            "leases.find_attempt", lambda: self.wrapped.find_attempt(subscription, attempt_id)
        )

    async def trim(self, queue: BrokerQueue, *, settled_before: float, older_than_seconds: float) -> int:
        return await self._faults.around(
            "leases.trim",
            lambda: self.wrapped.trim(queue, settled_before=settled_before, older_than_seconds=older_than_seconds),
        )

    async def collect(self, *, older_than_seconds: float) -> int:
        return await self._faults.around(
            "leases.collect", lambda: self.wrapped.collect(older_than_seconds=older_than_seconds)
        )

    async def forget(self, queue: BrokerQueue, copy_ids: Sequence[CopyId]) -> None:
        await self._faults.around("leases.forget", lambda: self.wrapped.forget(queue, copy_ids))

    async def drop_queue(self, queue: BrokerQueue) -> None:
        await self._faults.around("leases.drop_queue", lambda: self.wrapped.drop_queue(queue))


class FaultyDedupStore:
    """A dedup store that fails on demand."""

    def __init__(self, dedup: DedupStore, faults: Faults) -> None:
        self.wrapped = dedup
        self._faults = faults

    async def reserve(
        self, topic: TopicName, entries: Sequence[DedupEntry], *, window_seconds: float
    ) -> dict[str, Reservation]:
        return await self._faults.around(
            "dedup.reserve", lambda: self.wrapped.reserve(topic, entries, window_seconds=window_seconds)
        )

    async def confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        await self._faults.around("dedup.confirm", lambda: self.wrapped.confirm(topic, entries))

    async def cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        await self._faults.around("dedup.cancel", lambda: self.wrapped.cancel(topic, entries))

    async def drop_topic(self, topic: TopicName) -> None:
        await self._faults.around("dedup.drop_topic", lambda: self.wrapped.drop_topic(topic))

    async def collect(self, *, window_seconds: float, noted_seconds: float) -> int:
        return await self._faults.around(
            "dedup.collect",
            lambda: self.wrapped.collect(window_seconds=window_seconds, noted_seconds=noted_seconds),
        )


class FaultyAssignments:
    """A store of assignments that fails on demand."""

    def __init__(self, assignments: Assignments, faults: Faults) -> None:
        self.wrapped = assignments
        self._faults = faults

    async def read(self, subscription: Subscription) -> StoredAssignment:
        return await self._faults.around("assignments.read", lambda: self.wrapped.read(subscription))

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        return await self._faults.around(
            "assignments.write", lambda: self.wrapped.write(subscription, assignment, replaces)
        )

    async def drop(self, subscription: Subscription) -> None:
        await self._faults.around("assignments.drop", lambda: self.wrapped.drop(subscription))


_conforms: tuple[type[Broker], type[Channel], type[LeaseStore], type[DedupStore], type[Assignments]] = (
    FaultyBroker,
    FaultyChannel,
    FaultyLeaseStore,
    FaultyDedupStore,
    FaultyAssignments,
)
