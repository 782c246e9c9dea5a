"""Lock clients on a real RabbitMQ, each on a separate connection, and checks of the locks they hold."""

import asyncio

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from popgate.amqp_locks import Lock, LockKind, LockLost, Locks
from popgate.locks.grants import Grant


class LockClients:
    """Connections that tests open, and cut."""

    def __init__(self, amqp_url: str) -> None:
        self._amqp_url = amqp_url
        self.connections: dict[Locks, AbstractConnection] = {}

    async def __call__(self, holder: str = "", *, renew_seconds: float = 600.0) -> Locks:
        connection = await aio_pika.connect(self._amqp_url)
        locks = Locks(connection, holder=holder, renew_seconds=renew_seconds)
        self.connections[locks] = connection
        return locks

    async def close(self) -> None:
        for locks, connection in self.connections.items():
            await locks.close()
            await connection.close()


async def lock(locks: Locks, kind: LockKind, *, fenced: bool = True) -> Lock:
    """Return a lock of that kind with a single holder."""
    if kind is LockKind.MUTEX:
        return locks.mutex("a", fenced=fenced)
    await locks.administration.set_slots("a", kind, 1, fenced=fenced)
    if kind is LockKind.SEMAPHORE:
        return locks.semaphore("a", fenced=fenced)
    return locks.persistent_mutex("a", fenced=fenced)


async def held(lock: Lock, wait_seconds: float = 5.0) -> Grant:
    grant = await lock.acquire(wait_seconds)
    assert grant is not None
    return grant


def token(grant: Grant) -> int:
    assert grant.fencing_token is not None
    return grant.fencing_token


async def eventually_lost(grant: Grant) -> None:
    async with asyncio.timeout(5):
        await grant.lost.wait()
    with pytest.raises(LockLost, match="acquire it again"):
        await grant.verify()
