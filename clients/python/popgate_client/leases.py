"""The leases of running handlers: which are due for an extension, which are lost, and the task that extends them.

`LeaseBook` decides (the time is passed in); `Extender` makes the calls. Neither settles anything.

    held --due--> asked --extended--> held ... --lease_seconds_max--> no longer extended --its end--> lost
                     \\--expired, invalid--> lost          any of them --drop (the handler ended)--> gone

A lease is lost when the server says so, not when the server can't be reached: leases stay valid across a proxy's
restart, and a late ack gets a true answer.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from popgate_client.counters import Counters
from popgate_client.errors import PopgateError, RetryLater
from popgate_client.facts import FactLogger, cause_of
from popgate_client.lengths import LeaseLength
from popgate_client.message import Message, SettleEntry, SettleResult, Verb
from popgate_client.retrying import Backoff

logger = FactLogger(__name__)

SettleCall: TypeAlias = Callable[[Verb, Sequence[SettleEntry]], Awaitable[list[SettleResult]]]
"""Applies one verb to leases of the consumer's subscription; raises PopgateError."""

_EARLY = 1 / 12
"""Fraction of a lease's length by which it may be extended early, together with others that are due, to form
batches."""


@dataclass(slots=True)
class _Held:
    message: Message
    seconds: float
    extend_at: float
    ends_at: float
    extend_until: float


class LeaseBook:
    """Records the held leases and their ends. Times are seconds of one monotonic clock, passed in.

    A lease is extended by its length after a third of it, so that extensions may fail for a while. It is not extended
    later than `lease_seconds_max` after the pop.
    """

    def __init__(self, *, lease_seconds_max: float) -> None:
        self._lease_seconds_max = lease_seconds_max
        self._held: dict[str, _Held] = {}

    def hold(self, message: Message, now: float, seconds: float, *, extend_at_once: bool = False) -> None:
        """Record a lease of `seconds` from a pop. `extend_at_once`: it may have begun before now."""
        first = now if extend_at_once else now + seconds / 3
        self._held[message.receipt_handle] = _Held(
            message, seconds, first, now + seconds, now + self._lease_seconds_max
        )

    def drop(self, receipt_handle: str) -> float | None:
        """Remove a lease whose handler has ended. Return when the lease ends; None if it is not held."""
        held = self._held.pop(receipt_handle, None)
        return held.ends_at if held else None

    def ask_all(self, now: float) -> None:
        """Make all leases due now."""
        for held in self._held.values():
            held.extend_at = now

    def due(self, now: float) -> dict[str, float]:
        """Return the receipt handles to extend now, each with the length of its lease."""
        extendable = {handle: held for handle, held in self._held.items() if now < held.extend_until}
        if all(held.extend_at > now for held in extendable.values()):
            return {}
        return {
            handle: held.seconds for handle, held in extendable.items() if held.extend_at <= now + held.seconds * _EARLY
        }

    def overdue(self, now: float) -> list[str]:
        """Return the receipt handles that are no longer extended and whose lease has ended."""
        return [handle for handle, held in self._held.items() if held.extend_until <= now and held.ends_at <= now]

    def extended(self, receipt_handle: str, asked_at: float) -> None:
        """Record an extension that was requested at `asked_at`. A handle whose handler has ended is ignored."""
        if held := self._held.get(receipt_handle):
            held.extend_at = asked_at + held.seconds / 3
            held.ends_at = asked_at + held.seconds

    def lost(self, receipt_handle: str) -> Message | None:
        """Set the message's `lease_lost` and forget the lease. Return the message; None if its handler has ended."""
        held = self._held.pop(receipt_handle, None)
        if held is None:
            return None
        held.message.lease_lost.set()
        return held.message

    def rest_seconds(self, now: float, lease_seconds: float) -> float:
        """Return the time until something is due: at most a third of a lease, because new leases are due later."""
        moments = [held.extend_at if now < held.extend_until else held.ends_at for held in self._held.values()]
        return max(0.0, min([lease_seconds / 3, *(moment - now for moment in moments)]))


class Extender:
    """Extends every lease in the book, in batches, in one task, until it is cancelled."""

    def __init__(
        self, book: LeaseBook, length: LeaseLength, call: SettleCall, counters: Counters, chance: random.Random
    ) -> None:
        self._book = book
        self._length = length
        self._call = call
        self._counters = counters
        self._backoff = Backoff(chance)
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Extend leases until this is cancelled; raise only CancelledError."""
        clock = asyncio.get_running_loop().time
        while True:
            now = clock()
            for handle in self._book.overdue(now):
                self._lose(handle, "lease_seconds_max")
            due = self._book.due(now)
            shortest = min(due.values(), default=self._length.seconds)
            if not due or await self._extend(due, shortest, now):
                self._backoff.reset()
                pause = self._book.rest_seconds(clock(), self._length.seconds)
            else:
                pause = self._backoff.next_seconds(lease_seconds=shortest)
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()

    def wake(self) -> None:
        """Look at the book now, because a new lease is due at once."""
        self._woken.set()

    def ask_all(self) -> None:
        """Find out which leases are still valid, by extending all of them."""
        self._book.ask_all(asyncio.get_running_loop().time())
        self.wake()

    async def _extend(self, due: Mapping[str, float], shortest: float, now: float) -> bool:
        """Extend all of these leases; False if any must be extended again."""
        entries = [SettleEntry(receipt_handle=handle, invisibility_seconds=length) for handle, length in due.items()]
        try:
            async with asyncio.timeout(max(1.0, shortest / 3)):
                results = await self._call(Verb.EXTEND, entries)
        except (PopgateError, TimeoutError) as error:
            self._counters.calls_failed += 1
            logger.warning("leases could not be extended", extra={"count": len(due), "cause": cause_of(error)})
            if isinstance(error, RetryLater) and error.retry_after_seconds:
                await asyncio.sleep(min(error.retry_after_seconds, shortest / 6))
            return False
        for handle, result in zip(due, results, strict=True):
            if result.status == "extended":
                self._counters.extended += 1
                self._book.extended(handle, now)
            elif result.status != "unavailable":
                self._lose(handle, result.status)
        return all(result.status != "unavailable" for result in results)

    def _lose(self, handle: str, cause: str) -> None:
        message = self._book.lost(handle)
        if message is not None:
            self._counters.leases_lost += 1
            facts = {"message_id": message.message_id, "delivery_count": message.delivery_count, "cause": cause}
            logger.warning("a lease was lost during its handler", extra=facts)
