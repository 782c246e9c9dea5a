"""Acquires unfenced locks, which amqp-locks describes for drivers without consumers.

Programs that need no fencing token can use unfenced locks, too.

A slot is held by the client whose connection has declared the exclusive queue of the slot. Other clients publish to
this queue to check whether it exists. If the queue does not exist, the broker reports that the message has no route. So
an attempt to acquire a held slot usually does not close the channel. Only if two clients try to acquire the slot at the
same moment does the broker close the channel of one client. The broker does not order waiting clients: each waiting
client tries again at growing intervals, and other clients may acquire the lock earlier.

An exclusive queue exists until its connection ends, even if the channel that declared the queue is closed earlier. So a
lock that is not released is held until the connection ends. If a suspended holder loses the lock, the protected
resource can't refuse its writes.
"""

import asyncio
import random

from popgate.domain.errors import LockLost, LockNotFound
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name
from popgate.locks.grants import UnfencedGrant
from popgate.locks.lock_queues import Probe
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockDriver, NotStoredError
from popgate.runtime.background import Background

ASK_SECONDS, ASK_SECONDS_MAX = 0.01, 0.25
"""First and maximum average pause, in seconds, between two attempts of a waiting client."""


class UnfencedLock:
    """Acquires one unfenced lock for this client."""

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
        """Acquire a slot of the lock. Return None if every attempt within ``wait_seconds`` finds all slots held.

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
            if grant is not None:  # the caller will not receive the grant
                await grant.release()
            raise
        return grant

    async def _first_free(self, probe: Probe) -> UnfencedGrant | None:
        """Acquire the first slot of the lock that has no holder. Return None if all slots are held."""
        for number in range(1, SLOTS_MAX + 1):
            slot = Slot(self.lock, self.kind, number, fenced=False)
            if self.kind is not LockKind.MUTEX and await probe.state(slot.slot_queue) is None:
                if number == 1:
                    raise LockNotFound(f"lock {self.lock} has no slots: an administrator sets how many it has")
                return None
            if not await self._is_held(slot, probe):
                grant = await self._take(slot, probe)
                if grant is not None:
                    return grant
            if self.kind is not LockKind.SEMAPHORE:
                return None
        return None

    @staticmethod
    async def _is_held(slot: Slot, probe: Probe) -> bool:
        """Whether the slot's exclusive queue exists, or existed until just now."""
        try:
            return await (await probe.channel()).put(slot.held_queue, b"")
        except NotStoredError:
            # The queue was there, but ended before the message was in it: its holder is releasing the lock.
            return True

    async def _take(self, slot: Slot, probe: Probe) -> UnfencedGrant | None:
        """Declare the slot's exclusive queue on the channel of ``probe``.

        Return None if this fails or the slot was removed.

        A new channel would take as much time as all other steps together.
        """
        if not await (await probe.channel()).take(slot.held_queue):
            probe.forget()
            return None
        channel, listener = probe.forwarded()
        grant = UnfencedGrant(slot, channel, self._background)
        listener.forward_to(grant)
        try:
            if self.kind is not LockKind.MUTEX:  # the slot may have been removed meanwhile
                await grant.verify()
        except LockLost:
            return None
        except BaseException:
            await grant.release()
            raise
        return grant
