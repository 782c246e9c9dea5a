"""Acquiring a fenced lock: find a slot that is free, or stand in the lines of all slots until one is handed over.

    ask about each slot --free--> stand in its line --token--> write the name into its slot queue --+--> held
          | all taken                 |  none came: somebody was faster                             |
          v                           v                                                             | it is gone:
    stand in the lines of all <-------+----------- leave it, and give back <------------------------+ was removed

Owns one attempt, on a channel of its own; whatever does not end in a grant gives everything back.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from types import TracebackType
from typing import Self

import orjson

from popgate.domain.errors import LockHeld, LockNotFound, LockUnavailable
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name
from popgate.locks.administration import make_mutex
from popgate.locks.grants import FencedGrant, token_value
from popgate.locks.lines import Line, Probe
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockChannel, LockDriver, Token
from popgate.runtime.background import Background

HAND_OUT_SECONDS = 0.25
"""A free slot's token comes within milliseconds; where it doesn't, somebody else was faster."""
LOOK_SECONDS = 1.0
"""How often a waiting client looks whether there are more slots by now."""
AGAIN_SECONDS = 0.2
RENEW_SECONDS = 600.0
"""A third of RabbitMQ's consumer_timeout (30 minutes)."""


class FencedLock:
    """One lock as this client sees it. ``holder`` is what administrators are shown."""

    def __init__(
        self,
        driver: LockDriver,
        lock: str,
        kind: LockKind,
        *,
        holder: str,
        clock: Clock,
        background: Background,
        chance: random.Random,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self.lock = checked_lock_name(lock)
        self.kind = kind
        self._driver = driver
        self._holder = holder
        self._clock = clock
        self._background = background
        self._chance = chance
        self._renew_seconds = renew_seconds
        self._slot_count = 0
        """As far as is known: slots come and go."""

    async def acquire(self, wait_seconds: float = 0.0) -> FencedGrant | None:
        """The lock, or None where others hold all slots for as long as ``wait_seconds``.

        A cancellation gives back whatever it had got. Raises: LockNotFound, LockUnavailable.
        """
        deadline = self._clock.monotonic() + wait_seconds
        while True:
            try:
                return await self._attempt(deadline)
            except LockUnavailable:
                # A slot may have been taken away with its queues, or its node been lost: then there is another chance.
                pause = AGAIN_SECONDS * self._chance.uniform(0.5, 1.5)
                if not self._driver.is_open or self._clock.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
                self._slot_count = 0

    async def _attempt(self, deadline: float) -> FencedGrant | None:
        grant: FencedGrant | None = None
        try:
            async with _Attempt(self._driver) as attempt:
                token = await self._token(attempt, deadline)
                if token is not None:
                    grant = self._granted(attempt, token)
        except BaseException:
            if grant is not None:  # nobody will know of it
                await grant.release()
            raise
        return grant

    async def _token(self, attempt: "_Attempt", deadline: float) -> Token | None:
        await self._look_for_slots(attempt)
        token = await self._free_slot(attempt)
        while token is None and (left := deadline - self._clock.monotonic()) > 0:
            token = await self._next_in_line(attempt, min(left, LOOK_SECONDS))
        if token is None and not self._slot_count:
            raise LockNotFound(f"lock {self.lock} has no slots: an administrator sets how many it has")
        return token

    def _granted(self, attempt: "_Attempt", token: Token) -> FencedGrant:
        channel, line = attempt.passed_on()
        grant = FencedGrant(
            attempt.slot_of(token),
            channel,
            token,
            driver=self._driver,
            background=self._background,
            renew_seconds=self._renew_seconds,
        )
        line.pass_to(grant)
        return grant

    async def _free_slot(self, attempt: "_Attempt") -> Token | None:
        """The token of a slot that nobody holds or waits for."""
        for slot in self._slots():
            state = await attempt.probe.state(slot.token_queue)
            if state is not None and state.consumers:
                continue
            if state is None and self.kind is LockKind.MUTEX:  # somebody has deleted it by hand, and nobody sets slots
                await make_mutex(self._driver, slot, self._clock)
            await attempt.stand_in_line(slot)
            token = await attempt.token(HAND_OUT_SECONDS)
            if token is not None and await self._is_there(attempt, token):
                return token
            await attempt.leave(slot)
        return None

    async def _next_in_line(self, attempt: "_Attempt", seconds: float) -> Token | None:
        """The first token that is handed over within ``seconds``, standing in the lines of all slots."""
        end = self._clock.monotonic() + seconds
        for slot in self._slots():
            await attempt.stand_in_line(slot)
        await attempt.ask(attempt.be_counted(Slot(self.lock, self.kind, 1)))
        while (left := end - self._clock.monotonic()) > 0:
            token = await attempt.token(left)
            if token is None:
                break
            if await self._is_there(attempt, token):
                await attempt.leave_all_but(token)
                return token
            await attempt.leave(attempt.slot_of(token))
        await attempt.ask(self._look_for_slots(attempt))
        return None

    async def _is_there(self, attempt: "_Attempt", token: Token) -> bool:
        """Whether the slot of ``token`` is there to be held; a mutex always is. Says then who holds it."""
        slot = attempt.slot_of(token)
        says = {"holder": self._holder, "since": self._clock.wall(), "fencing_token": token_value(token)}
        if self.kind is LockKind.MUTEX:  # its holder need not wait for that
            naming = self._name_holder(attempt.channel, slot, orjson.dumps(says))
            self._background.spawn(naming, name=f"name holder {self.lock}")
            return True
        # The second answer comes on the channel of the token: it was held still when the first one came.
        if await attempt.probe.state(slot.slot_queue) is not None:
            return await attempt.channel.put(slot.holder_queue, orjson.dumps(says))
        self._slot_count = min(self._slot_count, slot.number - 1)
        return False

    async def _name_holder(self, channel: LockChannel, slot: Slot, says: bytes) -> None:
        """Of a mutex, should that be possible: on a channel that may be a grant's by then."""
        with contextlib.suppress(LockHeld, LockUnavailable):
            if not await channel.put(slot.holder_queue, says):
                await make_mutex(self._driver, slot, self._clock)
                await channel.put(slot.holder_queue, says)

    async def _look_for_slots(self, attempt: "_Attempt") -> None:
        """Learn how many slots there are: those in a row from the first."""
        if self._slot_count and self.kind is not LockKind.SEMAPHORE:
            return
        slot = Slot(self.lock, self.kind, self._slot_count + 1)
        while slot.number <= SLOTS_MAX and await attempt.probe.state(slot.slot_queue) is not None:
            self._slot_count = slot.number
            if self.kind is not LockKind.SEMAPHORE:
                return
            slot = slot._replace(number=slot.number + 1)
        if self.kind is LockKind.MUTEX:
            await make_mutex(self._driver, slot, self._clock)
            self._slot_count = 1

    def _slots(self) -> list[Slot]:
        return [Slot(self.lock, self.kind, number) for number in range(1, self._slot_count + 1)]


class _Attempt:
    """Where one client stands in line, on one channel; and a second one for questions, which their answers may end."""

    def __init__(self, driver: LockDriver) -> None:
        self.probe = Probe(driver)
        self._driver = driver
        self._line = Line()
        self._channel: LockChannel | None = None
        self._counted_on: LockChannel | None = None
        self._slots: dict[str, Slot] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self.probe:
            if self._channel is not None:
                await self._channel.close()

    def slot_of(self, token: Token) -> Slot:
        return self._slots[token.queue]

    async def stand_in_line(self, slot: Slot) -> None:
        """Idempotent. Raises: LockUnavailable."""
        if slot.token_queue in self._slots:
            return
        if self._channel is None:
            self._channel = await self._driver.open(self._line)
        if not await self._channel.wait_for_token(slot.token_queue):
            raise LockUnavailable(f"{slot.token_queue} is missing: set the lock's slots anew")
        self._slots[slot.token_queue] = slot

    async def ask(self, question: Awaitable[None]) -> None:
        """Ask while standing in line, which is not left for want of an answer: while a node of the broker is lost,
        places are hard to get anew."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await question
        except (TimeoutError, LockUnavailable):
            self.probe.forget()

    async def be_counted(self, slot: Slot) -> None:
        """As one who waits: for administrators to see, and no reason to fail."""
        if await self.probe.state(slot.waiting_queue) is None:
            return
        channel = await self.probe.channel()
        if channel is not self._counted_on:
            await channel.wait_for_token(slot.waiting_queue)
            self._counted_on = channel

    async def leave(self, slot: Slot) -> None:
        if self._slots.pop(slot.token_queue, None) is not None and self._channel is not None:
            await self._channel.leave(slot.token_queue)
            self._line.left(slot.token_queue)

    async def leave_all_but(self, token: Token) -> None:
        for queue, slot in list(self._slots.items()):
            if queue != token.queue:
                await self.leave(slot)

    async def token(self, seconds: float) -> Token | None:
        return await self._line.token(seconds)

    @property
    def channel(self) -> LockChannel:
        """On which the token came."""
        assert self._channel is not None, "a token came on it"
        return self._channel

    def passed_on(self) -> tuple[LockChannel, Line]:
        """The channel is a grant's from now on."""
        channel, self._channel = self.channel, None
        return channel, self._line
