"""Provides the separate connection to RabbitMQ on which the proxy holds its locks.

If this connection ends, no queue is affected. If a queue's connection ends, no lock is affected.
"""

import random

from popgate.adapters.rabbitmq.connection import Connection
from popgate.adapters.rabbitmq.lock_driver import RabbitLockDriver
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import Session
from popgate.ports.lock_driver import LockConnection, LockDriver


class RabbitLockConnection:
    def __init__(self, options: RabbitOptions, *, chance: random.Random | None = None) -> None:
        self._connection = Connection(options, "locks", on_cut_off=lambda _: None, chance=chance or random.Random())
        self._latest: tuple[Session, RabbitLockDriver] | None = None

    async def start(self) -> None:
        await self._connection.start()

    async def stop(self) -> None:
        await self._connection.stop()

    def driver(self) -> LockDriver:
        session = self._connection.session()
        if self._latest is None or self._latest[0] is not session:
            self._latest = session, RabbitLockDriver(session.connection)
        return self._latest[1]


_conforms: type[LockConnection] = RabbitLockConnection
