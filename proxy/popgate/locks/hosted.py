"""Locks for clients that can hold no connection: the proxy holds them, and a token stands for each.

Owns which locks are defined, who waits here, and what a client is told. Who gets a slot is the arbiter's decision; how
long it is held, ``hosted_grants``'.

A lock is held for ``ttl_seconds``, and as long as its proxy lives: a client that vanishes loses it then, and a proxy
that ends loses all of them, for nothing of them is kept. Each answer that something is held was true after the arbiter
was asked; what can't be asked is lost.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from popgate.domain.errors import BrokerUnavailable, Conflict, LockLost, LockNotFound, LockUnavailable
from popgate.domain.locks import (
    MUTEX_KEPT_SECONDS,
    LockDefinition,
    LockKind,
    administered,
    checked_lock_name,
)
from popgate.locks.administration import SlotStatus
from popgate.locks.arbiter import Arbiter
from popgate.locks.hosted_grants import HostedGrant, HostedGrants, LockEvent
from popgate.ports.clock import Clock
from popgate.ports.lock_store import LockStore
from popgate.runtime.background import Background
from popgate.runtime.deadlines import NEVER, Deadlines

LOCKS_MAX = 10_000
WAITING_MAX = 10_000
HELD_MAX = 100_000
COLLECT_SECONDS = 600.0

T = TypeVar("T")


class LockHolder(NamedTuple):
    """``expires_at`` None: it is not held through this proxy."""

    holder: str
    slot: int
    fencing_token: int | None
    acquired_at: float | None
    expires_at: float | None


class LockView(NamedTuple):
    """A lock as it is. ``holders`` and ``waiting`` count all clients, in a list only those of this proxy."""

    name: str
    kind: LockKind
    slots: int
    enabled: bool
    holders: list[LockHolder]
    waiting: int


class Patience:
    """Whether a client still waits. ``end`` lets it leave the line at once, with nothing."""

    def __init__(self) -> None:
        self.ended = False
        self.error: LockNotFound | None = None
        self._limit: asyncio.Timeout | None = None

    def end(self, error: LockNotFound | None = None) -> None:
        """Idempotent; the first call counts. ``error`` is what to say, where that is not "not acquired"."""
        if not self.ended:
            self.ended, self.error = True, error
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())

    async def wait_for(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of ``work``; None where the patience ended before: the work was then cancelled."""
        if self.ended:
            return None
        limit = self._limit = asyncio.timeout(None)
        try:
            async with limit:
                return await work()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._limit = None


class HostedLocks:
    """The locks of one proxy."""

    def __init__(
        self, arbiter: Arbiter, store: LockStore, clock: Clock, background: Background, *, auto_create: bool
    ) -> None:
        self.timer = NEVER
        self._deadlines = Deadlines(clock)
        self.grants = HostedGrants(clock, self._deadlines, background)
        self._arbiter = arbiter
        self._store = store
        self._clock = clock
        self._background = background
        self._auto_create = auto_create
        self._definitions: dict[str, LockDefinition] = {}
        self._used_at: dict[str, float] = {}
        self._waiting: dict[str, set[Patience]] = {}
        self._waiting_count = 0
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stopping = False

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises: StartupError, StateUnavailable."""
        self._definitions = {definition.name: definition for definition in await self._store.definitions()}
        self._used_at = dict.fromkeys(self._definitions, self._clock.monotonic())
        await self._arbiter.start()
        self._deadlines.schedule(self._clock.monotonic() + COLLECT_SECONDS, self)

    def drain(self) -> None:
        """Nobody acquires anything any more, and nobody waits. Idempotent."""
        self._stopping = True
        for waiting in list(self._waiting.values()):
            for patience in list(waiting):
                patience.end()

    async def stop(self) -> None:
        """All that is held is free. Idempotent."""
        self.drain()
        self._deadlines.stop()
        await self._arbiter.stop()
        await self._background.stop()

    # -- administration -------------------------------------------------------------------------------------------

    async def administer(self, name: str, kind: LockKind, slots: int | None, enabled: bool | None) -> LockView:
        """Make a lock, or change it; what is None stays as it is, or is one slot, enabled.

        Raises: InvalidRequest, Conflict (it is of another kind), LockHeld, BrokerUnavailable, StateUnavailable.
        """
        self._raise_if_stopping()
        async with self._changes(name):
            definition = administered(self._definitions.get(name), name, kind, slots, enabled)
            await self._define(definition)
            await self._arbiter.set_slots(definition)
        return await self.describe(name)

    async def describe(self, name: str) -> LockView:
        """Raises: InvalidRequest, LockNotFound, BrokerUnavailable."""
        definition = self._definition(name)
        status = await self._arbiter.status(definition)
        own = self.grants.of(name)
        holders = {hosted.slot: _own_holder(hosted) for hosted in own}
        slots, enabled, waiting = definition.slots, definition.enabled, len(self._waiting.get(name, ()))
        if status is not None:
            waiting = max(waiting, status.waiting)
            # Another administrator, over AMQP, may have said something else since.
            slots, enabled = len(status.slots), True
            for slot in status.slots:
                if slot.held and slot.number not in holders:
                    holders[slot.number] = _foreign_holder(slot)
        elif definition.kind is not LockKind.MUTEX and definition.enabled:
            slots, enabled = (0, True) if definition.kind is LockKind.SEMAPHORE else (1, False)
        return LockView(name, definition.kind, slots, enabled, [holders[slot] for slot in sorted(holders)], waiting)

    def locks(self) -> list[LockView]:
        """All locks by name, as they are defined, with their holders at this proxy."""
        return [
            LockView(
                name,
                definition.kind,
                definition.slots,
                definition.enabled,
                [_own_holder(hosted) for hosted in self.grants.of(name)],
                len(self._waiting.get(name, ())),
            )
            for name, definition in sorted(self._definitions.items())
        ]

    async def delete(self, name: str) -> None:
        """Who holds it loses it, who waits for it is told. Raises: InvalidRequest, LockNotFound, LockHeld,
        BrokerUnavailable, StateUnavailable; a repeat goes on."""
        self._definition(name)
        async with self._changes(name):
            definition = self._definition(name)
            for patience in list(self._waiting.get(name, ())):
                patience.end(_not_found(name))
            for hosted in self.grants.of(name):
                if self.grants.end(hosted, LockEvent.DELETED):
                    await hosted.grant.release()
            del self._definitions[name]  # from here on nobody acquires it
            try:
                await self._arbiter.delete(definition)
                await self._store.delete(name)
            except BaseException:
                self._definitions[name] = definition
                raise
            self._used_at.pop(name, None)

    async def force_release(self, name: str, holder: str | None, fencing_token: int | None) -> list[LockHolder]:
        """Take the lock away from those holders of whom all that is given is true; who they were.

        Raises: InvalidRequest, LockNotFound, LockHeld, BrokerUnavailable.
        """
        definition = self._definition(name)
        view = await self.describe(name)
        meant = [
            one for one in view.holders if holder in (None, one.holder) and fencing_token in (None, one.fencing_token)
        ]
        own = {hosted.slot: hosted for hosted in self.grants.of(name)}
        for one in meant:
            if one.slot not in own:
                if one.expires_at is None:
                    await self._arbiter.force_release(definition, one.slot)
            elif self.grants.end(own[one.slot], LockEvent.FORCE_RELEASED):
                await own[one.slot].grant.release()
        return meant

    # -- holding --------------------------------------------------------------------------------------------------

    async def acquire(
        self, name: str, holder: str, *, ttl_seconds: float, wait_seconds: float, patience: Patience
    ) -> tuple[str, HostedGrant] | None:
        """The lock and the token for it, or None where others had it for as long as ``wait_seconds``, or the patience
        ended.

        Raises: InvalidRequest, LockNotFound, LockUnavailable, BrokerUnavailable, StateUnavailable.
        """
        definition = await self._definition_to_use(name)
        if self._waiting_count >= WAITING_MAX or len(self.grants) >= HELD_MAX:
            raise LockUnavailable("too many clients wait for locks, or hold them, at this proxy")
        waiting = self._waiting.setdefault(name, set())
        waiting.add(patience)
        self._waiting_count += 1
        try:
            grant = await patience.wait_for(
                lambda: self._arbiter.take(definition, holder=holder, wait_seconds=wait_seconds)
            )
        finally:
            self._waiting_count -= 1
            waiting.discard(patience)
            if not waiting and self._waiting.get(name) is waiting:
                del self._waiting[name]
            if name in self._definitions:
                self._used_at[name] = self._clock.monotonic()
        if grant is not None and not patience.ended:
            return self.grants.add(definition, holder, grant, ttl_seconds)
        if grant is not None:  # who waited left in the same moment
            self._background.spawn(grant.release(), name=f"release lock {name}")
        if patience.error is not None:
            raise patience.error
        self.grants.count(LockEvent.NOT_ACQUIRED, definition.kind)
        return None

    async def verify(self, name: str, token: str) -> HostedGrant:
        """It is held: the arbiter says so. Raises: InvalidRequest, LockNotFound, LockLost."""
        hosted = self._found(name, token)
        await self._ask(hosted, hosted.grant.verify)
        return hosted

    async def renew(self, name: str, token: str, ttl_seconds: float | None) -> HostedGrant:
        """It is held, for ``ttl_seconds`` from the call, or as many as before. Its fencing token may have grown.

        Raises: InvalidRequest, LockNotFound, LockLost.
        """
        hosted = self._found(name, token)
        began = self._clock.monotonic()
        await self._ask(hosted, hosted.grant.verify)
        await self._ask(hosted, hosted.grant.renew)
        self.grants.prolong(hosted, ttl_seconds or hosted.ttl_seconds, since=began)
        return hosted

    async def release(self, name: str, token: str) -> bool:
        """Whether it was held until now. Idempotent. Raises: InvalidRequest, LockNotFound."""
        try:
            hosted = self._found(name, token)
        except LockLost:
            return False
        was_held = self.grants.end(hosted, LockEvent.RELEASED)
        await hosted.grant.release()
        return was_held

    def release_soon(self, hosted: HostedGrant) -> None:
        """Its client never learnt of it."""
        self.grants.end_soon(hosted, LockEvent.RELEASED)

    def waiting_by_kind(self) -> Mapping[LockKind, int]:
        counts = dict.fromkeys(LockKind, 0)
        for name, waiting in self._waiting.items():
            definition = self._definitions.get(name)
            if definition is not None:
                counts[definition.kind] += len(waiting)
        return counts

    # -- how ------------------------------------------------------------------------------------------------------

    def due(self, now: float) -> float:
        """Mutexes that came into being by use go after a day without any, as on the broker."""
        for name, definition in list(self._definitions.items()):
            unused = now - self._used_at.get(name, now) >= MUTEX_KEPT_SECONDS
            if definition.by_use and unused and not self.grants.of(name) and name not in self._waiting:
                del self._definitions[name]
                self._used_at.pop(name, None)
                self._background.spawn(self._store.delete(name), name=f"forget lock {name}")
        return now + COLLECT_SECONDS

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise BrokerUnavailable("popgate is shutting down")

    def _definition(self, name: str) -> LockDefinition:
        definition = self._definitions.get(checked_lock_name(name))
        if definition is None:
            raise _not_found(name)
        return definition

    async def _definition_to_use(self, name: str) -> LockDefinition:
        self._raise_if_stopping()
        definition = self._definitions.get(name)
        if definition is None and self._auto_create:
            async with self._changes(name):
                if name not in self._definitions:
                    definition = LockDefinition(name=name, kind=LockKind.MUTEX, by_use=True)
                    await self._arbiter.set_slots(definition)  # once, for all who come first
                    await self._define(definition)
        return self._definition(name)

    async def _define(self, definition: LockDefinition) -> None:
        if definition.name not in self._definitions and len(self._definitions) >= LOCKS_MAX:
            raise Conflict(f"there are {LOCKS_MAX} locks: delete those that nobody needs")
        if self._definitions.get(definition.name) != definition:
            await self._store.put(definition)
            self._definitions[definition.name] = definition
            self._used_at[definition.name] = self._clock.monotonic()

    @contextlib.asynccontextmanager
    async def _changes(self, name: str) -> AsyncGenerator[None]:
        """Definitions of one lock are changed one at a time: held over I/O, and no holder waits for it."""
        turn = self._changing.setdefault(checked_lock_name(name), asyncio.Lock())
        async with turn:
            yield

    def _found(self, name: str, token: str) -> HostedGrant:
        if not self.grants.knows(name, token):
            self._definition(name)
        return self.grants.find(name, token)

    async def _ask(self, hosted: HostedGrant, question: Callable[[], Awaitable[object]]) -> None:
        """Raises: LockLost, also where it ended while the arbiter was asked."""
        name = hosted.definition.name
        try:
            await question()
        except LockLost:
            # Who released it meanwhile has said why it ended.
            self.grants.end_soon(hosted, LockEvent.LOST)
        self.grants.still_held(name, hosted.digest)


def _not_found(name: str) -> LockNotFound:
    return LockNotFound(f"there is no lock {name}: make it with PUT /v1/locks/{name}")


def _own_holder(hosted: HostedGrant) -> LockHolder:
    return LockHolder(hosted.holder, hosted.slot, hosted.fencing_token, hosted.acquired_at, hosted.expires_at)


def _foreign_holder(slot: SlotStatus) -> LockHolder:
    return LockHolder(slot.holder, slot.number, slot.fencing_token, slot.since, None)
