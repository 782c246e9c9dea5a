"""Locks on three RabbitMQ nodes, one of which is killed, or paused: to the others this looks like a partition."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import monotonic

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from popgate.amqp_locks import Fence, Grant, Lock, LockKind, LockLost, Locks, LockUnavailable
from support.lock_clients import token
from support.lock_tokens import take_tokens
from support.processes import wait_until
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import RabbitRelease

pytestmark = pytest.mark.rabbitmq_versions

PATIENCE_SECONDS = 60.0
HEARTBEAT_SECONDS = 2
LONG_HEARTBEAT_SECONDS = 60
NETWORK = RabbitSettings(net_tick_seconds=4, net_setup_seconds=2)
"""Settings with which a paused node is considered down within seconds, not within a minute."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease) -> Iterator[RabbitCluster]:
    folder = tmp_path_factory.mktemp("locks")
    with RabbitCluster(folder, release=rabbitmq_release, size=3, settings=NETWORK) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: RabbitCluster) -> tuple[RabbitNode, ...]:
    for node in cluster.nodes:  # before a test, not after it: the nodes may not be needed any more
        node.resume()
        node.start()
    cluster.wait_whole()  # a queue that is declared before has fewer members
    return cluster.nodes


@asynccontextmanager
async def locks_on(
    node: RabbitNode, *, heartbeat_seconds: int = HEARTBEAT_SECONDS
) -> AsyncGenerator[tuple[Locks, AbstractConnection]]:
    connection = await aio_pika.connect(f"{node.amqp_url()}?heartbeat={heartbeat_seconds}")
    locks = Locks(connection)
    try:
        yield locks, connection
    finally:
        await locks.close()
        await connection.close()


def is_lost(connection: AbstractConnection) -> bool:
    """Tell whether the connection is lost; aio-pika calls it open until its owner closes it."""
    return connection.transport is None or connection.transport.connection.is_closed


async def held(lock: Lock, connection: AbstractConnection | None = None) -> Grant:
    """Acquire the lock, with retries: while a queue has no leader, the lock can't be requested.

    Raises: ConnectionError if that connection is lost.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                grant = await lock.acquire(5.0)
            except LockUnavailable:
                if connection is not None and is_lost(connection):
                    raise ConnectionError from None
                await asyncio.sleep(0.2)
                continue
            if grant is not None:
                return grant


async def held_anyhow(stack: AsyncExitStack, node: RabbitNode, lock: str) -> Grant:
    """Acquire the lock on a separate connection, and on another one if RabbitMQ ends that: if a queue's leader
    resumes that was considered down, 3.10 crashes on the next consume (``rabbit_fifo:handle_aux`` knows no
    ``await_condition``), and the whole connection ends with INTERNAL_ERROR.
    """
    while True:
        locks, connection = await stack.enter_async_context(locks_on(node))
        with suppress(ConnectionError):
            return await held(locks.mutex(lock), connection)


async def lost_at(grant: Grant) -> float:
    """Ask until the lock is reported lost; return when the last question was asked that was answered positively."""
    verified = monotonic()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            asked = monotonic()
            try:
                await grant.verify()
            except LockLost:
                return verified
            verified = asked
            await asyncio.sleep(0.05)


async def in_line(locks: Locks, lock: str) -> None:
    """Wait until a client waits in line for the mutex."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await locks.administration.status(lock, LockKind.MUTEX)).waiting:  # noqa: ASYNC110  # at the broker
            await asyncio.sleep(0.05)


async def test_a_holder_whose_lock_was_handed_on_and_back_has_lost_it(nodes: tuple[RabbitNode, ...]) -> None:
    """RabbitMQ keeps the holder in the line, so its turn comes again: here once while it renews, and once unasked."""
    async with locks_on(nodes[0]) as (mine, _), locks_on(nodes[1]) as (others, _):
        renewed, unasked = [await held(mine.mutex(lock)) for lock in ("renewed", "unasked")]
        waiting = [asyncio.ensure_future(held(others.mutex(lock))) for lock in ("renewed", "unasked")]
        for lock in ("renewed", "unasked"):
            await in_line(others, lock)
        await asyncio.to_thread(take_tokens, nodes[1])
        new = await asyncio.gather(*waiting)
        assert token(new[0]) > token(renewed)
        await renewed.verify()  # it can't know: the slot exists, and the channel is open
        renewing = asyncio.ensure_future(renewed.renew())
        await asyncio.sleep(0.1)
        assert not renewing.done()
        for grant in new:
            await grant.release()
        with pytest.raises(LockLost, match="another client held it in the meantime"):
            await renewing
        async with asyncio.timeout(PATIENCE_SECONDS):
            await unasked.lost.wait()
        with pytest.raises(LockLost, match="taken away"):
            await unasked.renew()
        assert token(await held(others.mutex("renewed"))) > token(new[0])


async def test_the_lock_of_a_client_whose_node_is_killed_goes_on_with_the_others(nodes: tuple[RabbitNode, ...]) -> None:
    async with locks_on(nodes[0]) as (mine, _), locks_on(nodes[1]) as (others, _), locks_on(nodes[2]) as (third, _):
        grant = await held(mine.mutex("a"))
        waiting = asyncio.ensure_future(held(others.mutex("a")))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(nodes[0].sync)  # a younger queue loses its leader for ever (3.10)
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


def says_down(node: RabbitNode) -> str:
    """Return what another node writes to its log when it considers ``node`` down."""
    return f"node {node.name} down: "


async def leader(node: RabbitNode, lock: str) -> str:
    """Return the node that leads the queue of the lock's token, as ``node`` knows it."""
    for queue in await asyncio.to_thread(node.queues, "/"):
        if queue["name"] == f"popgate:mutex:{lock}:1:token":
            return str(queue["leader"])
    raise AssertionError(f"lock {lock} has no token")


async def test_in_a_partition_the_majority_hands_the_lock_on_and_fences_who_had_it(
    nodes: tuple[RabbitNode, ...],
) -> None:
    """A holder that asks learns of the loss before another client has the lock; the token of a holder that slept
    through it is refused. A holder connected through a node of the majority keeps its lock.

    The node goes on only when both others consider it down, which takes each of them another time between three and
    five quarters of ``net_ticktime``. If it went on between these times, one of the others could reach it and one could
    not: with ``pause_minority`` RabbitMQ (before 4.3) then stops the latter as well. The locks of that node's clients
    would end, and a holder that slept could get its lock back, which it must count as lost: that is what
    ``test_a_holder_whose_lock_was_handed_on_and_back_has_lost_it`` is for.
    """
    async with AsyncExitStack() as stack:
        first, _ = await stack.enter_async_context(locks_on(nodes[0]))
        sleeping, _ = await stack.enter_async_context(locks_on(nodes[0], heartbeat_seconds=LONG_HEARTBEAT_SECONDS))
        second, _ = await stack.enter_async_context(locks_on(nodes[1]))
        old = {"asked": await held(first.mutex("asked")), "slept": await held(sleeping.mutex("slept"))}
        await (await held(first.mutex("kept"))).release()
        kept = await held(second.mutex("kept"))
        for lock in ("asked", "slept", "kept"):
            assert await leader(nodes[1], lock) == nodes[0].name
        fences = {lock: Fence(token(grant)) for lock, grant in old.items()}
        granted: asyncio.Queue[tuple[float, str, Grant]] = asyncio.Queue()

        async def wait_for(node: RabbitNode, lock: str) -> None:
            grant = await held_anyhow(stack, node, lock)
            granted.put_nowait((monotonic(), lock, grant))
            fences[lock].admit(token(grant))

        waiting = [asyncio.ensure_future(wait_for(node, lock)) for lock in old for node in nodes[1:]]
        behind_kept = asyncio.ensure_future(held_anyhow(stack, nodes[2], "kept"))
        await asyncio.sleep(0.5)  # they stand in line
        assert granted.empty()
        seen_down = {node: node.output.count(says_down(nodes[0])) for node in nodes[1:]}
        nodes[0].pause()
        verified = await lost_at(old["asked"])
        new: dict[str, Grant] = {}
        for _ in old:
            at, lock, grant = await granted.get()
            assert lock not in new, "there is one holder"
            assert token(grant) > token(old[lock])
            assert lock != "asked" or verified < at
            new[lock] = grant
        await kept.verify()
        await asyncio.to_thread(
            wait_until,
            lambda: all(node.output.count(says_down(nodes[0])) > seen for node, seen in seen_down.items()),
            timeout_seconds=PATIENCE_SECONDS,
            what="both other nodes to consider it down",
        )

        nodes[0].resume()
        with pytest.raises(LockLost):
            await old["asked"].verify()
        with pytest.raises(LockLost):
            await old["slept"].renew()
        for lock, fence in fences.items():
            with pytest.raises(LockLost, match="overtaken"):
                fence.admit(token(old[lock]))
            await new[lock].verify()
        assert granted.empty(), "there is one holder"
        assert not behind_kept.done()
        for grant in new.values():
            await grant.release()
        await asyncio.gather(*waiting)
        for _ in old:
            _, lock, grant = granted.get_nowait()
            assert token(grant) > token(new.pop(lock))
            await grant.release()
        await kept.verify()
        await kept.release()
        assert token(await behind_kept) > token(kept)
        nodes[0].kill()  # it would stay apart: it may be asked before it sees that the others considered it down
