"""Implements the arbiter that uses RabbitMQ: the proxy acquires locks over AMQP, like any other AMQP program.

So a lock also excludes other proxies, and programs that use ``popgate.amqp_locks`` with the same lock name. If the
connection to the broker ends, all locks that the proxy holds are lost. A new connection starts without held locks.
"""

import contextlib
import random
from collections.abc import Generator
from typing import ClassVar

from popgate.domain.errors import BrokerUnavailable, LockNotFound, LockUnavailable
from popgate.domain.locks import LockDefinition
from popgate.locks.administration import IsDue, LockAdministration, LockStatus
from popgate.locks.arbiter import Arbiter
from popgate.locks.fenced import FencedLock
from popgate.locks.grants import Grant
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockConnection
from popgate.runtime.background import Background


class BrokerArbiter:
    """Acquires and administers locks on the broker for the clients of this proxy.

    ``renew_seconds`` is the time between two renewals of a held lock. It must be much shorter than the broker's
    consumer_timeout.
    """

    keeps_queues: ClassVar[bool] = True

    def __init__(self, connection: LockConnection, clock: Clock, background: Background, renew_seconds: float) -> None:
        self._connection = connection
        self._clock = clock
        self._background = background
        self._renew_seconds = renew_seconds
        self._chance = random.Random()

    async def start(self) -> None:
        await self._connection.start()

    async def stop(self) -> None:
        await self._connection.stop()

    async def set_slots(self, definition: LockDefinition) -> None:
        with _translated():
            await self._administration().set_slots(definition.name, definition.kind, definition.open_slots)

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        lock = FencedLock(
            self._connection.driver(),
            definition.name,
            definition.kind,
            holder=holder,
            clock=self._clock,
            background=self._background,
            chance=self._chance,
            renew_seconds=self._renew_seconds,
        )
        with _translated():
            try:
                return await lock.acquire(wait_seconds)
            except LockNotFound:
                return None  # the lock is disabled or has no slots

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        with _translated():
            try:
                return await self._administration().status(definition.name, definition.kind)
            except LockNotFound:
                return None

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        with _translated(), contextlib.suppress(LockNotFound):  # a slot that does not exist has no holder
            await self._administration().force_release(definition.name, definition.kind, number)

    async def delete(self, definition: LockDefinition, is_due: IsDue) -> None:
        with _translated():
            await self._administration().delete(definition.name, definition.kind, is_due)

    def _administration(self) -> LockAdministration:
        return LockAdministration(self._connection.driver(), self._clock)


@contextlib.contextmanager
def _translated() -> Generator[None]:
    """Translate LockUnavailable, if it is raised in the context, into BrokerUnavailable. Raises: BrokerUnavailable."""
    try:
        yield
    except LockUnavailable as error:
        raise BrokerUnavailable(error.detail, retry_after_seconds=error.retry_after_seconds) from error


_conforms: type[Arbiter] = BrokerArbiter
