"""Discards messages whose time to live is over instead of handing them out.

A leased message does not expire. So the store first decides whether the message is leased. If it is not leased, the
store settles it, which makes the receipt handles of earlier leases void. If the message has no record, the store writes
none: if the broker delivers the message again after a crash, it is discarded again. After the store's answer, the
discard is written to the journal, and the message is acked at the broker (decision 8).
"""

import asyncio
import logging
from collections.abc import Sequence

from popgate.domain.errors import RetryLater
from popgate.domain.lease import SETTLED_STATES, SettleAction, SettleStatus
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Found, found_so, note_found_settled
from popgate.engine.lease.pop_events import PopEvents
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry

_log = logging.getLogger(__name__)

BATCH_COUNT_MAX = 1000


class Discarder:
    """Discards expired messages of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup, pops: PopEvents) -> None:
        self._context = context
        self._group = group
        self._pops = pops
        self._expired: list[BufferedMessage] = []
        self._under_way = 0

    def is_busy(self) -> bool:
        """Whether messages are being discarded. Messages behind them may become ready when this is done."""
        return bool(self._expired or self._under_way)

    def takes(self, buffered: BufferedMessage) -> bool:
        """Return whether a ready message has expired.

        If so, it becomes DISCARDING and is discarded in the background.
        """
        message = buffered.message
        if message is None or message.expires_at is None or message.expires_at > self._context.clock.wall():
            return False
        buffered.enter(MessageState.DISCARDING)
        if not self._expired:
            asyncio.get_running_loop().call_soon(self._start)
        self._expired.append(buffered)
        return True

    def _start(self) -> None:
        """Discard together all expired messages that were found in this turn of the event loop, to save writes."""
        expired, self._expired = self._expired, []
        self._context.background.spawn(self._discard(expired), name=f"discard {self._group.name}")

    async def _discard(self, expired: Sequence[BufferedMessage]) -> None:
        self._under_way += 1
        try:
            for start in range(0, len(expired), BATCH_COUNT_MAX):
                batch = expired[start : start + BATCH_COUNT_MAX]
                while batch := [buffered for buffered in batch if buffered.state is MessageState.DISCARDING]:
                    try:
                        await self._settle(batch)
                    except RetryLater as error:
                        _log.warning("expired messages could not be discarded yet", extra={"error": error.detail})
                        await asyncio.sleep(error.retry_after_seconds)
        finally:
            self._under_way -= 1
            self._pops.changed()

    async def _settle(self, batch: Sequence[BufferedMessage]) -> None:
        answers = await self._context.leases.settle(
            [
                SettleEntry(self._group.queue(buffered), buffered.copy_id, buffered.lease_id, SettleAction.DISCARD)
                for buffered in batch
            ]
        )
        discarded: list[BufferedMessage] = []
        here: list[tuple[BufferedMessage, float]] = []
        known: list[Found] = []
        for buffered, (status, remaining, record, settled_at) in zip(batch, answers, strict=True):
            if status is SettleStatus.DONE:  # if the message was dropped, its next delivery is acked silently
                discarded.append(buffered)
            if buffered.state is MessageState.DROPPED:
                continue  # the channel or the queue of the message has ended
            if status is SettleStatus.DONE:
                here.append((buffered, settled_at))
            elif record is None:
                discarded.append(buffered)
                here.append((buffered, settled_at))
            else:  # another proxy has leased or settled the message
                if record.state in SETTLED_STATES:
                    known.append(found_so(buffered.copy_id, buffered.queue_index, record, buffered))
                self._group.host(buffered).conform(buffered, record, remaining)
        self._context.journal.record(EventKind.DISCARDED, self._group.name, discarded, self._context.clock.wall())
        note_found_settled(self._context, self._group.name, known)
        for buffered, settled_at in here:
            self._group.host(buffered).settle([buffered], settled_at)
