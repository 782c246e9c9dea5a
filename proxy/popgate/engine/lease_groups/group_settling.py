"""Settles lease groups: acks or releases their members in batches. The store records the progress.

Only one settlement of each stream runs at a time. The store records a settlement before its first batch. If the
settlement is interrupted, the next settlement of the stream or the proxy's periodic upkeep finishes it.
"""

import asyncio
from typing import NamedTuple
from weakref import WeakValueDictionary

from popgate.domain.lease import SettleAction, SettleStatus
from popgate.domain.names import StreamName, Subscription, is_transient
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Absent
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind, JournalSubject
from popgate.ports.lease_groups import SettlementStep


class AckedGroups(NamedTuple):
    acked: int
    already_acked: int
    lost: int


class _Settled(NamedTuple):
    acked: int = 0
    already_acked: int = 0
    lost: int = 0
    released: int = 0

    def plus(self, step: SettlementStep) -> "_Settled":
        done = sum(one.answer.status is SettleStatus.DONE for one in step.members)
        if step.action is not SettleAction.ACK:
            return self._replace(released=self.released + done)
        already = sum(one.answer.status is SettleStatus.ALREADY for one in step.members)
        return _Settled(self.acked + done, self.already_acked + already, self.lost + step.lost, self.released)


class GroupSettlements:
    """Runs the settlements of all streams. Every call can raise StateUnavailable.

    Members that were settled before the error stay settled.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._store = context.lease_groups
        self._running: WeakValueDictionary[tuple[Subscription, StreamName], asyncio.Lock] = WeakValueDictionary()

    async def ack(self, served: ServedSubscription, stream: StreamName, through: int) -> AckedGroups:
        """Ack every lease group of a stream whose epoch is at most ``through``. These epochs can't be used again.

        A repeated request finishes an interrupted one. If the interrupted request had already acked a message, the
        repeated request counts it as already acked.
        """
        async with self._alone(served, stream):
            before = await self._store.begin_ack(served.name, stream, through)
            settled = await self._settle(served, stream)
            # Another proxy may have settled a part meanwhile.
            after = await self._store.begin_ack(served.name, stream, through)
        acked = max(before.acked, after.acked - settled.acked)
        return AckedGroups(settled.acked, settled.already_acked + acked, max(settled.lost + before.lost, after.lost))

    async def release(self, served: ServedSubscription, stream: StreamName, after: int) -> int:
        """Release the messages of every lease group whose epoch is later than ``after``, and delete these groups.

        Return the number of released messages.
        """
        async with self._alone(served, stream):
            await self._store.begin_release(served.name, stream, after)
            return (await self._settle(served, stream)).released

    async def finish(self, served: ServedSubscription, stream: StreamName) -> None:
        """Finish an interrupted settlement of a stream, if there is one."""
        async with self._alone(served, stream):
            await self._settle(served, stream)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _alone(self, served: ServedSubscription, stream: StreamName) -> asyncio.Lock:
        """Return the lock that allows one settlement of a stream at a time.

        Acquire it before a settlement begins, so that the settlement counts only the messages that it settles itself.
        """
        return self._running.setdefault((served.name, stream), asyncio.Lock())

    async def _settle(self, served: ServedSubscription, stream: StreamName) -> _Settled:
        """Settle all lease groups of a stream that the store has marked to be acked or released."""
        settled = _Settled()
        step = await self._store.settle_next(served.name, stream)
        while step.more:
            following = asyncio.create_task(self._store.settle_next(served.name, stream))  # runs during ``_apply``
            try:
                await self._apply(served, stream, step)
                settled = settled.plus(step)
            finally:
                step = await following
        await self._apply(served, stream, step)
        return settled.plus(step)

    async def _apply(self, served: ServedSubscription, stream: StreamName, step: SettlementStep) -> None:
        """Apply a batch that the store has settled to the messages in the queues of this proxy.

        The messages are looked up again, because they may have changed since the request to the store.
        """
        hosts = {host.broker_queue: host for host in served.hosts}
        done: list[JournalSubject] = []
        acked: dict[QueueHost, list[BufferedMessage]] = {}
        unidentified: set[QueueHost] = set()
        oldest = float("inf")
        is_ack = step.action is SettleAction.ACK
        for queue, copy_id, (status, remaining, record, _) in step.members:
            host = hosts.get(queue)
            if host is None or record is None or status is SettleStatus.LOST:
                continue
            buffered = host.find(copy_id)
            if status is SettleStatus.DONE:
                terms = copy_id, host.queue.number, record.delivery_count, record.leased_at
                done.append(buffered or Absent(*terms, client=stream))
            if not is_ack:
                host.hear(copy_id, record, remaining)
            elif buffered is not None:
                acked.setdefault(host, []).append(buffered)
                oldest = min(oldest, record.changed_at)
                if is_transient(copy_id):
                    unidentified.add(host)
            elif status is SettleStatus.DONE:
                host.learn(copy_id, record, remaining)
        if done:
            kind = EventKind.ACKED if is_ack else EventKind.RELEASED
            self._context.journal.record(kind, served.name, done, self._context.clock.wall())
        for host, held_here in acked.items():
            host.settle(held_here, oldest)
        await self._context.router.until_sent()
        for host in unidentified:  # no record prevents their redelivery, so send their acks before the answer
            if host.channel is not None:
                await host.channel.flush()
