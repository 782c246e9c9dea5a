"""Messages whose time to live is over: discarded instead of handed out.

A leased message does not expire. So the store is asked first: it settles what nobody has leased, and a receipt handle
of an earlier lease is void from then on; what it never knew needs no record, for a copy that comes again after a crash
is found expired again. Then the message is acked at the broker and journaled (design: section 2).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from popgate.domain.errors import RetryLater
from popgate.domain.lease import SETTLED_STATES, SettleAction, SettleStatus
from popgate.domain.names import Subscription
from popgate.engine.held import Held, HeldState
from popgate.engine.room import Room
from popgate.engine.subjects import Found, found_so, note_found_settled
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry

_log = logging.getLogger(__name__)

BATCH_COUNT_MAX = 1000


class Discarder:
    """Discards expired messages of one subscription. ``changed`` is called when some are out of the way."""

    def __init__(self, room: Room, subscription: Subscription, changed: Callable[[], None]) -> None:
        self._room = room
        self._subscription = subscription
        self._changed = changed
        self._expired: list[Held] = []
        self._under_way = 0

    def is_busy(self) -> bool:
        """Whether some are on their way out: others may stand behind them."""
        return bool(self._expired or self._under_way)

    def takes(self, held: Held) -> bool:
        """Whether a ready message has expired. It is then on its way out, and nobody else's business."""
        message = held.message
        if message is None or message.expires_at is None or message.expires_at > self._room.clock.wall():
            return False
        held.state = HeldState.DISCARDING
        if not self._expired:
            asyncio.get_running_loop().call_soon(self._start)
        self._expired.append(held)
        return True

    def _start(self) -> None:
        """Those that were found together cost one write."""
        expired, self._expired = self._expired, []
        self._room.background.spawn(self._discard(expired), name=f"discard {self._subscription}")

    async def _discard(self, expired: Sequence[Held]) -> None:
        self._under_way += 1
        try:
            for start in range(0, len(expired), BATCH_COUNT_MAX):
                batch = expired[start : start + BATCH_COUNT_MAX]
                while batch := [held for held in batch if held.state is HeldState.DISCARDING]:
                    try:
                        await self._settle(batch)
                    except RetryLater as error:
                        _log.warning("expired messages stay for now", extra={"error": error.detail})
                        await asyncio.sleep(error.retry_after_seconds)
        finally:
            self._under_way -= 1
            self._changed()

    async def _settle(self, batch: Sequence[Held]) -> None:
        answers = await self._room.leases.settle(
            [SettleEntry(held.host.broker_queue, held.copy_id, held.lease_id, SettleAction.DISCARD) for held in batch]
        )
        discarded: list[Held] = []
        here: list[tuple[Held, float]] = []
        known: list[Found] = []
        for held, (status, remaining, record, settled_at) in zip(batch, answers, strict=True):
            if status is SettleStatus.DONE:  # what was dropped meanwhile comes again as settled, silently
                discarded.append(held)
            if held.state is HeldState.DROPPED:
                continue  # with its channel or its queue
            if status is SettleStatus.DONE:
                here.append((held, settled_at))
            elif record is None:
                discarded.append(held)
                here.append((held, settled_at))
            else:  # somebody has leased or settled it after all
                if record.state in SETTLED_STATES:
                    known.append(found_so(held.copy_id, held.queue_index, record, held))
                held.host.conform(held, record, remaining)
        self._room.journal.record(EventKind.DISCARDED, self._subscription, discarded, self._room.clock.wall())
        note_found_settled(self._room, self._subscription, known)
        for held, settled_at in here:
            held.host.settle([held], settled_at)
