"""Locks on three RabbitMQ nodes, one of which is killed."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from popgate.amqp_locks import Grant, Lock, LockLost, Locks, LockUnavailable
from support.rabbitmq import RabbitCluster, RabbitNode

PATIENCE_SECONDS = 60.0
HEARTBEAT_SECONDS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitCluster]:
    with RabbitCluster(tmp_path_factory.mktemp("locks"), size=3) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: RabbitCluster) -> tuple[RabbitNode, ...]:
    for node in cluster.nodes:  # before a test, not after it: nobody waits for nodes that nobody needs any more
        node.resume()
        node.start()
    cluster.wait_whole()  # a queue that is declared before has fewer members
    return cluster.nodes


@asynccontextmanager
async def locks_on(node: RabbitNode) -> AsyncGenerator[tuple[Locks, AbstractConnection]]:
    connection = await aio_pika.connect(f"{node.amqp_url()}?heartbeat={HEARTBEAT_SECONDS}")
    locks = Locks(connection)
    try:
        yield locks, connection
    finally:
        await locks.close()
        await connection.close()


async def held(lock: Lock) -> Grant:
    """The lock, whatever it takes: while a queue has no leader it can't be asked for."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                grant = await lock.acquire(5.0)
            except LockUnavailable:
                await asyncio.sleep(0.2)
                continue
            if grant is not None:
                return grant


def token(grant: Grant) -> int:
    assert grant.fencing_token is not None
    return grant.fencing_token


async def test_the_lock_of_a_client_whose_node_is_killed_goes_on_with_the_others(nodes: tuple[RabbitNode, ...]) -> None:
    async with locks_on(nodes[0]) as (mine, _), locks_on(nodes[1]) as (others, _), locks_on(nodes[2]) as (third, _):
        grant = await held(mine.mutex("a"))
        waiting = asyncio.ensure_future(held(others.mutex("a")))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(nodes[0].sync)  # a queue that is younger than that loses its leader for ever (3.10)
        nodes[0].kill()
        next_grant = await waiting
        assert token(next_grant) > token(grant)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await grant.lost.wait()
        with pytest.raises(LockLost):
            await grant.verify()
        assert await third.mutex("a").acquire(0.2) is None
        await next_grant.verify()
        await next_grant.release()
