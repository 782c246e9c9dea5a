"""Implements the arbiter of a proxy that runs alone: it decides about locks in memory.

When the process ends, all locks are free and no client waits any more. Fencing tokens must grow even if the process
restarts. So the arbiter reserves about a million tokens in the store before it grants the first of them. As with locks
on RabbitMQ, the first token is derived from the current time, so that tokens grow even if the store was deleted.
"""

import asyncio
import logging
from collections import deque
from typing import ClassVar

from popgate.domain.errors import LockLost, PopgateError, StateUnavailable
from popgate.domain.locks import LockDefinition, Slot, first_token
from popgate.locks.administration import IsDue, LockStatus, SlotStatus
from popgate.locks.arbiter import Arbiter
from popgate.locks.grants import Grant, lost_detail
from popgate.ports.clock import Clock
from popgate.ports.lock_store import LockStore
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

TOKENS_RESERVED = 1 << 20


class EmbeddedArbiter:
    """Grants slots of locks in memory.

    Each decision is synchronous, so no other task runs in the middle of one. Between decisions, a lock never has both a
    free slot and a waiting client, with one exception: while no reserved fencing token is left, clients wait although
    slots are free.
    """

    keeps_queues: ClassVar[bool] = False

    def __init__(self, store: LockStore, clock: Clock, background: Background) -> None:
        self._store = store
        self._clock = clock
        self._background = background
        self._locks: dict[str, _Lock] = {}
        """The locks that have holders or waiting clients, by name."""
        self._next_token = self._tokens_end = 0
        self._reserving = False

    async def start(self) -> None:
        await self._reserve()

    async def stop(self) -> None:
        self._locks.clear()

    async def set_slots(self, definition: LockDefinition) -> None:
        lock = self._locks.get(definition.name)
        if lock is not None:
            lock.slots = definition.open_slots
            self.serve(lock)

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        if self._next_token == self._tokens_end:
            self._reserve_soon()
            raise StateUnavailable("the store can't provide fencing tokens at present")
        lock = self._locks.setdefault(definition.name, _Lock(definition))
        place = _Place(holder)
        lock.line.append(place)
        try:
            self.serve(lock)
            if not place.granted.done() and wait_seconds > 0:
                async with asyncio.timeout(wait_seconds):
                    await place.granted
            return place.granted.result() if place.granted.done() else None
        except BaseException as error:
            if place.granted.done() and not place.granted.cancelled():
                await place.granted.result().release()  # the caller will not receive the grant
            if isinstance(error, TimeoutError):
                return None
            raise
        finally:
            if place in lock.line:
                lock.line.remove(place)
            self._forget_if_unused(lock)

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        if not definition.open_slots:
            return None
        lock = self._locks.get(definition.name) or _Lock(definition)
        return LockStatus(
            lock=definition.name,
            kind=definition.kind,
            slots=[self._slot_status(lock, number) for number in range(1, lock.slots + 1)],
            waiting=len(lock.line),
        )

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        """Do nothing, because all holders are clients of this proxy, and ``HostedLocks`` ends their grants."""

    async def delete(self, definition: LockDefinition, is_due: IsDue) -> None:
        if await is_due():
            self._locks.pop(definition.name, None)

    def serve(self, lock: "_Lock") -> None:
        """Grant free slots of ``lock`` to its waiting clients, in the order of their arrival."""
        while lock.line and self._next_token < self._tokens_end and (number := lock.free_slot()) is not None:
            place = lock.line.popleft()
            if place.granted.done():
                continue  # the wait of this client has just ended
            grant = EmbeddedGrant(self, lock, number, place.holder, self._next_token, self._clock.wall())
            self._next_token += 1
            lock.held[number] = grant
            place.granted.set_result(grant)
        if self._tokens_end - self._next_token < TOKENS_RESERVED // 2:
            self._reserve_soon()
        self._forget_if_unused(lock)

    def _slot_status(self, lock: "_Lock", number: int) -> SlotStatus:
        grant = lock.held.get(number)
        if grant is None:
            return SlotStatus(number=number, held=False)
        token = grant.fencing_token
        return SlotStatus(number=number, held=True, holder=grant.holder, since=grant.since, fencing_token=token)

    def _forget_if_unused(self, lock: "_Lock") -> None:
        if not lock.held and not lock.line and self._locks.get(lock.name) is lock:
            del self._locks[lock.name]

    def _reserve_soon(self) -> None:
        if not self._reserving:
            self._reserving = True
            self._background.spawn(self._reserve_more(), name="reserve fencing tokens")

    async def _reserve_more(self) -> None:
        try:
            await self._reserve()
        except PopgateError as error:
            _log.warning("no fencing tokens could be reserved", extra={"reason": error.detail})
            return
        finally:
            self._reserving = False
        for lock in list(self._locks.values()):
            self.serve(lock)

    async def _reserve(self) -> None:
        first = await self._store.reserve_tokens(TOKENS_RESERVED, at_least=first_token(self._clock.wall()))
        self._next_token, self._tokens_end = first, first + TOKENS_RESERVED


class _Place:
    """A client that waits for a slot of a lock."""

    __slots__ = ("granted", "holder")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.granted: asyncio.Future[EmbeddedGrant] = asyncio.get_running_loop().create_future()


class _Lock:
    """The state of one lock: its grants by slot number (``held``), and its waiting clients (``line``).

    ``held`` may contain slot numbers above ``slots``. Such a slot was removed, and its holder has not noticed the
    removal yet.
    """

    __slots__ = ("held", "kind", "line", "name", "slots")

    def __init__(self, definition: LockDefinition) -> None:
        self.name = definition.name
        self.kind = definition.kind
        self.slots = definition.open_slots
        self.held: dict[int, EmbeddedGrant] = {}
        self.line: deque[_Place] = deque()

    def free_slot(self) -> int | None:
        return next((number for number in range(1, self.slots + 1) if number not in self.held), None)


class EmbeddedGrant:
    def __init__(
        self, arbiter: EmbeddedArbiter, lock: _Lock, number: int, holder: str, token: int, since: float
    ) -> None:
        self.slot = Slot(lock.name, lock.kind, number)
        self.lost = asyncio.Event()
        self.reason = ""
        self.holder = holder
        self.since = since
        self.fencing_token = token
        self._arbiter = arbiter
        self._lock = lock

    async def verify(self) -> None:
        if self._lock.held.get(self.slot.number) is not self:
            raise LockLost(f"lock {self.slot.lock} was released")
        if self.slot.number > self._lock.slots:
            self.reason = "the slot was removed"
            self.lost.set()
            await self.release()
            raise LockLost(lost_detail(self.slot.lock, self.reason))

    async def renew(self) -> int:
        await self.verify()
        return self.fencing_token

    async def release(self) -> None:
        if self._lock.held.get(self.slot.number) is self:
            del self._lock.held[self.slot.number]
            self._arbiter.serve(self._lock)


_conforms: type[Arbiter] = EmbeddedArbiter
_grant_conforms: type[Grant] = EmbeddedGrant
