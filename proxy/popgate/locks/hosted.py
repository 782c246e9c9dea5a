"""Holds locks on behalf of clients that keep no connection to the broker. Each client gets a token for its lock.

This module manages the clients that wait for locks, and answers the requests of clients. ``definitions`` stores the
defined locks. The arbiter decides which client is granted a slot. ``hosted_grants`` limits the time for which a client
holds a slot.

A client loses a lock that it neither renews nor releases within ``ttl_seconds``. When a proxy ends, all locks that it
holds end, because it does not store them. A proxy tells a client that its lock is still held only after the arbiter has
confirmed it. If the arbiter does not answer, the lock is lost.

Several proxies may hold locks on one broker and one store. Each proxy holds the locks that were acquired through it,
and includes its name in the tokens of these locks.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

from popgate.domain.errors import BrokerUnavailable, LockLost, LockUnavailable, PopgateError
from popgate.domain.locks import LockDefinition, LockKind, administered, client_lock_name
from popgate.domain.names import InstanceId
from popgate.domain.quotas import DEFAULTS
from popgate.locks.administration import SlotStatus
from popgate.locks.arbiter import Arbiter
from popgate.locks.definitions import Announce, Definitions, not_found, usable
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
"""Seconds between two reads of the store, which find changes of locks that were not announced to this proxy."""


class LockHolder(NamedTuple):
    """A holder of a lock. ``expires_at`` is None if the lock is not held through this proxy."""

    holder: str
    slot: int
    fencing_token: int | None
    acquired_at: float | None
    expires_at: float | None


class LockView(NamedTuple):
    """The current state of a lock.

    ``holders`` and ``waiting`` include the clients of all proxies, and programs that use the lock over AMQP. In a list
    of locks, they include only this proxy's clients.
    """

    name: str
    kind: LockKind
    slots: int
    enabled: bool
    holders: list[LockHolder]
    waiting: int


class HostedLocks:
    """Serves the requests for locks on the proxy ``instance``. At most ``waiting_max`` clients may wait at a time.

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
        is_idle = None if arbiter.keeps_queues else self._is_idle
        self._definitions = Definitions(store, clock, announce, locks_max, is_idle)
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
        """Release all locks of this proxy, and end all waits. Idempotent."""
        self.drain()
        self._deadlines.stop()
        await self._arbiter.stop()
        await self._background.stop()

    # -- administration -------------------------------------------------------------------------------------------

    async def administer(self, name: str, kind: LockKind, slots: int | None, enabled: bool | None) -> LockView:
        """Create a lock, by default enabled and with one slot, or change a lock. None keeps the current value.

        Raises: InvalidRequest, Conflict (the lock is of another kind), LockHeld, BrokerUnavailable, StateUnavailable.
        """
        self._raise_if_stopping()
        async with self._definitions.changes(client_lock_name(name)):
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
            # An administrator may have changed the slots over AMQP after the lock was defined.
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
        """Delete a lock. Its holders lose the lock, and clients stop waiting for it.

        If a call was interrupted, repeat the call to finish the deletion.

        Raises: InvalidRequest, LockNotFound, LockHeld, BrokerUnavailable, StateUnavailable.
        """
        async with self._definitions.changes(name):
            definition = await self._definitions.mark_deleted(name)
            self._tell_waiting(name)
            ended = [hosted for hosted in self.grants.of(name) if self.grants.end(hosted, LockEvent.DELETED)]
        try:
            await self._definitions.announce()
            async with self._definitions.changes(name), self._definitions.deleting(definition):
                await self._arbiter.delete(definition, partial(self._definitions.is_stored, definition))
        finally:
            for hosted in ended:  # not earlier: a client that waits at another proxy would be granted the slot
                await hosted.grant.release()

    async def follow(self) -> None:
        """Apply other proxies' changes of locks. If a lock was deleted, end this proxy's grants of it and waits for it.

        Raises: StateUnavailable.
        """
        async for gone in self._definitions.follow():
            held = [hosted for hosted in self.grants.of(gone.name) if hosted.definition.kind is gone.kind]
            if gone.by_use and held and gone.name not in self._definitions.known:
                # Another proxy, which saw no use of the lock, has deleted only the definition. The lock still exists on
                # the broker.
                async with self._definitions.changes(gone.name):
                    is_deleted = (await self._definitions.add(gone)).deleted
                if not is_deleted:
                    continue
            self._tell_waiting(gone.name)
            for hosted in held:
                self.grants.end_soon(hosted, LockEvent.DELETED)

    async def force_release(self, name: str, holder: str | None, fencing_token: int | None) -> list[LockHolder]:
        """Take the lock away from all holders that match the given values, and return these holders.

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
        """Acquire the lock. Return the token for the client, and the grant.

        Return None if no slot becomes free for ``wait_seconds``, or if ``waiter`` ends the wait.

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
        if grant is not None:  # the wait was ended at the same moment
            self._background.spawn(grant.release(), name=f"release lock {name}")
        if waiter.error is not None:
            raise waiter.error
        self.grants.count(LockEvent.NOT_ACQUIRED, definition.kind)
        return None

    async def verify(self, name: str, token: str) -> HostedGrant:
        """Let the arbiter confirm that the lock is still held, and return the grant.

        Raises: InvalidRequest, LockNotFound, LockLost, StateUnavailable.
        """
        hosted = await self._found(name, token)
        await self._ask(hosted, hosted.grant.verify)
        return hosted

    async def renew(self, name: str, token: str, ttl_seconds: float | None) -> HostedGrant:
        """Let the lock end ``ttl_seconds`` after this call. None repeats the previous ``ttl_seconds``.

        The fencing token may become higher.

        Raises: InvalidRequest, LockNotFound, LockLost, StateUnavailable.
        """
        hosted = await self._found(name, token)
        began = self._clock.monotonic()
        await self._ask(hosted, hosted.grant.verify)
        await self._ask(hosted, hosted.grant.renew)
        self.grants.prolong(hosted, ttl_seconds or hosted.ttl_seconds, since=began)
        return hosted

    async def release(self, name: str, token: str) -> bool:
        """Release the lock. Return whether the lock was held until this call. Idempotent.

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
        """Release a lock in the background, because its client did not receive the answer."""
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
        """Forget mutexes that were created by use and have not been used for a day. The broker deletes them, too."""
        for definition in self._definitions.unused(now):
            if self._is_idle(definition.name):
                self._background.spawn(self._forget(definition), name=f"forget lock {definition.name}")
        return now + COLLECT_SECONDS

    async def _forget(self, definition: LockDefinition) -> None:
        name = definition.name
        try:
            if self._definitions.is_shared and await self._arbiter.status(definition) is not None:
                self._definitions.used(name)  # clients of other proxies may use the lock: check again in a day
                return
            async with self._definitions.changes(name):
                if self._definitions.known.get(name) == definition and self._is_idle(name):
                    async with self._definitions.deleting(definition):
                        pass
        except PopgateError as error:
            _log.info("an unused lock could not be deleted yet", extra={"lock": name, "reason": error.detail})

    def _is_idle(self, name: str) -> bool:
        """Return whether no client of this proxy holds the lock or waits for it."""
        return name not in self._waiting and not self.grants.of(name)

    async def _keep_following(self) -> None:
        """Regularly apply changes of locks that were not announced to this proxy. Never returns."""
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
        definition = await self._definitions.look_up(client_lock_name(name))
        if definition is None and self._auto_create:
            async with self._definitions.changes(name):
                definition = await self._definitions.latest(name)
                if definition is None:
                    made = LockDefinition(name=name, kind=LockKind.MUTEX, by_use=True)
                    async with self._definitions.place_for(name):  # before the broker has queues for it
                        await self._arbiter.set_slots(made)  # once, even if several clients are the first to use it
                        definition = usable(await self._definitions.add(made))
        return definition or await self._definitions.find(name)

    async def _found(self, name: str, token: str) -> HostedGrant:
        if not self.grants.knows(name, token):
            await self._definitions.find(name)
        return self.grants.find(name, token)

    async def _ask(self, hosted: HostedGrant, question: Callable[[], Awaitable[object]]) -> None:
        """Call the arbiter about a lock with ``question``. Raises: LockLost, also if the lock ended during the call."""
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
