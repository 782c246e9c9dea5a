"""The simulation's servers without any delay, for the contract suites that run over the real ones, too."""
# pyright: reportPrivateUsage=false
# A connection to Redis creates a PipelinedConnection itself; this module replaces it.

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, cast

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.pipelined_connection import PipelinedConnection, Word
from popgate.ports.broker import Broker
from simulator.broker import SimulatedBroker
from simulator.broker_server import BrokerServer
from simulator.redis_memory import MemoryRedis
from simulator.wires import Weather

SIMULATED_PLACE = "in.memory:6379"


class DirectConnection:
    """A ``PipelinedConnection`` that ends in this process."""

    def __init__(self, redis: MemoryRedis) -> None:
        self._redis = redis

    async def call(self, *words: Word) -> Any:
        await asyncio.sleep(0)
        return self._redis.do(*words)

    async def close(self) -> None:
        """Do nothing; there is nothing to close."""


def memory_connection(redis: MemoryRedis, namespace: str = "default") -> RedisConnection:
    connection = RedisConnection(parse_address(f"redis://{SIMULATED_PLACE}"), namespace)
    connection._pipeline = cast("PipelinedConnection", DirectConnection(redis))
    return connection


@asynccontextmanager
async def memory_broker() -> AsyncGenerator[Broker]:
    """Return a started broker."""
    chance = random.Random(1)
    broker = SimulatedBroker(BrokerServer(), Weather(chance), chance.uniform, copy_context())
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()
