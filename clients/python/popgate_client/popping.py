"""The pop loop of a consumer: how many messages to ask for, when to repeat, and how to recover an interrupted pop.

Owns the one pop that is under way. `working` handles the messages.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from popgate_client.counters import Counters
from popgate_client.errors import GroupNotFound, PopgateError, RetryLater, ServerFault, TopicNotFound, WrongMode
from popgate_client.exchange import new_attempt_id
from popgate_client.facts import FactLogger, cause_of
from popgate_client.lengths import LeaseLength
from popgate_client.message import Message, SettleResult
from popgate_client.outages import Outage
from popgate_client.retrying import Backoff
from popgate_client.wire import ENTRIES_MAX
from popgate_client.working import HandlerPool

logger = FactLogger(__name__)

RECLAIM_SECONDS = 3.0
"""Seconds that a stop waits for the messages that an interrupted pop may have leased."""

SWITCH_SECONDS = 1.0
"""Maximum seconds before a pop is repeated while the group is in another mode."""


@dataclass(slots=True)
class PendingPop:
    """A pop that has not been answered. It is repeated until it is, because otherwise its messages would stay invisible
    until their leases end."""

    max_messages: int
    acks: Sequence[str] = ()
    """Receipt handles that the server acks before the pop."""
    attempt_id: str = field(default_factory=new_attempt_id)
    repeated: bool = False
    attempts: int = 0
    """Number of failed attempts."""


class Popped(NamedTuple):
    """The answer to a pop. `acked` has one result for each of its acks; None: the server can't ack with a pop."""

    messages: list[Message]
    acked: list[SettleResult] | None


PopCall: TypeAlias = Callable[[PendingPop, float], Awaitable[Popped]]
"""One pop with a wait in seconds; raises PopgateError."""


class AcksOfPops(Protocol):
    """Has the acks that pops take along."""

    def take_along(self) -> list[str]: ...
    def answered(self, handles: Sequence[str], results: Sequence[SettleResult]) -> None: ...

    def left_behind(self, handles: Sequence[str]) -> None: ...


class ModeFollower(Protocol):
    """Knows the consume mode, and decides what to do when it is not pop."""

    def noted(self, mode: str | None) -> None: ...

    def is_elsewhere(self, error: PopgateError) -> bool: ...


class Popper:
    """Pops messages for a handler pool until it is cancelled or rejected."""

    def __init__(
        self,
        call: PopCall,
        handlers: HandlerPool,
        acks: AcksOfPops,
        *,
        wait_seconds: float,
        length: LeaseLength,
        counters: Counters,
        chance: random.Random,
    ) -> None:
        self._call = call
        self._handlers = handlers
        self._acks = acks
        self._wait_seconds = wait_seconds
        self._counters = counters
        self._length = length
        self._backoff = Backoff(chance)
        self._outage = Outage(logger)
        self._pending: PendingPop | None = None

    async def run(self, follower: ModeFollower) -> PopgateError:
        """Pop until the server rejects the pops permanently or the mode changes; return that error. After a
        cancellation `reclaim` recovers the pop."""
        clock = asyncio.get_running_loop().time
        while True:
            free = await self._handlers.free_places()
            if self._pending is None:
                self._pending = PendingPop(min(free, ENTRIES_MAX), self._acks.take_along())
            pending = self._pending
            started_at = clock()
            try:
                messages = await self._pop(pending, self._wait_seconds)
                delayed = bool(messages) and await self._length.refresh()
            except PopgateError as error:
                self._leave_acks(pending)
                if isinstance(error, WrongMode):
                    follower.noted(error.mode)
                if follower.is_elsewhere(error) or not _passes(error):
                    self._pending = None
                    return error
                await self._back_off(pending, error)
                continue
            self._pending = None
            self._outage.succeeded()
            follower.noted("pop")
            self._handlers.take(
                messages, lease_seconds=self._length.seconds, extend_at_once=pending.repeated or delayed
            )
            if messages or clock() - started_at > self._wait_seconds / 2:
                self._backoff.reset()
            else:  # a server that is shutting down answers long polls early: don't hammer it
                await asyncio.sleep(self._backoff.next_seconds(lease_seconds=self._length.seconds))

    async def reclaim(self) -> list[Message]:
        """Repeat an interrupted pop to get the messages that it leased; a second call returns nothing.

        The server keeps the leases of an unanswered pop for its repeat (decision 9), so no other client would get
        these messages before the leases end.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        try:
            async with asyncio.timeout(RECLAIM_SECONDS):
                return await self._repeat(pending)
        except (PopgateError, TimeoutError) as error:
            logger.info("an interrupted pop could not be repeated", extra={"cause": cause_of(error)})
            self._leave_acks(pending)
            return []

    async def _repeat(self, pending: PendingPop) -> list[Message]:
        """Repeat a pop without a wait until it is answered. Raises: PopgateError if it will not be."""
        self._backoff.reset()
        while True:
            try:
                return await self._pop(pending, 0.0)
            except PopgateError as error:
                if not isinstance(error, RetryLater | ServerFault):
                    raise
            await asyncio.sleep(self._backoff.next_seconds(lease_seconds=RECLAIM_SECONDS))

    async def _pop(self, pending: PendingPop, wait_seconds: float) -> list[Message]:
        """Pop, and report the results of the acks that the pop has taken along. Raises: PopgateError."""
        messages, acked = await self._call(pending, wait_seconds)
        if acked is None:
            self._leave_acks(pending)
        else:
            self._acks.answered(pending.acks, acked)
        return messages

    def _leave_acks(self, pending: PendingPop) -> None:
        """Let the acks be sent without a pop, because this pop may take long to succeed."""
        handles, pending.acks = pending.acks, ()
        self._acks.left_behind(handles)

    async def _back_off(self, pending: PendingPop, error: PopgateError) -> None:
        pending.repeated = True
        if isinstance(error, WrongMode):  # not a failure: the mode may change back soon
            await asyncio.sleep(self._backoff.next_seconds(lease_seconds=SWITCH_SECONDS * 6))
            return
        self._counters.calls_failed += 1
        asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
        pause = self._backoff.next_seconds(asked_for, lease_seconds=self._length.seconds)
        pending.attempts += 1
        facts = {"attempt": pending.attempts, "again_in_seconds": round(pause, 2), "cause": cause_of(error)}
        self._outage.failed("a pop failed and will be repeated", facts)
        await asyncio.sleep(pause)


def _passes(error: PopgateError) -> bool:
    """Whether the same pop may succeed later, so that the consumer waits."""
    return isinstance(error, RetryLater | ServerFault | WrongMode | TopicNotFound | GroupNotFound)
