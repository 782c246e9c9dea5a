"""Locks over a real RabbitMQ, each client on a connection of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median
from time import monotonic

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection

from popgate.adapters.rabbitmq.lock_driver import RabbitLockChannel, RabbitLockDriver
from popgate.amqp_locks import Lock, LockKind, LockLost, LockNotFound, Locks, LockUnavailable
from popgate.domain.errors import InvalidRequest
from popgate.domain.locks import Slot
from popgate.locks.grants import Grant
from popgate.locks.lines import Line
from popgate.ports.lock_driver import QueueRole, QueueState
from support.rabbitmq import RabbitNode

Client = Callable[[], Awaitable[Locks]]

KINDS = list(LockKind)


class Clients:
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


@pytest.fixture
async def clients(amqp_url: str) -> AsyncIterator[Clients]:
    clients = Clients(amqp_url)
    yield clients
    await clients.close()


async def lock(locks: Locks, kind: LockKind, *, fenced: bool = True) -> Lock:
    """A lock of that kind that can be held by one."""
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
    with pytest.raises(LockLost, match="acquire it anew"):
        await grant.verify()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fenced", [True, False])
async def test_one_holds_it_and_the_next_gets_it_with_a_higher_token(
    clients: Clients, kind: LockKind, fenced: bool
) -> None:
    first, second = [await lock(await clients(), kind, fenced=fenced) for _ in range(2)]
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
    await grant.release()  # once more does no harm
    await next_grant.verify()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fenced", [True, False])
async def test_a_failed_try_costs_nobody_a_channel(clients: Clients, kind: LockKind, fenced: bool) -> None:
    one, two = await clients(), await clients()
    mine = await clients.connections[two].channel()
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
async def test_tasks_of_one_connection_exclude_each_other(clients: Clients, fenced: bool) -> None:
    mutex = (await clients()).mutex("a", fenced=fenced)
    order: list[int] = []

    async def work(number: int) -> None:
        async with mutex.held(10):
            order.append(number)
            await asyncio.sleep(0.02)
            order.append(number)

    await asyncio.gather(*(work(number) for number in range(5)))
    assert order[::2] == order[1::2], "nobody came in between"


async def test_a_mutex_that_many_make_at_once_is_one(clients: Clients) -> None:
    everybody = [(await clients()).mutex("a") for _ in range(6)]
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
async def test_a_semaphore_has_as_many_holders_as_slots_each_in_its_own(clients: Clients, fenced: bool) -> None:
    admin = await clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 3, fenced=fenced)
    semaphores = [(await clients()).semaphore("a", fenced=fenced) for _ in range(4)]
    grants = [await held(semaphore) for semaphore in semaphores[:3]]
    assert sorted(grant.slot.number for grant in grants) == [1, 2, 3]
    assert await semaphores[3].acquire() is None
    waiting = asyncio.ensure_future(held(semaphores[3]))
    await asyncio.sleep(0.2)
    await grants[1].release()
    assert (await waiting).slot.number == 2
    for grant in (grants[0], grants[2]):
        await grant.verify()


async def test_the_lock_of_a_connection_that_ends_goes_to_the_next(clients: Clients) -> None:
    one, two = await clients(), await clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(held(two.mutex("a")))
    await asyncio.sleep(0.2)
    await clients.connections[one].close()
    assert token(await waiting) > token(grant)
    await eventually_lost(grant)


async def test_who_asks_over_a_connection_that_was_lost_hears_it_at_once(clients: Clients) -> None:
    locks = await clients()
    transport = clients.connections[locks].transport
    assert transport is not None
    await transport.connection.close()
    asked = monotonic()
    with pytest.raises(LockUnavailable, match="closed"):
        await locks.mutex("a").acquire(5.0)
    assert monotonic() - asked < 2


async def test_a_waiting_client_that_gives_up_leaves_nothing_behind(clients: Clients) -> None:
    one, two, three = await clients(), await clients(), await clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(two.mutex("a").acquire(30))
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await two.mutex("a").acquire(0.3) is None
    await grant.release()
    await held(three.mutex("a"), 0.5)


async def test_fifty_who_wait_have_it_in_the_order_in_which_they_came(clients: Clients) -> None:
    """Nobody asks time and again, nobody is overtaken, and it is handed over at once."""
    locks = [await clients() for _ in range(5)]
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
        await asyncio.sleep(0.02)  # so that the broker sees them in this order
    await first.release()
    await asyncio.gather(*working)
    assert order == list(range(50))
    assert median(later - earlier for earlier, later in pairwise(hand_overs)) < 0.01 + 0.05


async def test_a_renewal_proves_the_lock_and_raises_its_token(clients: Clients) -> None:
    one, two = await clients(), await clients()
    grant = await held(one.mutex("a"))
    waiting = asyncio.ensure_future(two.mutex("a").acquire(1.0))
    await asyncio.sleep(0.2)
    before = token(grant)
    assert (await grant.renew() or 0) > before
    assert len(set(await asyncio.gather(grant.renew(), grant.renew()))) == 1, "one renewal does for both"
    await grant.verify()
    assert await waiting is None, "a renewal hands it to nobody"


async def test_a_held_lock_is_renewed_by_itself(clients: Clients) -> None:
    grant = await held((await clients(renew_seconds=0.1)).mutex("a"))
    before = token(grant)
    await asyncio.sleep(0.5)
    assert token(grant) >= before + 2
    await grant.verify()
    await grant.release()


# ---------------------------------------------------------------- administration


async def test_a_lock_that_nobody_administers_is_not_found(clients: Clients) -> None:
    locks = await clients()
    with pytest.raises(LockNotFound, match="an administrator sets"):
        await locks.semaphore("a").acquire()
    with pytest.raises(LockNotFound):
        await locks.administration.status("a", LockKind.SEMAPHORE)
    with pytest.raises(InvalidRequest, match="slots: 2"):
        await locks.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 2)
    with pytest.raises(InvalidRequest, match="lock name"):
        locks.mutex("a b")


async def test_who_waits_for_a_disabled_lock_gets_it_once_it_is_enabled(clients: Clients) -> None:
    admin, locks = await clients(), await clients()
    waiting = asyncio.ensure_future(locks.persistent_mutex("a").acquire(10))
    await asyncio.sleep(0.2)
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
    grant = await waiting
    assert grant is not None
    await grant.verify()


async def test_a_holder_of_a_removed_slot_learns_it_when_it_verifies_and_nobody_had_it_meanwhile(
    clients: Clients,
) -> None:
    admin, one, two = await clients(), await clients(), await clients()
    mutex = await lock(one, LockKind.PERSISTENT_MUTEX)
    grant = await held(mutex)
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 0)
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
    other = two.persistent_mutex("a")
    assert await other.acquire(0.5) is None, "the slot that is back is still held"
    await grant.verify()
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 0)
    with pytest.raises(LockLost, match="removed"):
        await grant.verify()
    assert grant.lost.is_set()
    with pytest.raises(LockNotFound):
        await other.acquire(0.2)
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
    assert token(await held(other)) > token(grant)


async def test_a_removed_slot_of_an_unfenced_lock_is_let_go_with_the_next_verify(clients: Clients) -> None:
    admin, one, two = await clients(), await clients(), await clients()
    grant = await held(await lock(one, LockKind.PERSISTENT_MUTEX, fenced=False))
    for slots in (0, 1):
        await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, slots, fenced=False)
    other = two.persistent_mutex("a", fenced=False)
    assert await other.acquire(0.3) is None, "the slot that is back is still held"
    await grant.verify()
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 0, fenced=False)
    with pytest.raises(LockLost, match="removed"):
        await grant.verify()
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1, fenced=False)
    await held(other)


async def test_slots_come_and_go_under_those_who_wait(clients: Clients) -> None:
    admin = await clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 1)
    first = await held((await clients()).semaphore("a"))
    waiting = asyncio.ensure_future(held((await clients()).semaphore("a")))
    await asyncio.sleep(0.2)
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 2)
    second = await waiting
    assert second.slot.number == 2
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 1)
    with pytest.raises(LockLost):
        await second.verify()
    await first.verify()
    assert await (await clients()).semaphore("a").acquire(0.2) is None


async def test_no_connection_is_lost_while_slots_come_and_go_under_those_who_acquire(clients: Clients) -> None:
    """RabbitMQ closes the connection of whoever publishes to a quorum queue at the moment it is deleted."""
    admin, *others = [await clients() for _ in range(4)]
    done = asyncio.Event()
    grants = 0

    async def use(locks: Locks) -> None:
        nonlocal grants
        lock = locks.persistent_mutex("a")
        while not done.is_set():
            with suppress(LockNotFound):
                grant = await lock.acquire(0.3)
                if grant is not None:
                    grants += 1
                    await grant.release()

    async with asyncio.TaskGroup() as tasks:
        for one in others:
            tasks.create_task(use(one))
        for change in range(40):
            await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
            await asyncio.sleep(change % 10 / 200)  # removed before, while and after they acquire it
            await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 0)
        done.set()
    assert grants >= 10
    assert not any(connection.is_closed for connection in clients.connections.values())


async def test_an_administrator_sees_who_holds_and_how_many_wait(clients: Clients) -> None:
    admin = await clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 2)
    grant = await held((await clients("billing")).semaphore("a"))
    status = await admin.administration.status("a", LockKind.SEMAPHORE)
    assert [(slot.held, slot.holder, slot.fencing_token) for slot in status.slots] == [
        (True, "billing", token(grant)),
        (False, "", None),
    ]
    await held((await clients("another")).semaphore("a"))
    waiting = [asyncio.ensure_future((await clients()).semaphore("a").acquire(2)) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert (await admin.administration.status("a", LockKind.SEMAPHORE)).waiting == 3
    await asyncio.gather(*waiting)


async def test_administrators_who_look_at_the_same_time_all_see_who_holds_it(clients: Clients) -> None:
    admins = [await clients() for _ in range(3)]
    await admins[0].administration.set_slots("a", LockKind.SEMAPHORE, 1)
    grant = await held((await clients("billing")).semaphore("a"))
    looks = [admin.administration.status("a", LockKind.SEMAPHORE) for admin in admins for _ in range(2)]
    for status in await asyncio.gather(*looks):
        assert [(slot.holder, slot.fencing_token) for slot in status.slots] == [("billing", token(grant))]


async def test_who_holds_it_is_not_replaced_by_who_held_it_while_somebody_looked(amqp_url: str) -> None:
    async with await aio_pika.connect(amqp_url) as connection:
        driver = RabbitLockDriver(connection)
        plain = await driver.plain_channel()
        channel = await driver.open(Line())
        await channel.declare("slot", QueueRole.SLOT, kept_seconds=None)
        await channel.put("slot", b"old")
        looked_at = await plain.basic_get("slot")
        await channel.put("slot", b"new")
        await plain.basic_nack(looked_at.delivery_tag or 0, requeue=True)
        await plain.close()  # by then it is there again
        assert await channel.last("slot") == b"new"
        await channel.delete("slot")


async def test_a_lock_that_goes_while_an_administrator_looks_is_no_error(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await clients()
    await held(await lock(await clients(), LockKind.PERSISTENT_MUTEX))
    last = RabbitLockChannel.last

    async def gone(channel: RabbitLockChannel, queue: str) -> bytes | None:
        await admin.administration.delete("a", LockKind.PERSISTENT_MUTEX)
        return await last(channel, queue)

    monkeypatch.setattr(RabbitLockChannel, "last", gone)
    (slot,) = (await admin.administration.status("a", LockKind.PERSISTENT_MUTEX)).slots
    assert slot.holder == ""


@pytest.mark.parametrize("unseen", [2, 1000])
async def test_a_slot_that_is_put_back_while_its_queue_shows_nothing_has_one_token(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, unseen: int
) -> None:
    """RabbitMQ says of a queue that has just lost its leader that it has no message and no consumer. With two tokens
    the next holders would get the lower and the higher one in turn."""
    admin, one, two = [await clients() for _ in range(3)]
    before = await held(await lock(one, LockKind.PERSISTENT_MUTEX))
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 0)
    state, shown = RabbitLockChannel.state, 0

    async def without_leader(channel: RabbitLockChannel, queue: str) -> QueueState | None:
        nonlocal shown
        shown += queue == before.slot.token_queue
        found = await state(channel, queue)
        return found if found is None or shown > unseen else QueueState(ready=0, consumers=0)

    with monkeypatch.context() as patched:
        patched.setattr(RabbitLockChannel, "state", without_leader)
        await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
    if unseen == 2:
        await before.verify()
        assert await two.persistent_mutex("a").acquire() is None
    channel = await clients.connections[admin].channel()
    after = before if unseen == 2 else await held(two.persistent_mutex("a"))
    assert token(after) >= token(before)
    queue = await channel.declare_queue(before.slot.token_queue, passive=True)
    assert queue.declaration_result.message_count == 0
    if unseen != 2:
        await eventually_lost(before)


async def test_a_slot_whose_administrator_died_before_it_had_a_token_is_made_by_the_next(clients: Clients) -> None:
    admin = await clients()
    slot = Slot("a", LockKind.PERSISTENT_MUTEX, 1)
    channel = await RabbitLockDriver(clients.connections[admin]).open(Line())
    await channel.declare(slot.token_queue, QueueRole.TOKEN, kept_seconds=None)
    await channel.close()
    grant = await held(await lock(admin, LockKind.PERSISTENT_MUTEX), wait_seconds=0.0)
    await grant.verify()


async def test_a_slot_that_is_taken_away_is_lost_at_once_and_fenced(clients: Clients) -> None:
    admin = await clients()
    grant = await held(await lock(await clients(), LockKind.PERSISTENT_MUTEX))
    await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX)
    await eventually_lost(grant)
    after = await held((await clients()).persistent_mutex("a"))
    assert token(after) > token(grant)
    with pytest.raises(LockNotFound, match="no slot 2"):
        await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX, 2)


async def test_a_free_slot_that_is_taken_away_again_and_again_gives_no_token_twice(clients: Clients) -> None:
    admin = await clients()
    mutex = await lock(await clients(), LockKind.PERSISTENT_MUTEX)
    tokens: list[int] = []
    for _ in range(3):  # three times within two seconds
        grant = await held(mutex)
        tokens.append(token(grant))
        await grant.release()
        await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX)
    assert tokens == sorted(set(tokens))


async def test_who_waits_for_a_slot_that_is_taken_away_gets_it(clients: Clients) -> None:
    admin = await clients()
    grant = await held(await lock(await clients(), LockKind.SEMAPHORE))
    waiting = asyncio.ensure_future(held((await clients()).semaphore("a")))
    await asyncio.sleep(0.2)
    await admin.administration.force_release("a", LockKind.SEMAPHORE)
    assert token(await waiting) > token(grant)
    await eventually_lost(grant)


async def test_a_deleted_lock_is_gone_and_its_tokens_go_on_growing(clients: Clients) -> None:
    locks = await clients()
    grant = await held(await lock(locks, LockKind.SEMAPHORE))
    await locks.administration.delete("a", LockKind.SEMAPHORE)
    await eventually_lost(grant)
    with pytest.raises(LockNotFound):
        await locks.semaphore("a").acquire()
    again = await held(await lock(locks, LockKind.SEMAPHORE))
    assert token(again) > token(grant)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lock_whose_token_was_deleted_by_hand_is_mended(clients: Clients, kind: LockKind) -> None:
    locks = await clients()
    mended = await lock(locks, kind)
    before = await held(mended)
    channel = await clients.connections[locks].channel()
    await channel.queue_delete(before.slot.token_queue)
    await eventually_lost(before)
    if kind is not LockKind.MUTEX:  # which has no administrator
        with pytest.raises(LockUnavailable, match="set the lock's slots anew"):
            await mended.acquire()
        await locks.administration.set_slots("a", kind, 1)
    after = await held(mended, wait_seconds=0.0)
    await after.verify()
    assert token(after) > token(before)


async def test_a_mutex_whose_slot_queue_has_expired_is_administered_all_the_same(clients: Clients) -> None:
    """Nobody consumes that queue, nor mostly that of those who wait, so RabbitMQ removes them from a mutex in use."""
    admin, one = await clients(), await clients("billing")
    mutex = one.mutex("a")
    grant = await held(mutex)
    channel = await clients.connections[admin].channel()

    async def expire() -> None:
        await channel.queue_delete(grant.slot.slot_queue)
        await channel.queue_delete(grant.slot.waiting_queue)

    await expire()
    (slot,) = (await admin.administration.status("a", LockKind.MUTEX)).slots
    assert slot.held
    await expire()
    await admin.administration.force_release("a", LockKind.MUTEX)
    await eventually_lost(grant)
    await expire()
    after = await held(mutex)
    assert token(after) > token(grant)
    for _ in range(100):  # it is named while it is held already
        (slot,) = (await admin.administration.status("a", LockKind.MUTEX)).slots
        if slot.holder:
            break
        await asyncio.sleep(0.05)
    assert (slot.holder, slot.fencing_token) == ("billing", token(after))


async def test_a_lock_that_was_given_up_while_the_broker_stood_still_is_free_when_it_goes_on(
    clients: Clients, rabbitmq: RabbitNode
) -> None:
    """Its connection outlives that, and so must not hold what nobody holds."""
    one, two = await clients(), await clients()
    grant = await held(one.mutex("a"))
    rabbitmq.pause()
    try:
        with pytest.raises(LockLost, match="no answer"):
            await grant.verify()
        await asyncio.sleep(1.5)
    finally:
        rabbitmq.resume()
    assert token(await held(two.mutex("a"))) > token(grant)
    assert not clients.connections[one].is_closed


async def test_without_a_connection_there_is_no_lock(clients: Clients) -> None:
    locks = await clients()
    await clients.connections[locks].close()
    with pytest.raises(LockUnavailable, match="closed"):
        await locks.mutex("a").acquire()


async def test_who_asks_on_a_channel_that_is_closed_meanwhile_is_not_cancelled(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiormq cancels what waits on a channel that is closed; a program that verifies just then must hear an error."""
    async with await aio_pika.connect(amqp_url) as connection:
        driver = RabbitLockDriver(connection)
        plain = await driver.plain_channel()
        channel = RabbitLockChannel(plain, Line(), driver, set())
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
