"""Offers popgate's own locks on RabbitMQ to the prover, through their public interface. Each client has one plain
connection."""

import aio_pika
from aio_pika.abc import AbstractConnection

from popgate.amqp_locks import Grant, Lock, LockKind, LockLost, LockNotFound, Locks
from popgate.prover.target import Connect, Held, LockTarget, Renewing

RENEW_SECONDS = 0.5
"""Seconds between two renewals of a lock. This is short, so that the history contains renewals. In normal use, a lock
is renewed every ten minutes."""


class OwnLock:
    """A client that uses one fenced lock."""

    def __init__(self, connection: AbstractConnection, lock: str, kind: LockKind) -> None:
        self.connection = connection
        self.locks = Locks(connection, renew_seconds=RENEW_SECONDS)
        self.name = lock
        self.kind = kind
        self.lock = self._lock()

    async def acquire(self, wait_seconds: float) -> Held | None:
        try:
            grant = await self.lock.acquire(wait_seconds)
        except LockNotFound:  # the lock has no slots at the moment
            return None
        return None if grant is None else Held(grant.slot.number, grant.fencing_token, grant)

    async def verify(self, held: Held) -> bool:
        try:
            await granted(held).verify()
        except LockLost:
            return False
        return True

    async def renew(self, held: Held) -> int | None:
        try:
            return await granted(held).renew()
        except LockLost:
            return None

    async def release(self, held: Held) -> None:
        await granted(held).release()

    async def set_slots(self, slots: int) -> None:
        await self.locks.administration.set_slots(self.name, self.kind, slots)

    async def count_held(self) -> int:
        try:
            status = await self.locks.administration.status(self.name, self.kind)
        except LockNotFound:
            return 0
        return sum(slot.held for slot in status.slots)

    async def remove(self) -> None:
        await self.locks.administration.delete(self.name, self.kind)

    async def close(self) -> None:
        await self.locks.close()
        await self.connection.close()

    def _lock(self) -> Lock:
        match self.kind:
            case LockKind.MUTEX:
                return self.locks.mutex(self.name)
            case LockKind.PERSISTENT_MUTEX:
                return self.locks.persistent_mutex(self.name)
            case LockKind.SEMAPHORE:
                return self.locks.semaphore(self.name)


def granted(held: Held) -> Grant:
    """Return the ``Grant`` that ``acquire`` stored in ``held``."""
    grant: Grant = held.grant  # type: ignore[assignment]  # `acquire` stored it
    return grant


async def connect(amqp_url: str, lock: str, kind: LockKind) -> OwnLock:
    """Return a client with its own connection to the broker."""
    return OwnLock(await aio_pika.connect(amqp_url), lock, kind)


_conforms: type[LockTarget] = OwnLock
_renewing_conforms: type[Renewing] = OwnLock
_connect_conforms: Connect = connect
