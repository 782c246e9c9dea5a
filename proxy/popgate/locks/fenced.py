"""Acquires a fenced lock: takes a free slot, or waits in the lines of all slots until one is granted.

    ask about each slot --free--> wait in its line --token--> ask for its slot queue, and ----------+--> held
          | all taken                 |  none came: another   write the holder's name               |
          v                           v  client was faster                                          | it is gone:
    wait in the lines of all <--------+----------- leave it, and return the token <-----------------+ was removed

Each attempt uses its own channel. An attempt that ends without a grant leaves all lines and returns all tokens.
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
from popgate.locks.lock_queues import Probe, TokenListener
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockChannel, LockDriver, Token
from popgate.runtime.background import Background

HAND_OUT_SECONDS = 0.25
"""Maximum seconds to wait for the token of a free slot. It arrives within milliseconds, unless another client was
faster."""
LOOK_SECONDS = 1.0
"""Seconds between two checks of a waiting client for new slots."""
AGAIN_SECONDS = 0.2
RENEW_SECONDS = 600.0
"""Seconds between two renewals: a third of RabbitMQ's consumer_timeout (30 minutes)."""


class FencedLock:
    """Acquires one lock for this client. ``holder`` is the client's name for administrators."""

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
        """The number of slots that this client knows; an administrator may change the number."""

    async def acquire(self, wait_seconds: float = 0.0) -> FencedGrant | None:
        """Acquire the lock. Return None if other clients hold all slots for all of ``wait_seconds``.

        If the call is cancelled, a slot that was just acquired is returned. Raises: LockNotFound, LockUnavailable.
        """
        deadline = self._clock.monotonic() + wait_seconds
        while True:
            try:
                return await self._attempt(deadline)
            except LockUnavailable:
                # A slot may have been removed with its queues, or a node of the broker may be lost. So try again.
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
            if grant is not None:  # the caller will not receive it
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
        channel, listener = attempt.forwarded()
        grant = FencedGrant(
            attempt.slot_of(token),
            channel,
            token,
            driver=self._driver,
            background=self._background,
            renew_seconds=self._renew_seconds,
        )
        listener.forward_to(grant)
        return grant

    async def _free_slot(self, attempt: "_Attempt") -> Token | None:
        """Return the token of a slot that no client holds or waits for, or None if there is no such slot."""
        for slot in self._slots():
            state = await attempt.probe.state(slot.token_queue)
            if state is not None and state.consumers:
                continue
            if state is None and self.kind is LockKind.MUTEX:  # it was deleted by hand, and a mutex has no slots to set
                await make_mutex(self._driver, slot, self._clock)
            await attempt.stand_in_line(slot)
            token = await attempt.token(HAND_OUT_SECONDS)
            if token is not None and await self._is_there(attempt, token):
                return token
            await attempt.leave(slot)
        return None

    async def _next_in_line(self, attempt: "_Attempt", seconds: float) -> Token | None:
        """Wait in the lines of all slots. Return the first token that arrives within ``seconds``, or None."""
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
        """Return whether the slot of ``token`` exists. If it does, write the holder's name. The slot of a mutex always
        exists."""
        slot = attempt.slot_of(token)
        says = {"holder": self._holder, "since": self._clock.wall(), "fencing_token": token_value(token)}
        if self.kind is LockKind.MUTEX:  # the holder of a mutex does not wait for the write
            naming = self._name_holder(attempt.channel, slot, orjson.dumps(says))
            self._background.spawn(naming, name=f"name holder {self.lock}")
            return True
        # The holder's name is written on the token's channel after the slot queue was seen. If the write succeeds, the
        # token was held all the time.
        if await attempt.probe.state(slot.slot_queue) is not None:
            return await attempt.channel.put(slot.holder_queue, orjson.dumps(says))
        self._slot_count = min(self._slot_count, slot.number - 1)
        return False

    async def _name_holder(self, channel: LockChannel, slot: Slot, says: bytes) -> None:
        """Write the holder of a mutex, if possible. The channel may already belong to a grant."""
        with contextlib.suppress(LockHeld, LockUnavailable):
            if not await channel.put(slot.holder_queue, says):
                await make_mutex(self._driver, slot, self._clock)
                await channel.put(slot.holder_queue, says)

    async def _look_for_slots(self, attempt: "_Attempt") -> None:
        """Count the slots whose numbers follow each other from 1 on. Create the slot of a mutex if it is missing."""
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
    """Holds the places of one client in the lines, all on one channel.

    Queries use another channel (``probe``), because the broker ends the channel if a queried queue does not exist.
    """

    def __init__(self, driver: LockDriver) -> None:
        self.probe = Probe(driver)
        self._driver = driver
        self._listener = TokenListener()
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
        """Wait in the line of ``slot``. Idempotent. Raises: LockUnavailable."""
        if slot.token_queue in self._slots:
            return
        if self._channel is None:
            self._channel = await self._driver.open(self._listener)
        if not await self._channel.wait_for_token(slot.token_queue):
            raise LockUnavailable(f"{slot.token_queue} is missing: set the slots of the lock again")
        self._slots[slot.token_queue] = slot

    async def ask(self, question: Awaitable[None]) -> None:
        """Send a query while the client waits in lines.

        If no answer arrives, the client keeps its places, because places are hard to regain while a node of the broker
        is lost.
        """
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await question
        except (TimeoutError, LockUnavailable):
            self.probe.forget()

    async def be_counted(self, slot: Slot) -> None:
        """Register as a waiting client, for administrators. Do nothing if the queue for that does not exist."""
        if await self.probe.state(slot.waiting_queue) is None:
            return
        channel = await self.probe.channel()
        if channel is not self._counted_on:
            await channel.wait_for_token(slot.waiting_queue)
            self._counted_on = channel

    async def leave(self, slot: Slot) -> None:
        if self._slots.pop(slot.token_queue, None) is not None and self._channel is not None:
            await self._channel.leave(slot.token_queue)
            self._listener.left(slot.token_queue)

    async def leave_all_but(self, token: Token) -> None:
        for queue, slot in list(self._slots.items()):
            if queue != token.queue:
                await self.leave(slot)

    async def token(self, seconds: float) -> Token | None:
        return await self._listener.token(seconds)

    @property
    def channel(self) -> LockChannel:
        """The channel on which the token arrived."""
        assert self._channel is not None, "a token came on it"
        return self._channel

    def forwarded(self) -> tuple[LockChannel, TokenListener]:
        """Transfer the channel to a grant."""
        channel, self._channel = self.channel, None
        return channel, self._listener
