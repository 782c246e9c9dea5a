"""Claims one queue in the store, and claims it again if the store has lost its data.

The claim has an epoch. While the epoch is 0, no message of the queue may be handed out.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from popgate.domain.errors import PopgateError, StateUnavailable
from popgate.domain.names import BrokerQueue, CopyId, QueueId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.recovered_records import recovered_records
from popgate.engine.queue.state import QueueState
from popgate.ports.journal import EventKind
from popgate.ports.leases import LoadedRecord

_log = logging.getLogger(__name__)


class Claimed(NamedTuple):
    """The result of a claim.

    ``records``: the lease records of the queue that the store returned. ``is_restored``: whether this proxy has instead
    written its own records back to the store. ``records`` is then empty.
    """

    records: list[LoadedRecord]
    is_restored: bool


class QueueClaim:
    """This proxy's claim of one queue.

    ``is_owned``: whether this proxy is the owner of the queue, and so should claim it. ``epoch``: the epoch of the
    claim, or 0 if there is no valid claim. ``lost_epoch``: the epoch of the claim when the store lost its data, until
    the records are written back; otherwise 0.
    """

    def __init__(self, context: EngineContext, queue: QueueId, broker_queue: BrokerQueue, state: QueueState) -> None:
        self.is_owned = context.router.cluster is None
        self.epoch = 0
        self.lost_epoch = 0
        self._context = context
        self._queue = queue
        self._broker_queue = broker_queue
        self._state = state
        self._losses = 0
        self._lock = asyncio.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether the store has lost the queue's records, and they have not been written back yet."""
        return self.lost_epoch != 0

    def data_lost(self) -> None:
        """Set the epoch to 0 until the queue is claimed again, because the store has lost its data."""
        self._losses += 1
        if self.epoch:
            self.lost_epoch, self.epoch = self.epoch, 0

    def release(self) -> None:
        """End the claim, because this proxy no longer serves the queue."""
        if epoch := self.epoch or self.lost_epoch:
            self._note(EventKind.QUEUE_RELEASED, epoch)
        self.epoch = self.lost_epoch = 0

    async def take(self) -> Claimed | None:
        """Claim the queue if this proxy owns it and has no valid epoch. Return None if nothing was claimed. Idempotent.

        Only one claim runs at a time, because a second claim would make the epoch of the first one void. Raises:
        StateUnavailable.
        """
        async with self._lock:
            if self.epoch or not self.is_owned:
                return None
            if self.lost_epoch:
                return await self._restore()
            losses = self._losses
            epoch = await self._context.leases.claim(self._broker_queue)
            records = await self._context.leases.load(self._broker_queue)
            if not self._is_taken(losses):
                return None
            self.epoch = epoch
            self._note(EventKind.QUEUE_CLAIMED, epoch)
            return Claimed(records, is_restored=False)

    async def forget(self, copy_ids: Sequence[CopyId]) -> None:
        """Delete the records of dropped transient messages."""
        try:
            await self._context.leases.forget(self._broker_queue, copy_ids)
        except PopgateError as error:
            _log.warning("records of ended deliveries stay until the next claim", extra={"error": error.detail})

    async def _restore(self) -> Claimed | None:
        losses, clock = self._losses, self._context.clock
        records = recovered_records(self._state, now=clock.monotonic(), wall=clock.wall())
        epoch = await self._context.leases.restore(self._broker_queue, records, above=self.lost_epoch)
        if not self._is_taken(losses):
            return None
        _log.warning("records are written back", extra={"queue": self._broker_queue, "records": len(records)})
        self.epoch, self.lost_epoch = epoch, 0
        self._note(EventKind.QUEUE_CLAIMED, epoch)
        return Claimed([], is_restored=True)

    def _is_taken(self, losses: int) -> bool:
        """Return whether this proxy still owns the queue after a claim.

        Raises: StateUnavailable if the store lost its data during the claim.
        """
        if self.is_owned and losses != self._losses:
            raise StateUnavailable("the store has lost its data while a queue was being claimed")
        return self.is_owned

    def _note(self, kind: EventKind, epoch: int) -> None:
        topic, group, number = self._queue
        wall = self._context.clock.wall()
        self._context.journal.note(kind, topic, wall, group=group, queue_index=number, detail=str(epoch))
