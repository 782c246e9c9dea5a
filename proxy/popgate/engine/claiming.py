"""The claim of one queue: its epoch, taken and loaded, and taken once more where the store has lost its data.

Owns when the epoch of a host is good. 0 means that nothing of its queue may be handed out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from popgate.domain.errors import StateUnavailable
from popgate.engine.remembering import remembered
from popgate.engine.room import Room
from popgate.ports.journal import EventKind

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost

_log = logging.getLogger(__name__)


class Claiming:
    """Of ``host``. ``restored`` is called when it may hand out again."""

    def __init__(self, room: Room, host: QueueHost, restored: Callable[[], None]) -> None:
        self._room = room
        self._host = host
        self._restored = restored
        self.lost_epoch = 0
        """The last epoch, while the store has lost the records of what is held."""
        self._losses = 0
        self._lock = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether the records have yet to be written back."""
        return self.lost_epoch != 0

    def data_lost(self) -> None:
        """The store has lost its data: the epoch is void until the queue is claimed again."""
        self._losses += 1
        if self._host.epoch:
            self.lost_epoch, self._host.epoch = self._host.epoch, 0

    def given_up(self) -> None:
        """The queue is not this proxy's any more, or nothing is known of it."""
        if epoch := self._host.epoch or self.lost_epoch:
            self._note(EventKind.QUEUE_RELEASED, epoch)
        self._host.epoch = self.lost_epoch = 0

    async def claim(self) -> None:
        """Have an epoch, and the records of the queue attached. Who comes while it is being claimed waits for that: two
        claims would overtake one another. Idempotent. Raises: StateUnavailable."""
        host = self._host
        async with self._lock:
            if host.epoch or not host.is_owned:
                return
            if self.lost_epoch:
                await self._restore()
                return
            losses = self._losses
            epoch = await self._room.leases.claim(host.broker_queue)
            records = await self._room.leases.load(host.broker_queue)
            if self._is_not_owned():
                return
            if losses != self._losses:
                raise StateUnavailable("the store has lost its data while a queue was taken")
            host.epoch = epoch
            self._note(EventKind.QUEUE_CLAIMED, epoch)
            for copy_id, record, remaining in records:
                host.attach(copy_id, record, remaining)

    async def _restore(self) -> None:
        host, losses = self._host, self._losses
        records = remembered(host, self._room.clock)
        epoch = await self._room.leases.restore(host.broker_queue, records, above=self.lost_epoch)
        if self._is_not_owned():
            return
        if losses != self._losses:
            raise StateUnavailable("the store has lost its data while they were written back")
        _log.warning("records are written back", extra={"queue": host.broker_queue, "records": len(records)})
        host.epoch, self.lost_epoch = epoch, 0
        self._note(EventKind.QUEUE_CLAIMED, epoch)
        self._restored()

    def _note(self, kind: EventKind, epoch: int) -> None:
        topic, group, number = self._host.queue
        wall = self._room.clock.wall()
        self._room.journal.note(kind, topic, wall, group=group, queue_index=number, detail=str(epoch))

    def _is_not_owned(self) -> bool:
        return not self._host.is_owned
