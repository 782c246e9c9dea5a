"""Holds locks for clients that can't hold a connection, and gives these clients tokens for the locks.

Owns the waiting clients, and the answers to clients. ``definitions`` holds the defined locks. The arbiter decides which
client is granted a slot. ``hosted_grants`` limits how long the slot is held.

A lock is held for ``ttl_seconds``, and ends earlier if its proxy ends. A client that disappears without a release loses
the lock after ``ttl_seconds``. A proxy that ends loses all of its locks, because it stores nothing about them. The
proxy confirms to a client that a lock is held only after the arbiter has confirmed it. If the arbiter does not answer,
the lock is lost.

Several proxies may hold locks on one broker and one store. Each proxy holds the locks that were acquired through it,
and includes its name in their tokens.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from popgate.domain.errors import BrokerUnavailable, LockLost, LockUnavailable, PopgateError
from popgate.domain.locks import LockDefinition, LockKind, administered
from popgate.domain.names import InstanceId
from popgate.domain.quotas import DEFAULTS
from popgate.locks.administration import SlotStatus
from popgate.locks.arbiter import Arbiter
from popgate.locks.definitions import Announce, Definitions, not_found
from popgate.locks.hosted_grants import HostedGrant, HostedGrants, LockEvent
from popgate.locks.lock_waiter import LockWaiter
from popgate.ports.clock import Clock
from popgate.ports.lock_store import LockStore
from popgate.runtime.background import Background
from popgate.runtime.deadlines import NEVER, Deadlines

_log = logging.getLogger(__name__)

WAITING_MAX = 10_000
HELD_MAX = 100_000
COLLECT_SECONDS = 600.0
FOLLOW_SECONDS = 10.0
"""Seconds between two reads of the store, by which a proxy of a cluster finds changes that were not announced to it."""


class LockHolder(NamedTuple):
    """A holder of a lock. ``expires_at`` is None if the lock is not held through this proxy."""

    holder: str
    slot: int
    fencing_token: int | None
    acquired_at: float | None
    expires_at: float | None


class LockView(NamedTuple):
    """The current state of a lock. ``holders`` and ``waiting`` include the clients of all proxies and programs on AMQP;
    in a list of locks, they include only this proxy's clients."""

    name: str
    kind: LockKind
    slots: int
    enabled: bool
    holders: list[LockHolder]
    waiting: int


class HostedLocks:
    """Holds the locks of the proxy ``instance``, for at most ``waiting_max`` waiting clients.

    ``announce`` makes the other proxies call ``follow``. It is None if there are no other proxies.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        store: LockStore,
        clock: Clock,
        background: Background,
        *,
        instance: InstanceId,
        auto_create: bool,
        locks_max: int = DEFAULTS.locks_max,
        announce: Announce | None = None,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.timer = NEVER
        self._waiting_max = waiting_max
        self._deadlines = Deadlines(clock)
        self.grants = HostedGrants(clock, self._deadlines, background, instance)
        self._arbiter = arbiter
        self._clock = clock
        self._background = background
        self._auto_create = auto_create
        self._definitions = Definitions(store, clock, announce, locks_max)
        self._waiting: dict[str, set[LockWaiter]] = {}
        self._waiting_count = 0
        self._stopping = False

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to grant locks. Raises: StartupError, StateUnavailable."""
        await self._definitions.start()
        await self._arbiter.start()
        self._deadlines.schedule(self._clock.monotonic() + COLLECT_SECONDS, self)
        if self._definitions.is_shared:
            self._background.keep(self._keep_following, name="follow the locks")

    def drain(self) -> None:
        """Refuse new requests for locks, and end all waits. Idempotent."""
        self._stopping = True
        for waiting in list(self._waiting.values()):
            for waiter in list(waiting):
                waiter.end()

    async def stop(self) -> None:
        """Free all locks. Idempotent."""
        self.drain()
        self._deadlines.stop()
        await self._arbiter.stop()
        await self._background.stop()

    # -- administration -------------------------------------------------------------------------------------------

    async def administer(self, name: str, kind: LockKind, slots: int | None, enabled: bool | None) -> LockView:
        """Create or change a lock. None keeps the current value. By default, a new lock has one slot and is enabled.

        Raises: InvalidRequest, Conflict (the lock is of another kind), LockHeld, BrokerUnavailable, StateUnavailable.
        """
        self._raise_if_stopping()
        async with self._definitions.changes(name):
            definition = administered(await self._definitions.latest(name), name, kind, slots, enabled)
            await self._definitions.put(definition)
            self._definitions.used(name)
            await self._arbiter.set_slots(definition)
        await self._definitions.announce()
        return await self.describe(name)

    async def describe(self, name: str) -> LockView:
        """Return a lock with its holders. Raises: InvalidRequest, LockNotFound, BrokerUnavailable, StateUnavailable."""
        definition = await self._definitions.find(name)
        status = await self._arbiter.status(definition)
        own = self.grants.of(name)
        holders = {hosted.slot: _own_holder(hosted) for hosted in own}
        slots, enabled, waiting = definition.slots, definition.enabled, len(self._waiting.get(name, ()))
        if status is not None:
            waiting = max(waiting, status.waiting)
            # An administrator may have changed the lock over AMQP after it was defined.
            slots, enabled = len(status.slots), True
            for slot in status.slots:
                if slot.held and slot.number not in holders:
                    holders[slot.number] = _foreign_holder(slot)
        elif definition.kind is not LockKind.MUTEX and definition.enabled:
            slots, enabled = (0, True) if definition.kind is LockKind.SEMAPHORE else (1, False)
        return LockView(name, definition.kind, slots, enabled, [holders[slot] for slot in sorted(holders)], waiting)

    def locks(self) -> list[LockView]:
        """Return all defined locks, sorted by name, with their holders at this proxy."""
        return [
            LockView(
                name,
                definition.kind,
                definition.slots,
                definition.enabled,
                [_own_holder(hosted) for hosted in self.grants.of(name)],
                len(self._waiting.get(name, ())),
            )
            for name, definition in sorted(self._definitions.known.items())
        ]

    async def delete(self, name: str) -> None:
        """Delete a lock. Its holders lose it, and the waits for it end. If a call was interrupted, repeat it to finish
        the deletion.

        Raises: InvalidRequest, LockNotFound, LockHeld, BrokerUnavailable, StateUnavailable.
        """
        async with self._definitions.changes(name):
            definition = await self._definitions.latest(name)
            if definition is None:
                raise not_found(name)
            self._tell_waiting(name)
            ended = [hosted for hosted in self.grants.of(name) if self.grants.end(hosted, LockEvent.DELETED)]
            try:
                async with self._definitions.deleting(definition):
                    await self._arbiter.delete(definition)
            finally:
                for hosted in ended:  # not earlier: a client that waits at another proxy would be granted the slot
                    await hosted.grant.release()
        await self._definitions.announce()

    async def follow(self) -> None:
        """Apply changes of other proxies. For deleted locks, end this proxy's held locks and waits.

        Raises: StateUnavailable.
        """
        async for gone in self._definitions.follow():
            held = [hosted for hosted in self.grants.of(gone.name) if hosted.definition.kind is gone.kind]
            if gone.by_use and held and gone.name not in self._definitions.known:
                # The lock was not deleted on the broker. Another proxy that saw no use of the lock has only forgotten
                # it.
                async with self._definitions.changes(gone.name):
                    await self._definitions.add(gone)
                continue
            self._tell_waiting(gone.name)
            for hosted in held:
                self.grants.end_soon(hosted, LockEvent.DELETED)

    async def force_release(self, name: str, holder: str | None, fencing_token: int | None) -> list[LockHolder]:
        """Release the lock by force from the holders that match all given values, and return these holders.

        Raises: InvalidRequest, LockNotFound, LockHeld, BrokerUnavailable, StateUnavailable.
        """
        definition = await self._definitions.find(name)
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
        self, name: str, holder: str, *, ttl_seconds: float, wait_seconds: float, waiter: LockWaiter
    ) -> tuple[str, HostedGrant] | None:
        """Acquire the lock. Return its token and grant, or None if other clients hold the lock for all of
        ``wait_seconds``, or if ``waiter`` ends the wait.

        Raises: InvalidRequest, LockNotFound, LockUnavailable, BrokerUnavailable, StateUnavailable.
        """
        definition = await self._definition_to_use(name)
        if self._waiting_count >= self._waiting_max or len(self.grants) >= HELD_MAX:
            raise LockUnavailable("too many clients wait for locks or hold locks at this proxy")
        waiting = self._waiting.setdefault(name, set())
        waiting.add(waiter)
        self._waiting_count += 1
        try:
            grant = await waiter.wait_for(
                lambda: self._arbiter.take(definition, holder=holder, wait_seconds=wait_seconds)
            )
        finally:
            self._waiting_count -= 1
            waiting.discard(waiter)
            if not waiting and self._waiting.get(name) is waiting:
                del self._waiting[name]
            self._definitions.used(name)
        if grant is not None and not waiter.ended:
            return self.grants.add(definition, holder, grant, ttl_seconds)
        if grant is not None:  # the client left at the same moment
            self._background.spawn(grant.release(), name=f"release lock {name}")
        if waiter.error is not None:
            raise waiter.error
        self.grants.count(LockEvent.NOT_ACQUIRED, definition.kind)
        return None

    async def verify(self, name: str, token: str) -> HostedGrant:
        """Confirm with the arbiter that the lock is still held, and return its grant.

        Raises: InvalidRequest, LockNotFound, LockLost, StateUnavailable.
        """
        hosted = await self._found(name, token)
        await self._ask(hosted, hosted.grant.verify)
        return hosted

    async def renew(self, name: str, token: str, ttl_seconds: float | None) -> HostedGrant:
        """Hold the lock for ``ttl_seconds`` from the time of this call. None repeats the previous time to live. The
        fencing token may grow.

        Raises: InvalidRequest, LockNotFound, LockLost, StateUnavailable.
        """
        hosted = await self._found(name, token)
        began = self._clock.monotonic()
        await self._ask(hosted, hosted.grant.verify)
        await self._ask(hosted, hosted.grant.renew)
        self.grants.prolong(hosted, ttl_seconds or hosted.ttl_seconds, since=began)
        return hosted

    async def release(self, name: str, token: str) -> bool:
        """Release the lock. Return whether it was held until this call. Idempotent.

        Raises: InvalidRequest, LockNotFound, StateUnavailable.
        """
        try:
            hosted = await self._found(name, token)
        except LockLost:
            return False
        was_held = self.grants.end(hosted, LockEvent.RELEASED)
        await hosted.grant.release()
        return was_held

    def release_soon(self, hosted: HostedGrant) -> None:
        """Release, in the background, a lock whose client did not receive the answer."""
        self.grants.end_soon(hosted, LockEvent.RELEASED)

    def waiting_by_kind(self) -> Mapping[LockKind, int]:
        counts = dict.fromkeys(LockKind, 0)
        for name, waiting in self._waiting.items():
            definition = self._definitions.known.get(name)
            if definition is not None:
                counts[definition.kind] += len(waiting)
        return counts

    # -- how ------------------------------------------------------------------------------------------------------

    def due(self, now: float) -> float:
        """Forget mutexes that were created by use and have not been used for a day. The broker removes them, too."""
        for definition in self._definitions.unused(now):
            if not self.grants.of(definition.name) and definition.name not in self._waiting:
                self._background.spawn(self._forget(definition), name=f"forget lock {definition.name}")
        return now + COLLECT_SECONDS

    async def _forget(self, definition: LockDefinition) -> None:
        name = definition.name
        try:
            if self._definitions.is_shared and await self._arbiter.status(definition) is not None:
                self._definitions.used(name)  # clients of other proxies use it: check again in a day
                return
            async with self._definitions.changes(name):
                is_as_it_was = self._definitions.known.get(name) == definition
                if is_as_it_was and not self.grants.of(name) and name not in self._waiting:
                    async with self._definitions.deleting(definition):
                        pass
        except PopgateError as error:
            _log.info("an unused lock could not be deleted yet", extra={"lock": name, "reason": error.detail})

    async def _keep_following(self) -> None:
        """Apply changes that were not announced to this proxy. Never returns."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS * random.uniform(0.8, 1.2))
            try:
                await self.follow()
            except PopgateError as error:
                _log.warning("the locks' definitions can't be followed", extra={"reason": error.detail})

    def _raise_if_stopping(self) -> None:
        if self._stopping:
            raise BrokerUnavailable("popgate is shutting down")

    def _tell_waiting(self, name: str) -> None:
        """End the waits for a lock that was deleted."""
        for waiter in list(self._waiting.get(name, ())):
            waiter.end(not_found(name))

    async def _definition_to_use(self, name: str) -> LockDefinition:
        self._raise_if_stopping()
        definition = await self._definitions.look_up(name)
        if definition is None and self._auto_create:
            async with self._definitions.changes(name):
                definition = await self._definitions.latest(name)
                if definition is None:
                    made = LockDefinition(name=name, kind=LockKind.MUTEX, by_use=True)
                    await self._arbiter.set_slots(made)  # only once, for all clients that use the name first
                    definition = await self._definitions.add(made)
        return definition or await self._definitions.find(name)

    async def _found(self, name: str, token: str) -> HostedGrant:
        if not self.grants.knows(name, token):
            await self._definitions.find(name)
        return self.grants.find(name, token)

    async def _ask(self, hosted: HostedGrant, question: Callable[[], Awaitable[object]]) -> None:
        """Ask the arbiter about a lock. Raises: LockLost, also if the lock ended during the call."""
        name = hosted.definition.name
        try:
            await question()
        except LockLost:
            # If the lock ended during the call (for example by a release), its first recorded reason stays.
            self.grants.end_soon(hosted, LockEvent.LOST)
        self.grants.still_held(name, hosted.digest)


def _own_holder(hosted: HostedGrant) -> LockHolder:
    return LockHolder(hosted.holder, hosted.slot, hosted.fencing_token, hosted.acquired_at, hosted.expires_at)


def _foreign_holder(slot: SlotStatus) -> LockHolder:
    return LockHolder(slot.holder, slot.number, slot.fencing_token, slot.since, None)
