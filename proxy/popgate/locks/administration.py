"""Administers locks remotely: sets the number of slots, shows their holders, and releases slots by force.

Declares and deletes the queues of locks on the broker, in the right order. An exclusive queue (as amqp-locks requires)
lets only one administrator of a lock work at a time. A crash at any point leaves a lock unchanged or with fewer slots:
a slot queue is declared last and deleted first, and a slot without its slot queue does not count.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from popgate.domain.errors import LockHeld, LockNotFound, LockUnavailable
from popgate.domain.locks import SLOTS_MAX, LockKind, Slot, checked_lock_name, checked_slots, first_token, lock_prefix
from popgate.locks.lock_queues import Probe, TokenListener
from popgate.ports.clock import Clock
from popgate.ports.lock_driver import LockChannel, LockDriver, QueueRole

ADMINISTERED_SECONDS_MAX = 10.0
"""Maximum seconds that an administrator waits for another administrator to finish."""
RETRY_SECONDS = 0.05
ARRIVAL_SECONDS = 0.5
"""Maximum seconds to wait for a token. If the queue contains the token, it arrives within milliseconds."""
TOLD_SECONDS = 0.5
SAYS_ATTEMPTS_MAX = 10
SAYS_AGAIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """The state of a slot.

    ``holder``, ``since`` (Unix seconds) and ``fencing_token`` describe the latest grant. They are empty if the slot is
    not held.
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
    """Number of clients that wait."""


class LockAdministration:
    """Offers the operations of an administrator, who may use any connection.

    For unfenced locks, only the number of slots can be set. AMQP does not show the holder of an exclusive queue, and no
    other connection can delete the queue.
    """

    def __init__(self, driver: LockDriver, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock

    async def set_slots(self, lock: str, kind: LockKind, slots: int, *, fenced: bool = True) -> None:
        """Set the number of slots of a lock.

        The holder of a removed slot notices the removal when it verifies its lock. No other client receives that slot
        before the holder has released it, even if the slot is added again in the meantime.

        Raises: InvalidRequest, LockHeld (another administrator is changing the lock), LockUnavailable.
        """
        checked_slots(slots, kind)
        all_slots = [Slot(checked_lock_name(lock), kind, number, fenced) for number in range(1, SLOTS_MAX + 1)]
        async with administering(self._driver, all_slots[0]), Probe(self._driver) as probe:
            # Delete the highest number first, because a lock has the slots whose numbers follow each other from 1 on.
            for slot in reversed(all_slots[slots:]):
                if kind is LockKind.SEMAPHORE or slot.number == 1:
                    await (await probe.channel()).delete(slot.slot_queue)
            for slot in all_slots[:slots]:
                await _make_sure(self._driver, probe, slot, self._clock)

    async def status(self, lock: str, kind: LockKind) -> LockStatus:
        """Return the slots of a lock, with their holders. Raises: LockNotFound, LockUnavailable."""
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
        """Release a slot by force. A reachable holder notices this at once. A later write of an unreachable holder is
        refused by the fence.

        Raises: LockNotFound, LockHeld (another administrator is changing the lock), LockUnavailable.
        """
        slot = Slot(checked_lock_name(lock), kind, number)
        async with administering(self._driver, slot), Probe(self._driver) as probe:
            if await probe.state(slot.slot_queue) is None and not await _is_mutex_in_use(probe, slot):
                raise LockNotFound(f"lock {lock} has no slot {number}")
            await _make_anew(self._driver, probe, slot, self._clock)

    async def delete(self, lock: str, kind: LockKind) -> None:
        """Delete a lock; its holders lose it. Idempotent. Raises: LockHeld, LockUnavailable."""
        slots = [Slot(checked_lock_name(lock), kind, number) for number in range(1, SLOTS_MAX + 1)]
        if kind is not LockKind.SEMAPHORE:
            del slots[1:]
        async with administering(self._driver, slots[0]), Probe(self._driver) as probe:
            channel = await probe.channel()
            for slot in reversed(slots):
                await channel.delete(slot.slot_queue)
                await channel.delete(slot.token_queue)
            await asyncio.sleep(TOLD_SECONDS)  # a client that has just received a slot still writes its name
            for slot in slots:
                await channel.delete(slot.holder_queue)
            await channel.delete(slots[0].waiting_queue)


async def make_mutex(driver: LockDriver, slot: Slot, clock: Clock) -> None:
    """Make sure that the only slot of a mutex exists. Raises: LockHeld, LockUnavailable."""
    async with administering(driver, slot), Probe(driver) as probe:
        await _make_sure(driver, probe, slot, clock)


@contextlib.asynccontextmanager
async def administering(driver: LockDriver, slot: Slot) -> AsyncGenerator[None]:
    """Exclude other administrators of ``slot``'s lock until the context exits. Raises: LockHeld, LockUnavailable."""
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
    """Return whether a slot without its slot queue belongs to a mutex in use.

    The slot queue has no consumer. So RabbitMQ considers it unused and removes it a day after its declaration, even
    while the mutex is held.
    """
    return slot.kind is LockKind.MUTEX and await probe.state(slot.token_queue) is not None


async def _make_sure(driver: LockDriver, probe: Probe, slot: Slot, clock: Clock) -> None:
    """Make the slot if it does not exist, or if one of its queues was deleted by hand."""
    if await probe.state(slot.slot_queue) is None:
        await _make(driver, slot, clock)
    elif slot.fenced and await probe.state(slot.token_queue) is None:
        await _make_anew(driver, probe, slot, clock)
    elif slot.fenced and await probe.state(slot.holder_queue) is None:
        await _make(driver, slot, clock)


async def _make_anew(driver: LockDriver, probe: Probe, slot: Slot, clock: Clock) -> None:
    """Replace an existing slot by a new one. The holder of the existing slot loses it."""
    latest = (await _says(probe, slot)).get("fencing_token") or 0
    channel = await probe.channel()
    await channel.delete(slot.slot_queue)  # first: if this function is interrupted, the slot does not count
    await channel.delete(slot.token_queue)
    # RabbitMQ moves consumers to a new queue of the same name, unless it has already notified them of the deletion.
    await asyncio.sleep(TOLD_SECONDS)
    await _make(driver, slot, clock, above=latest)


async def _make(driver: LockDriver, slot: Slot, clock: Clock, *, above: int = 0) -> None:
    """Declare the queues of a slot that does not exist. A token queue from earlier may still exist, and its token may
    be held."""
    async with Probe(driver) as probe:
        if not slot.fenced:
            await (await probe.channel()).declare(slot.slot_queue, QueueRole.SLOT, kept_seconds=slot.kept_seconds)
            return
        is_new = await probe.state(slot.token_queue) is None
        channel = await probe.channel()
        if not is_new and not await _has_token(driver, slot):
            # Never add a second token to a queue whose token was not seen: the two tokens would alternate, and fencing
            # tokens would decrease.
            await channel.delete(slot.token_queue)
            await asyncio.sleep(TOLD_SECONDS)
            is_new = True
        if is_new:  # another version of the broker may have declared an existing one differently
            await channel.declare(slot.token_queue, QueueRole.TOKEN, kept_seconds=slot.kept_seconds)
            body = str(first_token(clock.wall(), above)).encode()
            if not await channel.put(slot.token_queue, body):
                raise LockUnavailable(f"{slot.token_queue} was deleted while it was being created")
        await channel.declare(slot.waiting_queue, QueueRole.WAITING, kept_seconds=slot.kept_seconds)
        await channel.declare(slot.holder_queue, QueueRole.HOLDER, kept_seconds=slot.kept_seconds)
        await channel.declare(slot.slot_queue, QueueRole.SLOT, kept_seconds=slot.kept_seconds)


async def _has_token(driver: LockDriver, slot: Slot) -> bool:
    """Return whether a token queue contains a token, or its token is held.

    The token is missing if its creator crashed between the declaration of the queue and the publish of its only
    message.
    """
    listener = TokenListener()
    channel = await driver.open(listener)
    try:
        if await _shows_token(channel, slot):
            return True
        # The broker may be returning the token from a connection that has just ended.
        if not await channel.wait_for_token(slot.token_queue):
            return False
        if await listener.token(ARRIVAL_SECONDS) is not None:
            return True
        # A queue without a leader reports no messages. The queue had a leader when the consumer was added, so check
        # again.
        await channel.leave(slot.token_queue)
        return await _shows_token(channel, slot)
    finally:
        await channel.close()


async def _shows_token(channel: LockChannel, slot: Slot) -> bool:
    """Return whether the queue contains the token, or has consumers, one of which may hold the token."""
    state = await channel.state(slot.token_queue)
    return state is not None and bool(state.ready or state.consumers)


async def slot_status(probe: Probe, slot: Slot) -> SlotStatus:
    """Return whether the broker counts a holder of ``slot``, and the data that the latest holder wrote.

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
    """Return the data that the latest holder wrote, or an empty dictionary if there is none."""
    for _ in range(SAYS_ATTEMPTS_MAX):
        says = await probe.last(slot.holder_queue)
        if says is not None:
            known: dict[str, Any] = orjson.loads(says)
            return known
        if await probe.state(slot.holder_queue) is None:
            break
        # Another client is reading the message, and returns it immediately.
        await asyncio.sleep(SAYS_AGAIN_SECONDS * random.uniform(0.5, 1.5))
    return {}
