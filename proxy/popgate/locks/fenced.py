"""Acquires a fenced lock: a free slot, or the first slot that becomes free while the client waits for all slots.

    ask about each slot --free--> wait in its line --token--> ask for its slot queue, and ----------+--> held
          | all taken                 |  none came: another   write the holder's name               |
          v                           v  client was faster                                          | the slot
    wait in the lines of all <--------+----------- leave it, and return the token <-----------------+ was removed

The line of a slot is the list of consumers of its token queue. Each attempt uses its own channel. If an attempt ends
without a grant, its client leaves all lines, and returns all token messages that it has received.
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
"""Maximum seconds to wait for the token message of a free slot. It arrives within milliseconds, unless another client
was faster."""
LOOK_SECONDS = 1.0
"""Seconds after which a waiting client checks again whether slots were added. Also the maximum duration of such a
check."""
AGAIN_SECONDS = 0.2
RENEW_SECONDS = 600.0
"""Seconds between two renewals of a held lock. This is a third of RabbitMQ's consumer_timeout (30 minutes)."""


class FencedLock:
    """Acquires one fenced lock for this client. ``holder`` is the name of this client that administrators see."""

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
        """The number of slots that this client has found. An administrator may have changed the number since."""

    async def acquire(self, wait_seconds: float = 0.0) -> FencedGrant | None:
        """Acquire a slot of the lock. Return None if no slot becomes free within ``wait_seconds``.

        If the call is cancelled, a slot that was acquired at the same moment is released.

        Raises: LockNotFound if the lock has no slots, LockUnavailable.
        """
        deadline = self._clock.monotonic() + wait_seconds
        while True:
            try:
                return await self._attempt(deadline)
            except LockUnavailable:
                # The queues of a slot may have been deleted, or a node of the broker may have failed. So try again.
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
            if grant is not None:  # the caller will not receive the grant
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
        """Acquire a slot whose token queue has no consumers. Return its token, or None if no slot could be acquired."""
        for slot in self._slots():
            state = await attempt.probe.state(slot.token_queue)
            if state is not None and state.consumers:
                continue
            if state is None and self.kind is LockKind.MUTEX:  # a mutex whose queue was deleted by hand
                await make_mutex(self._driver, slot, self._clock)
            await attempt.stand_in_line(slot)
            token = await attempt.token(HAND_OUT_SECONDS)
            if token is not None and await self._is_there(attempt, token):
                return token
            await attempt.leave(slot)
        return None

    async def _next_in_line(self, attempt: "_Attempt", seconds: float) -> Token | None:
        """Wait in the lines of all slots for a token. Return None if no token arrives within ``seconds``.

        A token is returned only if its slot still exists. The client then leaves the lines of the other slots.
        """
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
        """Return whether the slot of ``token`` exists. If it exists, write the name of the holder.

        The slot of a mutex always exists.
        """
        slot = attempt.slot_of(token)
        says = {"holder": self._holder, "since": self._clock.wall(), "fencing_token": token_value(token)}
        if self.kind is LockKind.MUTEX:  # acquiring a mutex does not wait for the write
            naming = self._name_holder(attempt.channel, slot, orjson.dumps(says))
            self._background.spawn(naming, name=f"name holder {self.lock}")
            return True
        # The name is written after the check of the slot queue, on the channel that received the token. So if the write
        # succeeds, this channel held the token during the check.
        if await attempt.probe.state(slot.slot_queue) is not None:
            return await attempt.channel.put(slot.holder_queue, orjson.dumps(says))
        self._slot_count = min(self._slot_count, slot.number - 1)
        return False

    async def _name_holder(self, channel: LockChannel, slot: Slot, says: bytes) -> None:
        """Write the name of a mutex's holder. If this fails, do nothing: the name is only information.

        The grant of the mutex may already use ``channel``.
        """
        with contextlib.suppress(LockHeld, LockUnavailable):
            if not await channel.put(slot.holder_queue, says):
                await make_mutex(self._driver, slot, self._clock)
                await channel.put(slot.holder_queue, says)

    async def _look_for_slots(self, attempt: "_Attempt") -> None:
        """Count the slots from 1 up to the first number without a slot.

        Create the slot of a mutex if it does not exist.
        """
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
    """One attempt to acquire a lock: consumes the token queues of slots, all on one channel.

    Queries use another channel (``probe``), because the broker closes a channel if the queried queue does not exist.
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
        """Start to wait in the line of ``slot``. Idempotent. Raises: LockUnavailable."""
        if slot.token_queue in self._slots:
            return
        if self._channel is None:
            self._channel = await self._driver.open(self._listener)
        if not await self._channel.wait_for_token(slot.token_queue):
            raise LockUnavailable(f"{slot.token_queue} is missing: set the slots of the lock again")
        self._slots[slot.token_queue] = slot

    async def ask(self, question: Awaitable[None]) -> None:
        """Send a query on ``probe`` while the client waits in lines. Ignore a failure of the query.

        If the query fails or is not answered, the client does not leave the lines, because it may be hard to join them
        again while a node of the broker is down.
        """
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await question
        except (TimeoutError, LockUnavailable):
            self.probe.forget()

    async def be_counted(self, slot: Slot) -> None:
        """Register this client as waiting, so that administrators see the number of waiting clients.

        Waiting clients are consumers of the waiting queue. If this queue does not exist, do nothing.
        """
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
        """The channel that received the token. It exists once the client waits in a line."""
        assert self._channel is not None, "a token came on it"
        return self._channel

    def forwarded(self) -> tuple[LockChannel, TokenListener]:
        """Transfer the ownership of the channel to a grant. Return the channel and its listener."""
        channel, self._channel = self.channel, None
        return channel, self._listener
