"""Administers locks on the broker: sets the number of slots, shows their holders, and releases slots by force.

This module declares and deletes the queues of locks in the right order. An administrator of a lock declares an
exclusive queue, as amqp-locks requires, so that only one administrator can change the lock at any time. The slot queue
of a slot is declared last and deleted first, and a slot without a slot queue does not count. So after a crash at any
point, the lock is unchanged or has fewer slots.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from popgate.domain.errors import LockHeld, LockNotFound, LockUnavailable
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name, checked_slots, first_token, lock_prefix
from popgate.locks.lock_queues import Probe, TokenListener
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockChannel, LockDriver, QueueRole

ADMINISTERED_SECONDS_MAX = 10.0
"""Approximate maximum number of seconds that an administrator waits until another administrator has finished."""
RETRY_SECONDS = 0.05
ARRIVAL_SECONDS = 0.5
"""Maximum seconds to wait for a token message. If the token queue contains the message, it arrives within
milliseconds."""
TOLD_SECONDS = 0.5
SAYS_ATTEMPTS_MAX = 10
SAYS_AGAIN_SECONDS = 0.01

IsDue: TypeAlias = Callable[[], Awaitable[bool]]
"""Returns whether a lock must still be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """The state of one slot of a lock.

    ``holder``, ``since`` (Unix seconds) and ``fencing_token`` describe the latest grant of the slot. If the slot is not
    held, ``holder`` is empty and the others are None.
    """

    number: int
    held: bool
    holder: str = ""
    since: float | None = None
    fencing_token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    lock: str
    kind: LockKind
    slots: Sequence[SlotStatus]
    waiting: int
    """Number of clients that wait for a slot."""


class LockAdministration:
    """Changes and inspects locks on the broker. ``driver`` may use any connection to the broker.

    For unfenced locks, only ``set_slots`` is supported. AMQP does not show which connection owns an exclusive queue,
    and no other connection can delete this queue.
    """

    def __init__(self, driver: LockDriver, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock

    async def set_slots(self, lock: str, kind: LockKind, slots: int, *, fenced: bool = True) -> None:
        """Set the number of slots of a lock.

        The holder of a removed slot notices the removal when it verifies its lock. No other client can acquire the slot
        before the holder has released it, even if the slot is added again before the release.

        Raises: InvalidRequest, LockHeld (if another administrator is changing the lock), LockUnavailable.
        """
        checked_slots(slots, kind)
        all_slots = [Slot(checked_lock_name(lock), kind, number, fenced) for number in range(1, SLOTS_MAX + 1)]
        async with administering(self._driver, all_slots[0]), Probe(self._driver) as probe:
            # Delete the highest slot first, because clients count the slots from 1 up to the first number without a
            # slot queue.
            for slot in reversed(all_slots[slots:]):
                if kind is LockKind.SEMAPHORE or slot.number == 1:
                    await (await probe.channel()).delete(slot.slot_queue)
            for slot in all_slots[:slots]:
                await _make_sure(self._driver, probe, slot, self._clock)

    async def status(self, lock: str, kind: LockKind) -> LockStatus:
        """Return the slots of a lock, their holders, and the number of waiting clients.

        Raises: LockNotFound, LockUnavailable.
        """
        found: list[SlotStatus] = []
        async with Probe(self._driver) as probe:
            for number in range(1, SLOTS_MAX + 1):
                slot = Slot(checked_lock_name(lock), kind, number)
                if await probe.state(slot.slot_queue) is None:
                    if not await _is_mutex_in_use(probe, slot):
                        break
                    await make_mutex(self._driver, slot, self._clock)
                found.append(await slot_status(probe, slot))
                if kind is not LockKind.SEMAPHORE:
                    break
            waiting = await probe.state(Slot(lock, kind, 1).waiting_queue) if found else None
        if not found and kind is LockKind.MUTEX:
            raise LockNotFound(f"there is no mutex {lock}: no client has acquired it recently")
        if not found:
            raise LockNotFound(f"lock {lock} has no slots: set how many it has")
        return LockStatus(lock=lock, kind=kind, slots=found, waiting=0 if waiting is None else waiting.consumers)

    async def force_release(self, lock: str, kind: LockKind, number: int = 1) -> None:
        """Release a slot although its holder has not released it.

        A holder that is connected to the broker is notified at once. If a holder can't be reached, the protected
        resource refuses its later writes, because a later grant has a higher fencing token.

        Raises: LockNotFound, LockHeld (if another administrator is changing the lock), LockUnavailable.
        """
        slot = Slot(checked_lock_name(lock), kind, number)
        async with administering(self._driver, slot), Probe(self._driver) as probe:
            if await probe.state(slot.slot_queue) is None and not await _is_mutex_in_use(probe, slot):
                raise LockNotFound(f"lock {lock} has no slot {number}")
            await _make_anew(self._driver, probe, slot, self._clock)

    async def delete(self, lock: str, kind: LockKind, is_due: IsDue | None = None) -> None:
        """Delete a lock with all slots. Its holders lose the lock. Idempotent.

        Do nothing if ``is_due`` returns False when this administrator has excluded the others: one of them may have
        deleted the lock and made it again meanwhile. Raises: LockHeld, LockUnavailable, and the errors of ``is_due``.
        """
        slots = [Slot(checked_lock_name(lock), kind, number) for number in range(1, SLOTS_MAX + 1)]
        if kind is not LockKind.SEMAPHORE:
            del slots[1:]
        async with administering(self._driver, slots[0]), Probe(self._driver) as probe:
            if is_due is not None and not await is_due():
                return
            channel = await probe.channel()
            for slot in reversed(slots):
                await channel.delete(slot.slot_queue)
                await channel.delete(slot.token_queue)
            await asyncio.sleep(TOLD_SECONDS)  # a client that has just acquired a slot may still be writing its name
            for slot in slots:
                await channel.delete(slot.holder_queue)
            await channel.delete(slots[0].waiting_queue)


async def make_mutex(driver: LockDriver, slot: Slot, clock: Clock) -> None:
    """Create the only slot of a mutex if it does not exist. Raises: LockHeld, LockUnavailable."""
    async with administering(driver, slot), Probe(driver) as probe:
        await _make_sure(driver, probe, slot, clock)


@contextlib.asynccontextmanager
async def administering(driver: LockDriver, slot: Slot) -> AsyncGenerator[None]:
    """Exclude other administrators from the lock of ``slot`` until the context exits.

    Raises: LockHeld, LockUnavailable.
    """
    queue = f"{lock_prefix(slot.lock, slot.kind, fenced=slot.fenced)}:administrator"
    channel: LockChannel | None = None
    for _ in range(int(ADMINISTERED_SECONDS_MAX / RETRY_SECONDS)):
        channel = await _taken(driver, queue)
        if channel is not None:
            break
        await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))
    if channel is None:
        raise LockHeld(f"another administrator is changing lock {slot.lock}; try again")
    try:
        yield
    finally:
        await channel.close()


async def _taken(driver: LockDriver, queue: str) -> LockChannel | None:
    channel = await driver.open(TokenListener())
    try:
        if await channel.take(queue):
            return channel
    except BaseException:
        await channel.close()
        raise
    await channel.close()
    return None


async def _is_mutex_in_use(probe: Probe, slot: Slot) -> bool:
    """Return whether ``slot``, whose slot queue does not exist, is the slot of an existing mutex.

    The slot queue of a mutex has no consumer. So RabbitMQ considers the slot queue unused, and deletes it one day after
    its declaration, even if the mutex is held. The token queue shows that the mutex exists.
    """
    return slot.kind is LockKind.MUTEX and await probe.state(slot.token_queue) is not None


async def _make_sure(driver: LockDriver, probe: Probe, slot: Slot, clock: Clock) -> None:
    """Create ``slot`` if it does not exist, or repair it if one of its queues was deleted by hand."""
    if await probe.state(slot.slot_queue) is None:
        await _make(driver, slot, clock)
    elif slot.fenced and await probe.state(slot.token_queue) is None:
        await _make_anew(driver, probe, slot, clock)
    elif slot.fenced and await probe.state(slot.holder_queue) is None:
        await _make(driver, slot, clock)


async def _make_anew(driver: LockDriver, probe: Probe, slot: Slot, clock: Clock) -> None:
    """Delete the queues of an existing slot, and create the slot again. The present holder loses the slot."""
    latest = (await _says(probe, slot)).get("fencing_token") or 0
    channel = await probe.channel()
    await channel.delete(slot.slot_queue)  # delete this queue first: if the next step fails, the slot does not count
    await channel.delete(slot.token_queue)
    # Wait until RabbitMQ has notified the consumers of the deletion. Otherwise it moves them to a new queue of the same
    # name.
    await asyncio.sleep(TOLD_SECONDS)
    await _make(driver, slot, clock, above=latest)


async def _make(driver: LockDriver, slot: Slot, clock: Clock, *, above: int = 0) -> None:
    """Declare the queues of a slot that does not exist.

    The token queue of an earlier slot with the same number may still exist, and a client may hold its token message. In
    this case, the token queue is kept. ``above`` is the highest fencing token of an earlier slot.
    """
    async with Probe(driver) as probe:
        if not slot.fenced:
            await (await probe.channel()).declare(slot.slot_queue, QueueRole.SLOT, kept_seconds=slot.kept_seconds)
            return
        is_new = await probe.state(slot.token_queue) is None
        channel = await probe.channel()
        if not is_new and not await _has_token(driver, slot):
            # The token message was not found, but may still exist. With a second token message in the same queue, the
            # messages would alternate, and fencing tokens would decrease. So replace the queue.
            await channel.delete(slot.token_queue)
            await asyncio.sleep(TOLD_SECONDS)
            is_new = True
        if is_new:  # an existing queue may have other arguments from another version of the broker
            await channel.declare(slot.token_queue, QueueRole.TOKEN, kept_seconds=slot.kept_seconds)
            body = str(first_token(clock.wall(), above)).encode()
            if not await channel.put(slot.token_queue, body):
                raise LockUnavailable(f"{slot.token_queue} was deleted while it was being created")
        await channel.declare(slot.waiting_queue, QueueRole.WAITING, kept_seconds=slot.kept_seconds)
        await channel.declare(slot.holder_queue, QueueRole.HOLDER, kept_seconds=slot.kept_seconds)
        await channel.declare(slot.slot_queue, QueueRole.SLOT, kept_seconds=slot.kept_seconds)


async def _has_token(driver: LockDriver, slot: Slot) -> bool:
    """Return whether the token queue of ``slot`` contains its token message, or a client holds this message.

    The token message is missing if the program that declared the token queue crashed before it published the message.
    """
    listener = TokenListener()
    channel = await driver.open(listener)
    try:
        if await _shows_token(channel, slot):
            return True
        # If a connection has just ended, the broker may not have returned its token message to the queue yet. So wait
        # for the message as a consumer.
        if not await channel.wait_for_token(slot.token_queue):
            return False
        if await listener.token(ARRIVAL_SECONDS) is not None:
            return True
        # A queue without a leader reports no messages. The queue had a leader when it accepted the consumer, so check
        # once more.
        await channel.leave(slot.token_queue)
        return await _shows_token(channel, slot)
    finally:
        await channel.close()


async def _shows_token(channel: LockChannel, slot: Slot) -> bool:
    """Return whether the token queue contains the token message, or has consumers that may hold the message."""
    state = await channel.state(slot.token_queue)
    return state is not None and bool(state.ready or state.consumers)


async def slot_status(probe: Probe, slot: Slot) -> SlotStatus:
    """Return whether ``slot`` is held according to the broker, and the data that the latest holder wrote.

    Raises: LockUnavailable.
    """
    state = await probe.state(slot.token_queue)
    if state is None or state.ready or not state.consumers:
        return SlotStatus(number=slot.number, held=False)
    known = await _says(probe, slot)
    return SlotStatus(
        number=slot.number,
        held=True,
        holder=known.get("holder", ""),
        since=known.get("since"),
        fencing_token=known.get("fencing_token"),
    )


async def _says(probe: Probe, slot: Slot) -> dict[str, Any]:
    """Return the data that the latest holder of ``slot`` wrote, or an empty dictionary if no data could be read."""
    for _ in range(SAYS_ATTEMPTS_MAX):
        says = await probe.last(slot.holder_queue)
        if says is not None:
            known: dict[str, Any] = orjson.loads(says)
            return known
        if await probe.state(slot.holder_queue) is None:
            break
        # Another client may be reading the message at the same time. It returns the message immediately.
        await asyncio.sleep(SAYS_AGAIN_SECONDS * random.uniform(0.5, 1.5))
    return {}
