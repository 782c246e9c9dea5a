"""Implements the lock of the active keeper: a fenced mutex on the broker that the keeper observes.

If the broker is partitioned, only the side with a majority of its nodes can hold the lock.
"""

import random
from dataclasses import dataclass
from typing import Protocol

from popgate.domain.locks import KEEPER_LOCK, LockKind
from popgate.locks.administration import LockAdministration
from popgate.locks.fenced import FencedLock
from popgate.locks.grants import Grant
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockConnection
from popgate.runtime.background import Background


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperAtWork:
    """The keeper that holds the lock. ``holder`` is its name. ``since`` is the time of the grant, in Unix seconds."""

    holder: str
    fencing_token: int | None
    since: float | None


class KeeperLock(Protocol):
    async def acquire(self, wait_seconds: float) -> Grant | None:
        """Acquire the lock. Return None if another keeper still holds it after ``wait_seconds``.

        Raises: BrokerUnavailable, LockUnavailable.
        """
        ...

    async def holder(self) -> KeeperAtWork | None:
        """Return the keeper that holds the lock, or None. Raises: BrokerUnavailable, LockUnavailable, LockNotFound."""
        ...


class BrokerKeeperLock:
    """Implements the keeper lock with queues on the broker.

    ``holder`` is the name of this keeper that operators see.
    """

    def __init__(
        self, connection: LockConnection, clock: Clock, background: Background, *, holder: str, renew_seconds: float
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._background = background
        self._holder = holder
        self._renew_seconds = renew_seconds
        self._chance = random.Random()

    async def acquire(self, wait_seconds: float) -> Grant | None:
        lock = FencedLock(
            self._connection.driver(),
            KEEPER_LOCK,
            LockKind.MUTEX,
            holder=self._holder,
            clock=self._clock,
            background=self._background,
            chance=self._chance,
            renew_seconds=self._renew_seconds,
        )
        return await lock.acquire(wait_seconds)

    async def holder(self) -> KeeperAtWork | None:
        administration = LockAdministration(self._connection.driver(), self._clock)
        status = await administration.status(KEEPER_LOCK, LockKind.MUTEX)
        for slot in status.slots:
            if slot.held:
                return KeeperAtWork(holder=slot.holder, fencing_token=slot.fencing_token, since=slot.since)
        return None


_conforms: type[KeeperLock] = BrokerKeeperLock
