"""Keeps a copy of the store's lock definitions in the memory of this proxy.

Theory of operation. When an administrator changes a lock, the proxy writes the new definition to the store and
announces the change to the other proxies. The other proxies apply the change before the administrator's request is
answered. A lock is deleted in two steps: first its definition gets the mark ``deleted`` and all proxies follow, then
its queues and its definition are deleted. Otherwise another proxy could begin to consume a queue while RabbitMQ deletes
it, and RabbitMQ would end the connection that holds all locks of that proxy.

A mutex that a client creates by acquiring it is not announced. A proxy that has no copy of a definition looks up the
name in the store. ``HostedLocks`` reads the store periodically, because the proxy may have missed an announcement. A
proxy that is not in a cluster reads the store only when it starts.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeAlias
from weakref import WeakValueDictionary

from popgate.domain.errors import Conflict, LockNotFound, LockUnavailable
from popgate.domain.locks import MUTEX_KEPT_SECONDS, LockDefinition, checked_lock_name
from popgate.domain.quotas import Quota, check_quota
from popgate.ports.clock import Clock
from popgate.ports.lock_store import LockStore

LOOKED_AT_MAX = 1_000
"""Maximum number of locks that are looked at to find one whose place a new lock takes."""

Announce: TypeAlias = Callable[[], Awaitable[None]]
"""Announces a change of the definitions. Returns when all other proxies that can be reached have applied the change."""


class Definitions:
    """Reads and changes the lock definitions in ``store``, and keeps a copy of them in memory.

    ``announce`` is None if no other proxy uses this store.
    """

    def __init__(
        self,
        store: LockStore,
        clock: Clock,
        announce: Announce | None,
        locks_max: int,
        is_idle: Callable[[str], bool] | None,
    ) -> None:
        """Create an empty copy. ``locks_max`` is the maximum number of locks.

        A further lock takes the place of a mutex that was created by use and is idle: the one whose last use is longest
        ago. If there is none, or if ``is_idle`` is None, the further lock is refused.
        """
        self._store = store
        self._clock = clock
        self._announce = announce
        self._locks_max = locks_max
        self._is_idle = is_idle
        self._known: dict[str, LockDefinition] = {}
        self._adding: set[str] = set()
        """Names of locks whose definitions are being written to the store."""
        self._used_at: dict[str, float] = {}
        """The time of the last use of each lock, in the order of these times."""
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Read all definitions from the store into the copy. Raises: StateUnavailable."""
        for definition in await self._store.definitions():
            self._learn(definition)

    @property
    def is_shared(self) -> bool:
        """Whether other proxies also use the store."""
        return self._announce is not None

    @property
    def known(self) -> Mapping[str, LockDefinition]:
        """The definitions in this proxy's copy, by name."""
        return self._known

    # -- one of them ----------------------------------------------------------------------------------------------

    async def look_up(self, name: str) -> LockDefinition | None:
        """Return the definition of the lock ``name``, or None. Raises: InvalidRequest, StateUnavailable."""
        known = self._known.get(checked_lock_name(name))
        if known is not None or not self.is_shared:
            return known
        async with self.changes(name):
            return _unless_deleted(await self._stored(name))

    async def find(self, name: str) -> LockDefinition:
        """Return the definition of the lock ``name``. Raises: InvalidRequest, LockNotFound, StateUnavailable."""
        definition = await self.look_up(name)
        if definition is None:
            raise not_found(name)
        return definition

    @contextlib.asynccontextmanager
    async def changes(self, name: str) -> AsyncGenerator[None]:
        """Prevent other changes of the definition of lock ``name`` until the context exits.

        Another task that enters ``changes`` for the same name waits, even while this task does I/O with the store or
        the broker. Operations of holders, such as a renewal, don't enter ``changes``, and so never wait.

        Raises: InvalidRequest.
        """
        turn = self._changing.setdefault(checked_lock_name(name), asyncio.Lock())
        async with turn:
            yield

    # -- within ``changes`` ---------------------------------------------------------------------------------------

    async def latest(self, name: str) -> LockDefinition | None:
        """Read the definition of lock ``name`` from the store into the copy, and return it, or None if there is none.

        Raises: LockUnavailable if the lock is being deleted; StateUnavailable.
        """
        definition = await self._stored(name)
        return None if definition is None else usable(definition)

    async def mark_deleted(self, name: str) -> LockDefinition:
        """Let the other proxies know that the lock ``name`` is being deleted, when they follow. Return its definition.

        Raises: LockNotFound, StateUnavailable.
        """
        definition = await self._stored(name)
        if definition is None:
            raise not_found(name)
        if self.is_shared and not definition.deleted:
            definition = replace(definition, deleted=True)
            await self._store.put(definition)
            self._learn(definition)
        return definition

    async def is_stored(self, definition: LockDefinition) -> bool:
        """Return whether the store still has ``definition``: no other proxy has deleted or replaced it.

        Raises: StateUnavailable.
        """
        return not self.is_shared or await self._stored(definition.name) == definition

    async def put(self, definition: LockDefinition) -> None:
        """Write ``definition`` to the store and to the copy. Raises: QuotaExceeded, StateUnavailable."""
        async with self.place_for(definition.name):
            if self._known.get(definition.name) != definition:
                await self._store.put(definition)
                self._learn(definition)

    async def add(self, definition: LockDefinition) -> LockDefinition:
        """Add ``definition`` to the store, and return it.

        If the store already contains a definition with this name, return the stored definition, and don't change the
        store.

        Raises: QuotaExceeded, StateUnavailable.
        """
        async with self.place_for(definition.name):
            added = await self._store.add(definition)
            self._learn(added)
        return added

    @contextlib.asynccontextmanager
    async def place_for(self, name: str) -> AsyncGenerator[None]:
        """Count the lock ``name`` in the quota while its definition is written to the store, and make room for it.

        Raises: QuotaExceeded, StateUnavailable.
        """
        is_new = name not in self._known and name not in self._adding
        count = len(self._known) + sum(one not in self._known for one in self._adding)
        replaced = self._replaceable() if is_new and count >= self._locks_max else None
        if is_new and replaced is None:
            check_quota(Quota.LOCKS, self._locks_max, count)
        self._adding.add(name)
        try:
            if replaced is not None:  # nobody holds its ``changes``, so no other task runs before its place is free
                async with self.changes(replaced.name), self.deleting(replaced):
                    pass
            yield
        finally:
            self._adding.discard(name)

    @contextlib.asynccontextmanager
    async def deleting(self, definition: LockDefinition) -> AsyncGenerator[None]:
        """Delete a definition from this proxy's copy when the context starts, and from the store when it ends.

        If another proxy has deleted the lock and defined it again meanwhile, the new definition stays.
        If the body of the context or the deletion from the store fails, the definition is restored in this proxy's
        copy, unless it has the mark ``deleted``.
        """
        name = definition.name
        self._known.pop(name, None)
        try:
            yield
            if await self.is_stored(definition):
                await self._store.delete(name)
                self._used_at.pop(name, None)
        except BaseException:
            self._learn(definition)
            raise

    # -- the other proxies ----------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Announce a change, and wait until the other proxies have applied it.

        Don't call this method within ``changes``. Otherwise, two proxies that announce changes would wait for each
        other.
        """
        if self._announce is not None:
            await self._announce()

    async def follow(self) -> AsyncGenerator[LockDefinition]:
        """Apply the changes in the store to the copy. Yield each old definition that was deleted or changed its kind.

        Raises: StateUnavailable.
        """
        found = {
            definition.name: definition for definition in await self._store.definitions() if not definition.deleted
        }
        for name in sorted(found.keys() | self._known.keys()):
            if found.get(name) == self._known.get(name):
                continue
            async with self.changes(name):
                known = self._known.get(name)
                try:  # this proxy may have changed the definition meanwhile
                    latest = _unless_deleted(await self._stored(name))
                except Conflict:
                    continue  # the definition can't be read: keep the copy, and go on with the other locks
            if known is not None and (latest is None or latest.kind is not known.kind):
                yield known

    # -- mutexes created by use -----------------------------------------------------------------------------------

    def used(self, name: str) -> None:
        """Record that a client has just used the lock ``name``."""
        if name in self._known:
            self._used_at.pop(name, None)  # the newest one is the last one
            self._used_at[name] = self._clock.monotonic()

    def unused(self, now: float) -> Iterator[LockDefinition]:
        """Yield the mutexes that were created by use, if no client of this proxy has used them for one day."""
        for name, definition in list(self._known.items()):
            if definition.by_use and now - self._used_at[name] >= MUTEX_KEPT_SECONDS:
                yield definition

    # -- how ------------------------------------------------------------------------------------------------------

    async def _stored(self, name: str) -> LockDefinition | None:
        """Read the definition of lock ``name`` from the store into the copy, and return it. Raises: StateUnavailable.

        If no other proxy uses the store, the copy is current, and the store is not read.
        """
        if not self.is_shared:
            return self._known.get(name)
        found = await self._store.find(name)
        if found is None:
            self._forget(name)
        else:
            self._learn(found)
        return found

    def _learn(self, definition: LockDefinition) -> None:
        if definition.deleted:
            self._forget(definition.name)
        else:
            self._known[definition.name] = definition
            self._used_at.setdefault(definition.name, self._clock.monotonic())

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._used_at.pop(name, None)

    def _replaceable(self) -> LockDefinition | None:
        """Return the mutex whose place a new lock takes, or None. No change of its definition is in progress."""
        if self._is_idle is None:
            return None
        for name in list(islice(self._used_at, LOOKED_AT_MAX)):
            definition, turn = self._known.get(name), self._changing.get(name)
            is_free = definition is not None and definition.by_use and (turn is None or not turn.locked())
            if is_free and self._is_idle(name):
                return definition
            self.used(name)  # the next search begins after it
        return None


def _unless_deleted(definition: LockDefinition | None) -> LockDefinition | None:
    return None if definition is None or definition.deleted else definition


def usable(definition: LockDefinition) -> LockDefinition:
    """Return ``definition``. Raises: LockUnavailable if the lock is being deleted."""
    if definition.deleted:
        name = definition.name
        raise LockUnavailable(
            f"lock {name} is being deleted; if its deletion was interrupted, complete it with DELETE /v1/locks/{name}"
        )
    return definition


def not_found(name: str) -> LockNotFound:
    return LockNotFound(f"there is no lock {name}: make it with PUT /v1/locks/{name}")
