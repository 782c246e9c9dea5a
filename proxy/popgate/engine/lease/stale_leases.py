"""Releases stale leases of the queues that this proxy owns.

A lease is stale if the consume mode in which it was granted has ended, or if its queue is no longer assigned to its
pull client. The owner of a queue checks its leases when the mode or the assignment changes, and when it takes over the
queue. It also checks a lease that arrives late from a grant or from another proxy. When a stale lease is released, its
receipt handle becomes void, and its message becomes ready again.
"""

import asyncio
from collections.abc import Iterable, Sequence

from popgate.domain import modes
from popgate.domain.attempts import AttemptEnd, Cause, described
from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.domain.lease import LeaseRecord, RecordState, SettleAction, SettleStatus
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import NO_LEASE, BufferedMessage, MessageState
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry

BATCH = 1_000
PATIENCE_SECONDS = 5.0
SESSION_ENDED, MODE_CHANGED = "the pull session ended", "the consume mode changed"
"""Why an attempt ended, as a dead letter shows it."""
OVERTAKEN_SECONDS = 0.25
"""Seconds before the next attempt if the store has a later consume mode than this proxy, in which the leases may be
valid."""


class StaleLeases:
    """Releases the stale leases of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup) -> None:
        self._context = context
        self._group = group
        self._found: list[BufferedMessage] = []
        self._are_given_back = asyncio.Event()
        self._are_given_back.set()

    def look_at(self, many: Iterable[BufferedMessage]) -> None:
        """Find the stale leases of ``many``, and release them in the background.

        Messages of one queue that were leased together need only one check.
        """
        found: list[BufferedMessage] = []
        lease_id, queue_index, is_good = NO_LEASE, -1, True
        for buffered in many:
            if buffered.state is MessageState.LEASED:
                if buffered.lease_id != lease_id or buffered.queue_index != queue_index:
                    lease_id, queue_index, is_good = (
                        buffered.lease_id,
                        buffered.queue_index,
                        self._group.is_good(buffered),
                    )
                if not is_good:
                    found.append(buffered)
        if found and self._are_given_back.is_set():
            self._are_given_back.clear()
            self._context.background.spawn(self._give_back(), name=f"give back leases of {self._group.name}")
        self._found += found

    def were_granted(self, many: Sequence[BufferedMessage]) -> None:
        """Release the leases of messages that were leased together, if they are stale.

        Only the first lease is checked, because either all of them are stale or none.
        """
        first = next((buffered for buffered in many if buffered.state is MessageState.LEASED), None)
        if first is not None and not self._group.is_good(first):
            self.look_at(many)

    async def given_back(self) -> None:
        """Wait until all stale leases that were found are released.

        Raises: StateUnavailable after ``PATIENCE_SECONDS``.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._are_given_back.wait()
        except TimeoutError as error:
            raise StateUnavailable("ended leases have not been given back yet") from error

    def _is_stale(self, buffered: BufferedMessage) -> bool:
        return buffered.state is MessageState.LEASED and not self._group.is_good(buffered)

    async def _give_back(self) -> None:
        await asyncio.sleep(0)  # so that leases that are found together need one write
        while self._found:
            found, self._found[:] = self._found[:BATCH], self._found[BATCH:]
            stale_leases = [buffered for buffered in dict.fromkeys(found) if self._is_stale(buffered)]
            if stale_leases and not await self._release(stale_leases):
                self._found += stale_leases
        self._are_given_back.set()

    async def _release(self, stale_leases: Sequence[BufferedMessage]) -> bool:
        """Release leases. Return False if the store is unavailable, or has a later consume mode than this proxy.

        The leases may be valid in the later mode, so the store does not release them.
        """
        under = self._group.name, self._group.spec.mode_generation
        entries = [
            SettleEntry(
                self._group.queue(buffered),
                buffered.copy_id,
                buffered.lease_id,
                SettleAction.RELEASE,
                reason=self._attempt(buffered),
                under=under,
            )
            for buffered in stale_leases
        ]
        try:
            answers = await self._context.leases.settle(entries)
        except RetryLater as error:
            await asyncio.sleep(error.retry_after_seconds)
            return False
        released: list[BufferedMessage] = []
        is_overtaken = False
        for buffered, entry, (status, remaining, record, _) in zip(stale_leases, entries, answers, strict=True):
            if buffered.state is not MessageState.LEASED or buffered.lease_id != entry.lease_id:
                continue
            if status is SettleStatus.LOST and record is not None and _is_leased_so(record, entry):
                is_overtaken = True
                continue
            if status is SettleStatus.DONE or record is None:  # otherwise another proxy released it
                released.append(buffered)
            if record is None:
                self._group.host(buffered).make_ready([buffered])
            else:
                self._group.host(buffered).conform(buffered, record, remaining)
        self._context.journal.record(EventKind.RELEASED, self._group.name, released, self._context.clock.wall())
        if is_overtaken:
            await asyncio.sleep(OVERTAKEN_SECONDS)
        return not is_overtaken

    def _attempt(self, buffered: BufferedMessage) -> str:
        """Return how the record describes the attempt that the release of a stale lease ends."""
        is_session = self._group.is_pulled and modes.is_pulled(buffered.lease_id)
        why = SESSION_ENDED if is_session else MODE_CHANGED
        return described("", AttemptEnd.RELEASED, Cause(client=buffered.client or ""), attempt_reason=why)


def _is_leased_so(record: LeaseRecord, entry: SettleEntry) -> bool:
    return record.state is RecordState.LEASED and record.lease_id == entry.lease_id
