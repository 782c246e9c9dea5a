"""Serves locks over HTTP (decision 1): define, acquire, verify, renew, release.

If a client disconnects while it waits for a lock, its request is removed from the waiting requests. If the answer to an
acquire was not delivered, the lock is released (see ``connection``). This module makes no decisions: ``HostedLocks``
does.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

from msgspec import UNSET

from popgate.api import lock_models as models
from popgate.api.asked import whole
from popgate.api.formats import Reader
from popgate.api.forwarded_locks import LockPeers
from popgate.api.paths import LOCKS
from popgate.api.routes import Call, Route
from popgate.domain.locks import LockKind
from popgate.domain.permissions import Resource
from popgate.engine.lease.pop_request import Presence
from popgate.locks.hosted import HostedLocks, LockHolder, LockView
from popgate.locks.hosted_grants import HostedGrant
from popgate.locks.lock_waiter import LockWaiter
from popgate.ports.peers import ForwardedAnswer

SEEN_AT_ONCE_MAX = 64
"""Maximum number of locks that are compared with a caller's patterns in one turn of the event loop."""

_PUT = Reader(models.LockChange)
_ACQUIRE = Reader(models.LockAcquireRequest)
_TOKEN = Reader(models.LockTokenRequest)
_RENEW = Reader(models.LockRenewRequest)
_FORCE_RELEASE = Reader(models.LockForceReleaseRequest)


class LockHandlers:
    """The handlers for locks. ``locks`` are the locks that this proxy holds. ``peers`` forwards requests about locks
    that other proxies of the cluster hold."""

    def __init__(self, locks: HostedLocks, peers: LockPeers | None = None) -> None:
        self._locks = locks
        self._peers = peers

    def routes(self) -> Iterator[Route]:
        """Return the routes of locks."""
        one = f"{LOCKS}/{{}}"
        yield Route("locks_list", "GET", LOCKS, self.list)
        yield Route("locks_get", "GET", one, self.get)
        yield Route("locks_put", "PUT", one, self.put)
        yield Route("locks_delete", "DELETE", one, self.delete)
        yield Route("locks_acquire", "POST", f"{one}/acquire", self.acquire)
        yield Route("locks_verify", "POST", f"{one}/verify", self.verify)
        yield Route("locks_renew", "POST", f"{one}/renew", self.renew)
        yield Route("locks_release", "POST", f"{one}/release", self.release)
        yield Route("locks_force_release", "POST", f"{one}/force-release", self.force_release)

    async def list(self, call: Call) -> bytes:
        seen: list[models.LockAnswer] = []
        for count, view in enumerate(self._locks.locks()):
            if count % SEEN_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)
            if call.sees(Resource(lock=view.name)):
                seen.append(_lock(view))
        return call.form.encode(models.LockList(seen))

    async def get(self, call: Call) -> bytes:
        return call.form.encode(_lock(await self._locks.describe(*call.path)))

    async def put(self, call: Call) -> bytes:
        (name,), form = call.path, call.form
        asked = _PUT.read(call.body, form.packed)
        slots = None if asked.slots is UNSET else whole(asked.slots, "slots")
        enabled = None if asked.enabled is UNSET else asked.enabled
        return form.encode(_lock(await self._locks.administer(name, LockKind(asked.kind), slots, enabled)))

    async def delete(self, call: Call) -> bytes:
        await self._locks.delete(*call.path)
        return call.form.encode(models.LockDeleted(True))

    async def acquire(self, call: Call) -> bytes:
        (name,), form, connection = call.path, call.form, call.connection
        asked = _ACQUIRE.read(call.body, form.packed)
        waiter = LockWaiter()
        if connection is not None:
            connection.presence = Presence()
            connection.presence.on_leave = waiter.end
            if connection.gone:
                waiter.end()
        try:
            if asked.wait_seconds:
                call.park()
            given = await self._locks.acquire(
                name,
                asked.holder,
                ttl_seconds=asked.ttl_seconds,
                wait_seconds=asked.wait_seconds or 0.0,
                waiter=waiter,
            )
        finally:
            if connection is not None:
                connection.presence = None
        if given is None:
            call.check()
            return form.encode(models.LockAcquired(acquired=False))
        token, hosted = given
        if connection is not None:
            connection.answering(partial(self._locks.release_soon, hosted))
        return form.encode(
            models.LockAcquired(
                acquired=True,
                token=token,
                fencing_token=hosted.fencing_token,
                slot=hosted.slot,
                expires_at=hosted.expires_at,
            )
        )

    async def verify(self, call: Call) -> bytes | ForwardedAnswer:
        (name,), form = call.path, call.form
        asked = _TOKEN.read(call.body, form.packed)
        there = await self._elsewhere(asked.token, call)
        return there or form.encode(_held(await self._locks.verify(name, asked.token)))

    async def renew(self, call: Call) -> bytes | ForwardedAnswer:
        (name,), form = call.path, call.form
        asked = _RENEW.read(call.body, form.packed)
        there = await self._elsewhere(asked.token, call)
        return there or form.encode(_held(await self._locks.renew(name, asked.token, asked.ttl_seconds or None)))

    async def release(self, call: Call) -> bytes | ForwardedAnswer:
        (name,), form = call.path, call.form
        asked = _TOKEN.read(call.body, form.packed)
        there = await self._elsewhere(asked.token, call)
        return there or form.encode(models.LockReleased(await self._locks.release(name, asked.token)))

    async def _elsewhere(self, token: str, call: Call) -> ForwardedAnswer | None:
        """Return the answer of another proxy that holds the lock, or None if this proxy must answer."""
        if call.scope is None or self._peers is None:
            return None
        return await self._peers.answer(token, call.scope, call.body, call.connection)

    async def force_release(self, call: Call) -> bytes:
        (name,), form = call.path, call.form
        asked = _FORCE_RELEASE.read(call.body, form.packed) if call.body else models.LockForceReleaseRequest()
        token = None if asked.fencing_token is UNSET else whole(asked.fencing_token, "fencing_token")
        released = await self._locks.force_release(name, None if asked.holder is UNSET else asked.holder, token)
        return form.encode(models.LockForceReleased(released=len(released), holders=[_holder(one) for one in released]))


def _lock(view: LockView) -> models.LockAnswer:
    return models.LockAnswer(
        name=view.name,
        kind=view.kind.value,
        slots=view.slots,
        enabled=view.enabled,
        holders=[_holder(one) for one in view.holders],
        waiting=view.waiting,
    )


def _holder(one: LockHolder) -> models.LockHolderAnswer:
    return models.LockHolderAnswer(**one._asdict())


def _held(hosted: HostedGrant) -> models.LockHeldAnswer:
    return models.LockHeldAnswer(held=True, fencing_token=hosted.fencing_token, expires_at=hosted.expires_at)
