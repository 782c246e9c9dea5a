"""Ends expired leases. Their messages become ready again, at once or after the delay of the retry policy."""

import asyncio
from collections.abc import Sequence

from popgate.domain.attempts import AttemptEnd, Cause, described
from popgate.domain.errors import RetryLater
from popgate.domain.lease import SettleAction
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry


class ExpiredLeases:
    """Ends the expired leases of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup) -> None:
        self._context = context
        self._group = group
        self._expired: list[BufferedMessage] = []

    def add(self, buffered: BufferedMessage) -> None:
        """End the lease of ``buffered``, which has expired. Leases that expire together are ended in one write."""
        if not self._expired:
            asyncio.get_running_loop().call_soon(self._end)
        self._expired.append(buffered)

    def _end(self) -> None:
        now = self._context.clock.monotonic()
        ended = [
            buffered
            for buffered in dict.fromkeys(self._expired)
            if buffered.state is MessageState.LEASED and buffered.deadline <= now
        ]
        self._expired = []
        retry = self._group.policy.retry
        self._context.journal.record(EventKind.EXPIRED, self._group.name, ended, self._context.clock.wall())
        delayed: list[BufferedMessage] = []
        for buffered in ended:
            if retry.delay_seconds(buffered.delivery_count) > 0:
                delayed.append(buffered)
            else:
                self._group.expired_clients.note(buffered, now)
                self._group.host(buffered).make_ready([buffered])
        if delayed:
            self._context.background.spawn(self._delay_retries(delayed), name="delay retries")

    async def _delay_retries(self, ended: Sequence[BufferedMessage]) -> None:
        """Write the retry delay into the records. Repeat the write while the store is unavailable."""
        retry = self._group.policy.retry
        entries = [
            SettleEntry(
                self._group.queue(buffered),
                buffered.copy_id,
                buffered.lease_id,
                SettleAction.EXPIRE,
                retry.delay_seconds(buffered.delivery_count),
                reason=described("", AttemptEnd.EXPIRED, Cause(client=buffered.client or "")),
            )
            for buffered in ended
        ]
        while True:
            try:
                answers = await self._context.leases.settle(entries)
                break
            except RetryLater as error:
                await asyncio.sleep(error.retry_after_seconds)
        for buffered, (_, remaining, record, _) in zip(ended, answers, strict=True):
            if buffered.state is not MessageState.LEASED:
                continue
            if record is None:
                self._group.host(buffered).make_ready([buffered])
            else:
                self._group.host(buffered).conform(buffered, record, remaining)
