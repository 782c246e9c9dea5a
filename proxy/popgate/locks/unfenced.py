"""Acquires unfenced locks, as amqp-locks describes them: for drivers that can't consume, and programs that need no
token.

The holder of a slot is the client whose connection has declared the slot's exclusive queue. Other clients check whether
that queue exists by publishing to it: if it does not exist, the broker reports that the message has no route. So a
failed attempt usually ends no channel. Only if two clients take the slot at the same moment, one of them loses its
channel. The broker keeps no line of waiting clients: a waiting client tries again at growing intervals, and other
clients may overtake it.

An exclusive queue belongs to a connection and outlives its channel. So a lock that is not released ends only with the
connection. The protected resource can't refuse a holder that is suspended while it loses the lock.
"""

import asyncio
import random

from popgate.domain.errors import LockLost, LockNotFound
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name
from popgate.locks.grants import UnfencedGrant
from popgate.locks.lock_queues import Probe
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockDriver
from popgate.runtime.background import Background

ASK_SECONDS, ASK_SECONDS_MAX = 0.01, 0.25
"""First and maximum pause, in seconds, before a waiting client tries again."""


class UnfencedLock:
    """Acquires one lock for this client."""

    def __init__(
        self,
        driver: LockDriver,
        lock: str,
        kind: LockKind,
        *,
        clock: Clock,
        background: Background,
        chance: random.Random,
    ) -> None:
        self.lock = checked_lock_name(lock)
        self.kind = kind
        self._driver = driver
        self._clock = clock
        self._background = background
        self._chance = chance

    async def acquire(self, wait_seconds: float = 0.0) -> UnfencedGrant | None:
        """Acquire the lock. Return None if other clients hold all slots for all of ``wait_seconds``.

        Raises: LockNotFound, LockUnavailable.
        """
        deadline = self._clock.monotonic() + wait_seconds
        pause = ASK_SECONDS
        while True:
            grant = await self._try()
            left = deadline - self._clock.monotonic()
            if grant is not None or left <= 0:
                return grant
            await asyncio.sleep(min(left, pause * self._chance.uniform(0.5, 1.5)))
            pause = min(2 * pause, ASK_SECONDS_MAX)

    async def _try(self) -> UnfencedGrant | None:
        grant: UnfencedGrant | None = None
        try:
            async with Probe(self._driver) as probe:
                grant = await self._first_free(probe)
        except BaseException:
            if grant is not None:  # the caller will not receive it
                await grant.release()
            raise
        return grant

    async def _first_free(self, probe: Probe) -> UnfencedGrant | None:
        """Take the first existing slot without a holder."""
        for number in range(1, SLOTS_MAX + 1):
            slot = Slot(self.lock, self.kind, number, fenced=False)
            if self.kind is not LockKind.MUTEX and await probe.state(slot.slot_queue) is None:
                if number == 1:
                    raise LockNotFound(f"lock {self.lock} has no slots: an administrator sets how many it has")
                return None
            if not await (await probe.channel()).put(slot.held_queue, b""):
                grant = await self._take(slot, probe)
                if grant is not None:
                    return grant
            if self.kind is not LockKind.SEMAPHORE:
                return None
        return None

    async def _take(self, slot: Slot, probe: Probe) -> UnfencedGrant | None:
        """Take a slot on the probe's own channel, because another channel would cost as much as all other steps."""
        if not await (await probe.channel()).take(slot.held_queue):
            probe.forget()
            return None
        channel, listener = probe.forwarded()
        grant = UnfencedGrant(slot, channel, self._background)
        listener.forward_to(grant)
        try:
            if self.kind is not LockKind.MUTEX:  # the slot may have been removed in the meantime
                await grant.verify()
        except LockLost:
            return None
        except BaseException:
            await grant.release()
            raise
        return grant
