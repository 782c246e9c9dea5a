"""Holds this proxy's copy of the lock definitions in the store.

Theory of operation. An administrator's change is written to the store and announced to the other proxies before the
request is answered. The other proxies then apply the change. A mutex that is created by use is not announced: a proxy
that does not know a name looks it up in the store. ``HostedLocks`` reads the store
periodically, in case an announcement was missed. A proxy that is not in a cluster reads the store only at its start.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from typing import TypeAlias
from weakref import WeakValueDictionary

from popgate.domain.errors import LockNotFound
from popgate.domain.locks import MUTEX_KEPT_SECONDS, LockDefinition, checked_lock_name
from popgate.domain.quotas import Quota, check_quota
from popgate.ports.clock import Clock
from popgate.ports.lock_store import LockStore

Announce: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when all reachable other proxies have applied the change."""


class Definitions:
    """Holds the definitions of ``store``.

    ``announce`` is None if no other proxy defines locks in this store.
    """

    def __init__(self, store: LockStore, clock: Clock, announce: Announce | None, locks_max: int) -> None:
        """Create an empty copy. ``locks_max`` is the maximum number of locks; further ones are refused."""
        self._store = store
        self._clock = clock
        self._announce = announce
        self._locks_max = locks_max
        self._known: dict[str, LockDefinition] = {}
        self._adding: set[str] = set()
        """Names whose definitions are being written to the store."""
        self._used_at: dict[str, float] = {}
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Read all definitions. Raises: StateUnavailable."""
        for definition in await self._store.definitions():
            self._learn(definition)

    @property
    def is_shared(self) -> bool:
        """Whether other proxies define locks in the store, too."""
        return self._announce is not None

    @property
    def known(self) -> Mapping[str, LockDefinition]:
        """The known definitions, by name."""
        return self._known

    # -- one of them ----------------------------------------------------------------------------------------------

    async def look_up(self, name: str) -> LockDefinition | None:
        """Return the definition of that name, or None. Raises: InvalidRequest, StateUnavailable."""
        known = self._known.get(checked_lock_name(name))
        if known is not None or not self.is_shared:
            return known
        async with self.changes(name):
            return await self.latest(name)

    async def find(self, name: str) -> LockDefinition:
        """Return the definition of that name. Raises: InvalidRequest, LockNotFound, StateUnavailable."""
        definition = await self.look_up(name)
        if definition is None:
            raise not_found(name)
        return definition

    @contextlib.asynccontextmanager
    async def changes(self, name: str) -> AsyncGenerator[None]:
        """Allow only one change of a lock's definition at a time.

        The exclusion lasts during I/O with the store and the broker. Holders of locks never wait for it.

        Raises: InvalidRequest.
        """
        turn = self._changing.setdefault(checked_lock_name(name), asyncio.Lock())
        async with turn:
            yield

    # -- within ``changes`` ---------------------------------------------------------------------------------------

    async def latest(self, name: str) -> LockDefinition | None:
        """Return the current definition in the store, or None. Raises: StateUnavailable."""
        if self.is_shared:
            found = await self._store.find(name)
            if found is None:
                self._known.pop(name, None)
                self._used_at.pop(name, None)
            else:
                self._learn(found)
        return self._known.get(name)

    async def put(self, definition: LockDefinition) -> None:
        """Write a definition. Raises: QuotaExceeded, StateUnavailable."""
        with self._place_for(definition.name):
            if self._known.get(definition.name) != definition:
                await self._store.put(definition)
                self._learn(definition)

    async def add(self, definition: LockDefinition) -> LockDefinition:
        """Add a definition and return it. If the store already contains one of that name, return that one instead.

        Raises the errors of ``put``.
        """
        with self._place_for(definition.name):
            added = await self._store.add(definition)
            self._learn(added)
        return added

    @contextlib.asynccontextmanager
    async def deleting(self, definition: LockDefinition) -> AsyncGenerator[None]:
        """Remove the lock from this proxy's copy at the beginning of the context, and delete it from the store at the
        end.

        If either fails, this proxy's copy is restored.
        """
        name = definition.name
        del self._known[name]
        try:
            yield
            await self._store.delete(name)
        except BaseException:
            self._known[name] = definition
            raise
        self._used_at.pop(name, None)

    # -- the other proxies ----------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Announce a change, and return when the other proxies have applied it.

        Don't call this within ``changes``: two proxies that announce changes would wait for each other.
        """
        if self._announce is not None:
            await self._announce()

    async def follow(self) -> AsyncGenerator[LockDefinition]:
        """Apply the changes in the store. Yield each definition that was deleted, or replaced by one of another kind.

        Raises: StateUnavailable.
        """
        found = {definition.name: definition for definition in await self._store.definitions()}
        for name in sorted(found.keys() | self._known.keys()):
            if found.get(name) == self._known.get(name):
                continue
            async with self.changes(name):
                known = self._known.get(name)
                latest = await self.latest(name)  # this proxy may have changed it in the meantime
            if known is not None and (latest is None or latest.kind is not known.kind):
                yield known

    # -- mutexes created by use -----------------------------------------------------------------------------------

    def used(self, name: str) -> None:
        """Record that the lock was used now."""
        if name in self._known:
            self._used_at[name] = self._clock.monotonic()

    def unused(self, now: float) -> Iterator[LockDefinition]:
        """Yield the mutexes that were created by use and have not been used at this proxy for a day."""
        for name, definition in list(self._known.items()):
            if definition.by_use and now - self._used_at[name] >= MUTEX_KEPT_SECONDS:
                yield definition

    # -- how ------------------------------------------------------------------------------------------------------

    def _learn(self, definition: LockDefinition) -> None:
        self._known[definition.name] = definition
        self._used_at.setdefault(definition.name, self._clock.monotonic())

    @contextlib.contextmanager
    def _place_for(self, name: str) -> Generator[None]:
        """Count ``name`` in the quota while the store adds it. Raises: QuotaExceeded."""
        if name not in self._known and name not in self._adding:
            adding = sum(one not in self._known for one in self._adding)
            check_quota(Quota.LOCKS, self._locks_max, len(self._known) + adding)
        self._adding.add(name)
        try:
            yield
        finally:
            self._adding.discard(name)


def not_found(name: str) -> LockNotFound:
    return LockNotFound(f"there is no lock {name}: make it with PUT /v1/locks/{name}")
