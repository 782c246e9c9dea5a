"""Started brokers for tests; they are stopped at the end of the block."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.database import Database
from popgate.domain.identity import IdentityKeys
from popgate.ports.broker import Broker
from popgate.runtime.clocks import SystemClock

KEYS = IdentityKeys([b"a secret that all test brokers share"])


@asynccontextmanager
async def embedded_broker(folder: Path) -> AsyncGenerator[Broker]:
    database = Database(folder / "popgate.db", SystemClock())
    await database.open()
    broker = SqliteBroker(database)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
        await database.close()


@asynccontextmanager
async def rabbit_broker(options: RabbitOptions) -> AsyncGenerator[RabbitBroker]:
    broker = RabbitBroker(options, KEYS)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
