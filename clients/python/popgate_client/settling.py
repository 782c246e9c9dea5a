"""Sends acks, releases and rejects to the server, without delaying the handlers.

Owns the settlements that are decided but not yet answered. While one round of calls is under way, settlements for the
next one collect, so that batches grow with the load. The next pop takes acks along, which saves their request. A
settlement that could not be delivered is repeated until its lease has ended: until then no other client can have got
the message.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from popgate_client.counters import Counters
from popgate_client.errors import PopgateError, RetryLater
from popgate_client.exchange import UNAVAILABLE
from popgate_client.facts import FactLogger, cause_of
from popgate_client.handling import Settlement
from popgate_client.leases import SettleCall
from popgate_client.lengths import LeaseLength
from popgate_client.message import SettleResult, Verb
from popgate_client.retrying import Backoff
from popgate_client.wire import ENTRIES_MAX

logger = FactLogger(__name__)

ALONG_SECONDS = 0.05
"""Seconds for which settlements wait for a pop that can take them along."""
ANSWER_SECONDS_MAX = 2.0
"""Maximum seconds until an ack that a pop has taken along is sent without it: the pop may wait for messages for long,
or its connection may be dead."""
SETTLEMENTS_PENDING_MAX = 2_048
"""Maximum number of pending settlements; at this number the consumer pops no more messages."""


@dataclass(slots=True, eq=False)
class _Pending:
    settlement: Settlement
    lease_ends_at: float
    backoff: Backoff
    try_at: float = field(default=0.0)


class Settler:
    """Accepts settlements at once and delivers them in batches."""

    def __init__(
        self,
        call: SettleCall,
        length: LeaseLength,
        counters: Counters,
        chance: random.Random,
        *,
        goes_along: Callable[[], bool] = lambda: False,
    ) -> None:
        """`goes_along` returns whether pops can take acks along."""
        self._call = call
        self._goes_along = goes_along
        self._length = length
        self._counters = counters
        self._chance = chance
        self._pending: dict[str, _Pending] = {}
        self._sent: set[str] = set()
        """The receipt handles of settlements that were sent without a pop, and not answered yet."""
        self._arrived = asyncio.Event()
        self._finishing = False

    @property
    def is_full(self) -> bool:
        """Whether too many settlements are pending to accept more work."""
        return len(self._pending) >= SETTLEMENTS_PENDING_MAX

    def submit(self, settlement: Settlement, lease_ends_at: float) -> None:
        """Schedule a settlement for delivery. `lease_ends_at` is a time of the event loop's clock."""
        handle = settlement.entry.receipt_handle
        self._pending[handle] = _Pending(settlement, lease_ends_at, Backoff(self._chance))
        self._arrived.set()

    def take_along(self) -> list[str]:
        """Return the receipt handles of acks that the next pop sends. Call `answered` or `left_behind` with them.

        They are sent without the pop, too, if it is not answered soon.
        """
        if not self._goes_along():
            return []
        now = asyncio.get_running_loop().time()
        acks = (
            handle
            for handle, pending in self._pending.items()
            if pending.settlement.verb is Verb.ACK and pending.try_at <= now and handle not in self._sent
        )
        handles = list(islice(acks, ENTRIES_MAX))
        for handle in handles:
            self._pending[handle].try_at = now + min(ANSWER_SECONDS_MAX, self._length.seconds / 6)
        return handles

    def answered(self, handles: Sequence[str], results: Sequence[SettleResult]) -> None:
        """Record the results of acks that a pop has taken along."""
        found = {
            self._pending[handle]: one for handle, one in zip(handles, results, strict=True) if handle in self._pending
        }
        self._apply(Verb.ACK, list(found), list(found.values()))
        self._arrived.set()

    def left_behind(self, handles: Sequence[str]) -> None:
        """Send the acks of a pop that was not answered. The server may have made them: then it says so."""
        for handle in handles:
            if handle in self._pending:
                self._pending[handle].try_at = 0.0
        self._arrived.set()

    def finish(self) -> None:
        """Let `run` return when all settlements are answered; try each of them again now. Nothing may be submitted
        afterwards."""
        self._finishing = True
        for pending in self._pending.values():
            pending.try_at = 0.0
        self._arrived.set()

    async def run(self) -> None:
        """Deliver settlements until `finish`. A cancellation abandons the rest."""
        try:
            while self._pending or not self._finishing:
                await self._round()
        finally:
            if self._pending:
                self._counters.settlements_abandoned += len(self._pending)
                logger.warning("settlements were abandoned at the stop", extra={"count": len(self._pending)})

    async def _round(self) -> None:
        """Send the settlements that are due, then wait for more or for the next repeat."""
        if self._pending and self._goes_along() and not self._finishing:
            await asyncio.sleep(ALONG_SECONDS)
        self._arrived.clear()
        now = asyncio.get_running_loop().time()
        due = [pending for pending in self._own() if pending.try_at <= now]
        async with asyncio.TaskGroup() as calls:
            for verb in Verb:
                batch = list(islice((each for each in due if each.settlement.verb is verb), ENTRIES_MAX))
                if batch:
                    self._sent.update(pending.settlement.entry.receipt_handle for pending in batch)
                    calls.create_task(self._deliver(verb, batch), name=f"popgate-{verb}")
        now = asyncio.get_running_loop().time()
        next_try = min((pending.try_at for pending in self._own()), default=None)
        if next_try is None and self._finishing and not self._sent:
            return  # the event that `finish` set may have been cleared above, and nothing more will arrive
        if next_try is None or next_try > now:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_try):
                    await self._arrived.wait()

    def _own(self) -> Iterator[_Pending]:
        """Return the pending settlements that are not being sent."""
        return (pending for handle, pending in self._pending.items() if handle not in self._sent)

    async def _deliver(self, verb: Verb, batch: Sequence[_Pending]) -> None:
        asked_for = 0.0
        try:
            results = await self._call(verb, [pending.settlement.entry for pending in batch])
        except PopgateError as error:
            self._counters.calls_failed += 1
            facts = {"verb": verb.value, "count": len(batch), "message_id": batch[0].settlement.message_id}
            logger.warning("settlements could not be delivered", extra={**facts, "cause": cause_of(error)})
            results = [UNAVAILABLE] * len(batch)
            asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
        finally:
            self._sent.difference_update(pending.settlement.entry.receipt_handle for pending in batch)
        self._apply(verb, batch, results, asked_for)

    def _apply(
        self, verb: Verb, batch: Sequence[_Pending], results: Sequence[SettleResult], asked_for: float = 0.0
    ) -> None:
        now = asyncio.get_running_loop().time()
        for pending, result in zip(batch, results, strict=True):
            if self._pending.get(pending.settlement.entry.receipt_handle) is not pending:
                continue  # another answer has concluded it
            if result.status != UNAVAILABLE.status:
                self._conclude(pending, result)
            elif now < pending.lease_ends_at:
                lease_seconds = self._length.seconds
                at_least = min(asked_for, lease_seconds / 6)  # there must be time for several tries
                pending.try_at = now + pending.backoff.next_seconds(at_least, lease_seconds=lease_seconds)
            else:
                self._forget(pending)
                self._counters.settlements_abandoned += 1
                logger.warning("a settlement was abandoned: its lease has ended", extra=_facts(pending))

    def _conclude(self, pending: _Pending, result: SettleResult) -> None:
        self._forget(pending)
        if not result.ok:
            self._counters.leases_lost += 1
            logger.warning(
                "a lease had ended before it was settled",
                extra={**_facts(pending), "status": result.status},
            )
            return
        match pending.settlement.verb:
            case Verb.ACK:
                self._counters.acked += 1
            case Verb.REJECT:
                self._counters.rejected += 1
            case _:
                self._counters.released += 1

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.settlement.entry.receipt_handle]


def _facts(pending: _Pending) -> dict[str, str | None]:
    return {"verb": pending.settlement.verb.value, "message_id": pending.settlement.message_id}
