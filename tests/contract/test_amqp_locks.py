"""Locks over a real RabbitMQ, each client on a separate connection."""

import asyncio
from contextlib import suppress
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

import aio_pika
import pytest
from aiormq.connection import TCPTransportFactory
from yarl import URL

from popgate.adapters.rabbitmq.lock_driver import RabbitLockChannel, RabbitLockDriver
from popgate.amqp_locks import Lock, LockKind, LockLost, Locks, LockUnavailable
from popgate.locks.lock_queues import TokenListener
from support.lock_clients import LockClients, eventually_lost, held, lock, token
from support.rabbitmq import RabbitNode

pytestmark = pytest.mark.rabbitmq_versions

ASKING, ASKING_SECONDS = 6, 3.0


@pytest.mark.parametrize("kind", LockKind)
@pytest.mark.parametrize("fenced", [True, False])
async def test_one_holds_it_and_the_next_gets_it_with_a_higher_token(
    lock_clients: LockClients, kind: LockKind, fenced: bool
) -> None:
    first, second = [await lock(await lock_clients(), kind, fenced=fenced) for _ in range(2)]
    grant = await held(first)
    assert await second.acquire() is None
    waiting = asyncio.ensure_future(held(second))
    await asyncio.sleep(0.2)
    await grant.verify()
    assert not waiting.done()
    await grant.release()
    next_grant = await waiting
    await next_grant.verify()
    assert not fenced or token(next_grant) > token(grant)
    with pytest.raises(LockLost, match="released"):
        await grant.verify()
    await grant.release()  # a repetition does no harm
    await next_grant.verify()


@pytest.mark.parametrize("kind", LockKind)
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_failed_try_costs_nobody_a_channel(lock_clients: LockClients, kind: LockKind, fenced: bool) -> None:
    one, two = await lock_clients(), await lock_clients()
    mine = await lock_clients.connections[two].channel()
    closed: list[object] = []

    def on_close(*why: object) -> None:
        closed.append(why)

    mine.close_callbacks.add(on_close)
    grant = await held(await lock(one, kind, fenced=fenced))
    trying = await lock(two, kind, fenced=fenced)
    for _ in range(5):
        assert await trying.acquire() is None
    await mine.declare_queue("mine", exclusive=True)
    assert not closed
    await grant.release()


@pytest.mark.parametrize("fenced", [True, False])
async def test_tasks_of_one_connection_exclude_each_other(lock_clients: LockClients, fenced: bool) -> None:
    mutex = (await lock_clients()).mutex("a", fenced=fenced)
    order: list[int] = []

    async def work(number: int) -> None:
        async with mutex.held(10):
            order.append(number)
            await asyncio.sleep(0.02)
            order.append(number)

    await asyncio.gather(*(work(number) for number in range(5)))
    assert order[::2] == order[1::2], "nobody came in between"


async def test_asking_for_a_lock_at_the_moment_of_its_release_is_no_error(lock_clients: LockClients) -> None:
    """RabbitMQ refuses a message whose queue ends before the message is in it. The queue was that of the holder."""
    clients = [await lock_clients() for _ in range(ASKING)]
    ended = asyncio.get_running_loop().time() + ASKING_SECONDS
    grants = 0

    async def take_again_and_again(mutex: Lock) -> None:
        nonlocal grants
        while asyncio.get_running_loop().time() < ended:
            grant = await mutex.acquire()
            if grant is not None:
                grants += 1
                await grant.release()

    await asyncio.gather(
        *(take_again_and_again(client.mutex("a", fenced=False)) for client in clients for _ in range(6))
    )
    assert grants > ASKING


async def test_a_mutex_that_many_make_at_once_is_one(lock_clients: LockClients) -> None:
    everybody = [(await lock_clients()).mutex("a") for _ in range(6)]
    grants = [grant for grant in await asyncio.gather(*(mutex.acquire() for mutex in everybody)) if grant is not None]
    assert len(grants) <= 1
    for grant in grants:
        await grant.release()
    tokens: list[int] = []

    async def work(mutex: Lock) -> None:
        async with mutex.held(10) as grant:
            tokens.append(token(grant))

    await asyncio.gather(*(work(mutex) for mutex in everybody))
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_semaphore_has_as_many_holders_as_slots_each_in_its_own(
    lock_clients: LockClients, fenced: bool
) -> None:
    admin = await lock_clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 3, fenced=fenced)
    semaphores = [(await lock_clients()).semaphore("a", fenced=fenced) for _ in range(4)]
    grants = [await held(semaphore) for semaphore in semaphores[:3]]
    assert sorted(grant.slot.number for grant in grants) == [1, 2, 3]
    assert await semaphores[3].acquire() is None
    waiting = asyncio.ensure_future(held(semaphores[3]))
    await asyncio.sleep(0.2)
    await grants[1].release()
    assert (await waiting).slot.number == 2
    for grant in (grants[0], grants[2]):
        await grant.verify()


async def test_the_lock_of_a_connection_that_ends_goes_to_the_next(lock_clients: LockClients) -> None:
    one, two = await lock_clients(), await lock_clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(held(two.mutex("a")))
    await asyncio.sleep(0.2)
    await lock_clients.connections[one].close()
    assert token(await waiting) > token(grant)
    await eventually_lost(grant)


async def test_who_asks_over_a_connection_that_was_lost_hears_it_at_once(lock_clients: LockClients) -> None:
    locks = await lock_clients()
    transport = lock_clients.connections[locks].transport
    assert transport is not None
    await transport.connection.close()
    asked = monotonic()
    with pytest.raises(LockUnavailable, match="closed"):
        await locks.mutex("a").acquire(5.0)
    assert monotonic() - asked < 2


async def test_a_waiting_client_that_gives_up_leaves_nothing_behind(lock_clients: LockClients) -> None:
    one, two, three = await lock_clients(), await lock_clients(), await lock_clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(two.mutex("a").acquire(30))
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await two.mutex("a").acquire(0.3) is None
    await grant.release()
    await held(three.mutex("a"), 0.5)


async def test_fifty_who_wait_have_it_in_the_order_in_which_they_came(lock_clients: LockClients) -> None:
    """No client polls, none is overtaken, and the hand-over is immediate."""
    locks = [await lock_clients() for _ in range(5)]
    order: list[int] = []
    hand_overs: list[float] = []
    first = await held(locks[0].mutex("a"))

    async def work(number: int) -> None:
        async with locks[number % 5].mutex("a").held(30):
            order.append(number)
            hand_overs.append(monotonic())
            await asyncio.sleep(0.01)

    working: list[asyncio.Task[None]] = []
    for number in range(50):
        working.append(asyncio.create_task(work(number)))
        async with asyncio.timeout(5):  # a counted client is waiting
            while (await locks[0].administration.status("a", LockKind.MUTEX)).waiting <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    await first.release()
    await asyncio.gather(*working)
    assert order == list(range(50))
    assert median(later - earlier for earlier, later in pairwise(hand_overs)) < 0.01 + 0.05


async def test_a_renewal_proves_the_lock_and_raises_its_token(lock_clients: LockClients) -> None:
    one, two = await lock_clients(), await lock_clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(two.mutex("a").acquire(1.0))
    await asyncio.sleep(0.2)
    before = token(grant)
    assert (await grant.renew() or 0) > before
    assert len(set(await asyncio.gather(grant.renew(), grant.renew()))) == 1, "one renewal does for both"
    await grant.verify()
    assert await waiting is None, "a renewal hands it to nobody"


class Wire(TCPTransportFactory):
    """A connection's wire to RabbitMQ, which a test can cut."""

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self.writer = await super().create(url, **kwargs)
        return reader, self.writer

    def cut(self) -> None:
        self.writer.transport.abort()


async def test_tokens_grow_over_a_holder_that_is_cut_off_while_it_renews(amqp_url: str) -> None:
    """The token may be on its way to the broker, or back: in both cases the next holder's is higher."""
    latest = 0
    for cut_after_steps in range(0, 24, 2):
        connection, wire = aio_pika.Connection(URL(amqp_url)), Wire()
        connection.kwargs["transport_factory"] = wire
        await connection.connect()
        client = Locks(connection)
        grant = await held(client.mutex("a"))
        assert token(grant) > latest
        renewing = asyncio.ensure_future(grant.renew())
        for _ in range(cut_after_steps):
            await asyncio.sleep(0)
        wire.cut()
        with suppress(LockLost, LockUnavailable):
            await renewing
        latest = token(grant)
        await client.close()
        await connection.close()


async def test_a_held_lock_is_renewed_by_itself(lock_clients: LockClients) -> None:
    grant = await held((await lock_clients(renew_seconds=0.1)).mutex("a"))
    before = token(grant)
    await asyncio.sleep(0.5)
    assert token(grant) >= before + 2
    await grant.verify()
    await grant.release()


async def test_a_lock_that_was_given_up_while_the_broker_stood_still_is_free_when_it_goes_on(
    lock_clients: LockClients, rabbitmq: RabbitNode
) -> None:
    """Its connection survives, and so must not keep a token without a holder."""
    one, two = await lock_clients(), await lock_clients()
    grant = await held(one.mutex("a"))
    rabbitmq.pause()
    try:
        with pytest.raises(LockLost, match="no answer"):
            await grant.verify()
        await asyncio.sleep(1.5)
    finally:
        rabbitmq.resume()
    assert token(await held(two.mutex("a"))) > token(grant)
    assert not lock_clients.connections[one].is_closed


async def test_without_a_connection_there_is_no_lock(lock_clients: LockClients) -> None:
    locks = await lock_clients()
    await lock_clients.connections[locks].close()
    with pytest.raises(LockUnavailable, match="closed"):
        await locks.mutex("a").acquire()


async def test_who_asks_on_a_channel_that_is_closed_meanwhile_is_not_cancelled(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiormq cancels calls that wait on a closed channel; a program that verifies at that moment must get an error."""
    async with await aio_pika.connect(amqp_url) as connection:
        driver = RabbitLockDriver(connection)
        plain = await driver.plain_channel()
        channel = RabbitLockChannel(plain, TokenListener(), driver, set(), (4, 3))
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def declare(*_: object, **__: object) -> None:
            await asked

        monkeypatch.setattr(plain, "queue_declare", declare)
        asking = asyncio.ensure_future(channel.state("a"))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(LockUnavailable, match="lost"):
            await asking
        asked = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(channel.state("a"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
