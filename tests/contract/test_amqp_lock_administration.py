"""Administering locks over a real RabbitMQ: slots that are added and removed while clients hold and wait for them."""

import asyncio
from contextlib import suppress

import aio_pika
import pytest

from popgate.adapters.rabbitmq.lock_driver import RabbitLockChannel, RabbitLockDriver
from popgate.amqp_locks import LockKind, LockLost, LockNotFound, Locks, LockUnavailable
from popgate.domain.errors import InvalidRequest
from popgate.domain.locks import Slot
from popgate.locks.administration import LockAdministration
from popgate.locks.lock_queues import TokenListener
from popgate.ports.lock_driver import QueueRole, QueueState
from popgate.runtime.clocks import ManualClock
from support.lock_clients import LockClients, eventually_lost, held, lock, token

pytestmark = pytest.mark.rabbitmq_versions


async def test_a_lock_that_nobody_administers_is_not_found(lock_clients: LockClients) -> None:
    locks = await lock_clients()
    with pytest.raises(LockNotFound, match="an administrator sets"):
        await locks.semaphore("a").acquire()
    with pytest.raises(LockNotFound):
        await locks.administration.status("a", LockKind.SEMAPHORE)
    with pytest.raises(InvalidRequest, match="slots: 2"):
        await locks.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 2)
    with pytest.raises(InvalidRequest, match="lock name"):
        locks.mutex("a b")


async def test_who_waits_for_a_disabled_lock_gets_it_once_it_is_enabled(lock_clients: LockClients) -> None:
    admin, locks = await lock_clients(), await lock_clients()
    waiting = asyncio.ensure_future(locks.persistent_mutex("a").acquire(10))
    await asyncio.sleep(0.2)
    await admin.administration.set_slots("a", LockKind.PERSISTENT_MUTEX, 1)
    grant = await waiting
    assert grant is not None
    await grant.verify()


async def test_a_holder_of_a_removed_slot_learns_it_when_it_verifies_and_nobody_had_it_meanwhile(
    lock_clients: LockClients,
) -> None:
    admin, one, two = await lock_clients(), await lock_clients(), await lock_clients()
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


async def test_a_removed_slot_of_an_unfenced_lock_is_let_go_with_the_next_verify(lock_clients: LockClients) -> None:
    admin, one, two = await lock_clients(), await lock_clients(), await lock_clients()
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


async def test_slots_come_and_go_under_those_who_wait(lock_clients: LockClients) -> None:
    admin = await lock_clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 1)
    first = await held((await lock_clients()).semaphore("a"))
    waiting = asyncio.ensure_future(held((await lock_clients()).semaphore("a")))
    await asyncio.sleep(0.2)
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 2)
    second = await waiting
    assert second.slot.number == 2
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 1)
    with pytest.raises(LockLost):
        await second.verify()
    await first.verify()
    assert await (await lock_clients()).semaphore("a").acquire(0.2) is None


async def test_no_connection_is_lost_while_slots_come_and_go_under_those_who_acquire(lock_clients: LockClients) -> None:
    """RabbitMQ closes the connection of a client that publishes to a quorum queue at the moment of its deletion."""
    admin, *others = [await lock_clients() for _ in range(4)]
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
    assert not any(connection.is_closed for connection in lock_clients.connections.values())


async def test_an_administrator_sees_who_holds_and_how_many_wait(lock_clients: LockClients) -> None:
    admin = await lock_clients()
    await admin.administration.set_slots("a", LockKind.SEMAPHORE, 2)
    grant = await held((await lock_clients("billing")).semaphore("a"))
    status = await admin.administration.status("a", LockKind.SEMAPHORE)
    assert [(slot.held, slot.holder, slot.fencing_token) for slot in status.slots] == [
        (True, "billing", token(grant)),
        (False, "", None),
    ]
    await held((await lock_clients("another")).semaphore("a"))
    waiting = [asyncio.ensure_future((await lock_clients()).semaphore("a").acquire(2)) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert (await admin.administration.status("a", LockKind.SEMAPHORE)).waiting == 3
    await asyncio.gather(*waiting)


async def test_administrators_who_look_at_the_same_time_all_see_who_holds_it(lock_clients: LockClients) -> None:
    admins = [await lock_clients() for _ in range(3)]
    await admins[0].administration.set_slots("a", LockKind.SEMAPHORE, 1)
    grant = await held((await lock_clients("billing")).semaphore("a"))
    looks = [admin.administration.status("a", LockKind.SEMAPHORE) for admin in admins for _ in range(2)]
    for status in await asyncio.gather(*looks):
        assert [(slot.holder, slot.fencing_token) for slot in status.slots] == [("billing", token(grant))]


async def test_who_holds_it_is_not_replaced_by_who_held_it_while_somebody_looked(amqp_url: str) -> None:
    async with await aio_pika.connect(amqp_url) as connection:
        driver = RabbitLockDriver(connection)
        plain = await driver.plain_channel()
        channel = await driver.open(TokenListener())
        await channel.declare("slot", QueueRole.HOLDER, kept_seconds=None)
        await channel.put("slot", b"old")
        looked_at = await plain.basic_get("slot")
        await channel.put("slot", b"new")
        await plain.basic_nack(looked_at.delivery_tag or 0, requeue=True)
        await plain.close()  # by then it exists again
        assert await channel.last("slot") == b"new"
        await channel.delete("slot")


async def test_a_lock_that_goes_while_an_administrator_looks_is_no_error(
    lock_clients: LockClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await lock_clients()
    await held(await lock(await lock_clients(), LockKind.PERSISTENT_MUTEX))
    last = RabbitLockChannel.last

    async def gone(channel: RabbitLockChannel, queue: str) -> bytes | None:
        await admin.administration.delete("a", LockKind.PERSISTENT_MUTEX)
        return await last(channel, queue)

    monkeypatch.setattr(RabbitLockChannel, "last", gone)
    (slot,) = (await admin.administration.status("a", LockKind.PERSISTENT_MUTEX)).slots
    assert slot.holder == ""


@pytest.mark.parametrize("unseen", [2, 1000])
async def test_a_slot_that_is_put_back_while_its_queue_shows_nothing_has_one_token(
    lock_clients: LockClients, monkeypatch: pytest.MonkeyPatch, unseen: int
) -> None:
    """RabbitMQ reports no message and no consumer for a queue that has just lost its leader. With two tokens the
    next holders would get the lower and the higher one in turn.
    """
    admin, one, two = [await lock_clients() for _ in range(3)]
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
    channel = await lock_clients.connections[admin].channel()
    after = before if unseen == 2 else await held(two.persistent_mutex("a"))
    assert token(after) >= token(before)
    queue = await channel.declare_queue(before.slot.token_queue, passive=True)
    assert queue.declaration_result.message_count == 0
    if unseen != 2:
        await eventually_lost(before)


async def test_a_slot_whose_administrator_died_before_it_had_a_token_is_made_by_the_next(
    lock_clients: LockClients,
) -> None:
    admin = await lock_clients()
    slot = Slot("a", LockKind.PERSISTENT_MUTEX, 1)
    channel = await RabbitLockDriver(lock_clients.connections[admin]).open(TokenListener())
    await channel.declare(slot.token_queue, QueueRole.TOKEN, kept_seconds=None)
    await channel.close()
    grant = await held(await lock(admin, LockKind.PERSISTENT_MUTEX), wait_seconds=0.0)
    await grant.verify()


async def test_a_slot_that_is_taken_away_is_lost_at_once_and_fenced(lock_clients: LockClients) -> None:
    admin = await lock_clients()
    grant = await held(await lock(await lock_clients(), LockKind.PERSISTENT_MUTEX))
    await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX)
    await eventually_lost(grant)
    after = await held((await lock_clients()).persistent_mutex("a"))
    assert token(after) > token(grant)
    with pytest.raises(LockNotFound, match="no slot 2"):
        await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX, 2)


async def test_a_slot_that_is_taken_away_by_an_administrator_whose_clock_is_behind_is_fenced(
    lock_clients: LockClients, amqp_url: str
) -> None:
    grant = await held(await lock(await lock_clients(), LockKind.PERSISTENT_MUTEX))
    connection = await aio_pika.connect(amqp_url)
    behind = LockAdministration(RabbitLockDriver(connection), ManualClock(wall=1_000_000_000.0))
    await behind.force_release("a", LockKind.PERSISTENT_MUTEX)
    await connection.close()
    after = await held((await lock_clients()).persistent_mutex("a"))
    assert token(after) > token(grant)


async def test_a_free_slot_that_is_taken_away_again_and_again_gives_no_token_twice(lock_clients: LockClients) -> None:
    admin = await lock_clients()
    mutex = await lock(await lock_clients(), LockKind.PERSISTENT_MUTEX)
    tokens: list[int] = []
    for _ in range(3):  # three times within two seconds
        grant = await held(mutex)
        tokens.append(token(grant))
        await grant.release()
        await admin.administration.force_release("a", LockKind.PERSISTENT_MUTEX)
    assert tokens == sorted(set(tokens))


async def test_who_waits_for_a_slot_that_is_taken_away_gets_it(lock_clients: LockClients) -> None:
    admin = await lock_clients()
    grant = await held(await lock(await lock_clients(), LockKind.SEMAPHORE))
    waiting = asyncio.ensure_future(held((await lock_clients()).semaphore("a")))
    await asyncio.sleep(0.2)
    await admin.administration.force_release("a", LockKind.SEMAPHORE)
    assert token(await waiting) > token(grant)
    await eventually_lost(grant)


async def test_a_deleted_lock_is_gone_and_its_tokens_go_on_growing(lock_clients: LockClients) -> None:
    locks = await lock_clients()
    grant = await held(await lock(locks, LockKind.SEMAPHORE))
    await locks.administration.delete("a", LockKind.SEMAPHORE)
    await eventually_lost(grant)
    with pytest.raises(LockNotFound):
        await locks.semaphore("a").acquire()
    again = await held(await lock(locks, LockKind.SEMAPHORE))
    assert token(again) > token(grant)


async def test_a_deletion_that_is_not_due_when_it_may_begin_deletes_nothing(lock_clients: LockClients) -> None:
    async def is_due() -> bool:
        return False

    locks = await lock_clients()
    grant = await held(await lock(locks, LockKind.SEMAPHORE))
    await locks.administration.delete("a", LockKind.SEMAPHORE, is_due)
    await grant.verify()
    assert [slot.held for slot in (await locks.administration.status("a", LockKind.SEMAPHORE)).slots] == [True]


@pytest.mark.parametrize("kind", LockKind)
async def test_a_lock_whose_token_was_deleted_by_hand_is_mended(lock_clients: LockClients, kind: LockKind) -> None:
    locks = await lock_clients()
    mended = await lock(locks, kind)
    before = await held(mended)
    channel = await lock_clients.connections[locks].channel()
    await channel.queue_delete(before.slot.token_queue)
    await eventually_lost(before)
    if kind is not LockKind.MUTEX:  # which has no administrator
        with pytest.raises(LockUnavailable, match="set the slots of the lock again"):
            await mended.acquire()
        await locks.administration.set_slots("a", kind, 1)
    after = await held(mended, wait_seconds=0.0)
    await after.verify()
    assert token(after) > token(before)


async def test_a_mutex_whose_slot_queue_has_expired_is_administered_all_the_same(lock_clients: LockClients) -> None:
    """That queue has no consumer, nor usually has the queue of waiting clients, so RabbitMQ removes them from a
    mutex in use.
    """
    admin, one = await lock_clients(), await lock_clients("billing")
    mutex = one.mutex("a")
    grant = await held(mutex)
    channel = await lock_clients.connections[admin].channel()

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
