"""Unfenced locks, as amqp-locks describes them: for drivers that can't consume, and programs that need no token.

A slot is held by whoever has its exclusive queue. Others learn that it exists by a publish that is answered "no route"
where it doesn't, so that a failed try ends no channel; only where two are equally fast one of them loses its own. The
broker keeps no line: who waits asks again, less and less often, and may be overtaken.

An exclusive queue belongs to a connection: a lock ends with it, and with nothing else. Nothing protects a resource from
a holder that stands still meanwhile.
"""

import asyncio
import random

from popgate.domain.errors import LockLost, LockNotFound
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name
from popgate.locks.grants import UnfencedGrant
from popgate.locks.lines import Probe
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockDriver
from popgate.runtime.background import Background

ASK_SECONDS, ASK_SECONDS_MAX = 0.01, 0.25
"""How long a waiting client pauses before it asks again: at first, and after a while."""


class UnfencedLock:
    """One lock as this client sees it."""

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
        """The lock, or None where others hold all slots for as long as ``wait_seconds``.

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
            if grant is not None:  # nobody will know of it
                await grant.release()
            raise
        return grant

    async def _first_free(self, probe: Probe) -> UnfencedGrant | None:
        """Take the first slot that is there and that nobody has."""
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
        """On the probe's own channel: opening another one would cost as much as all the rest."""
        if not await (await probe.channel()).take(slot.held_queue):
            probe.forget()
            return None
        channel, line = probe.passed_on()
        grant = UnfencedGrant(slot, channel, self._background)
        line.pass_to(grant)
        try:
            if self.kind is not LockKind.MUTEX:  # the slot may have been removed meanwhile
                await grant.verify()
        except LockLost:
            return None
        except BaseException:
            await grant.release()
            raise
        return grant
