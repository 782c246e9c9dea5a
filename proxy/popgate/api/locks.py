"""Locks over HTTP (design: section 3): define, acquire, verify, renew, release. It decides nothing.

A client that disconnects while it waits leaves the line; a lock whose answer was not delivered is released
(``connection``).
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from msgspec import UNSET
from starlette.types import Scope

from popgate.api import lock_models as models
from popgate.api.asked import allow, query_values, whole
from popgate.api.connection import Connection
from popgate.api.formats import Format, Reader
from popgate.api.passing_locks import LockPeers
from popgate.api.problems import NotFound
from popgate.domain.locks import LockKind
from popgate.engine.lease.pop_request import Presence
from popgate.locks.hosted import HostedLocks, LockHolder, LockView, LockWaiter
from popgate.locks.hosted_grants import HostedGrant
from popgate.ports.peers import PassedAnswer

PATH = "/v1/locks"

_PUT = Reader(models.LockChange)
_ACQUIRE = Reader(models.LockAcquireRequest)
_TOKEN = Reader(models.LockTokenRequest)
_RENEW = Reader(models.LockRenewRequest)
_FORCE_RELEASE = Reader(models.LockForceReleaseRequest)

LockHandler: TypeAlias = Callable[[str, str, bytes, Format, Connection | None], Awaitable[bytes | PassedAnswer]]
"""(lock, unused, body, format, connection) -> the encoded body of a 200, like the data plane's other handlers."""


class LockHandlers:
    """The handlers for the locks of one proxy. ``peers``: the other proxies of a cluster, which hold locks, too."""

    def __init__(self, locks: HostedLocks, peers: LockPeers | None = None) -> None:
        self._locks = locks
        self._peers = peers
        self._on_lock: dict[str, LockHandler] = {"GET": self.get, "PUT": self.put, "DELETE": self.delete}
        self._verbs: dict[str, LockHandler] = {
            "acquire": self.acquire,
            "verify": self.verify,
            "renew": self.renew,
            "release": self.release,
            "force-release": self.force_release,
        }
        self._of_holders = {"locks_verify": self.verify, "locks_renew": self.renew, "locks_release": self.release}

    def route(self, method: str, parts: Sequence[str], query: bytes) -> tuple[str, LockHandler, str]:
        """Return the operation's name in the metrics, its handler, and the lock. ``parts`` follow "locks" in the path.

        Raises: NotFound, MethodNotAllowed, InvalidRequest.
        """
        match parts:
            case []:
                allow(method, "GET")
                found: tuple[str, LockHandler, str] = "list", self.list, ""
            case [name]:
                allow(method, *sorted(self._on_lock))
                found = method.lower(), self._on_lock[method], name
            case [name, verb] if verb in self._verbs:
                allow(method, "POST")
                found = verb.replace("-", "_"), self._verbs[verb], name
            case _:
                raise NotFound("/".join([PATH, *parts]))
        query_values(query)
        operation, handler, lock = found
        return f"locks_{operation}", handler, lock

    def passing_on(self, operation: str, scope: Scope) -> LockHandler | None:
        """Return a handler that passes ``scope`` on if another proxy holds the lock, or None if the operation has
        none."""
        handler = self._of_holders.get(operation)
        return None if handler is None else partial(handler, scope=scope)

    async def list(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        return form.encode(models.LockList([_lock(view) for view in self._locks.locks()]))

    async def get(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        return form.encode(_lock(await self._locks.describe(name)))

    async def put(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        asked = _PUT.read(body, form.packed)
        slots = None if asked.slots is UNSET else whole(asked.slots, "slots")
        enabled = None if asked.enabled is UNSET else asked.enabled
        return form.encode(_lock(await self._locks.administer(name, LockKind(asked.kind), slots, enabled)))

    async def delete(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        await self._locks.delete(name)
        return form.encode(models.LockDeleted(True))

    async def acquire(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        asked = _ACQUIRE.read(body, form.packed)
        waiter = LockWaiter()
        if connection is not None:
            connection.presence = Presence()
            connection.presence.on_leave = waiter.end
            if connection.gone:
                waiter.end()
        try:
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
            return form.encode(models.LockAcquired(acquired=False))
        token, hosted = given
        if connection is not None:
            connection.answering(partial(self._locks.release_soon, hosted), hosted.expires_at)
        return form.encode(
            models.LockAcquired(
                acquired=True,
                token=token,
                fencing_token=hosted.fencing_token,
                slot=hosted.slot,
                expires_at=hosted.expires_at,
            )
        )

    async def verify(
        self, name: str, _: str, body: bytes, form: Format, connection: Connection | None, scope: Scope | None = None
    ) -> bytes | PassedAnswer:
        asked = _TOKEN.read(body, form.packed)
        there = await self._elsewhere(asked.token, body, connection, scope)
        return there or form.encode(_held(await self._locks.verify(name, asked.token)))

    async def renew(
        self, name: str, _: str, body: bytes, form: Format, connection: Connection | None, scope: Scope | None = None
    ) -> bytes | PassedAnswer:
        asked = _RENEW.read(body, form.packed)
        there = await self._elsewhere(asked.token, body, connection, scope)
        return there or form.encode(_held(await self._locks.renew(name, asked.token, asked.ttl_seconds or None)))

    async def release(
        self, name: str, _: str, body: bytes, form: Format, connection: Connection | None, scope: Scope | None = None
    ) -> bytes | PassedAnswer:
        asked = _TOKEN.read(body, form.packed)
        there = await self._elsewhere(asked.token, body, connection, scope)
        return there or form.encode(models.LockReleased(await self._locks.release(name, asked.token)))

    async def _elsewhere(
        self, token: str, body: bytes, connection: Connection | None, scope: Scope | None
    ) -> PassedAnswer | None:
        """Return the answer of the proxy that holds the lock, or None if this proxy answers. ``scope`` None: don't
        pass it on."""
        if scope is None or self._peers is None:
            return None
        return await self._peers.answer(token, scope, body, connection)

    async def force_release(self, name: str, _: str, body: bytes, form: Format, connection: Connection | None) -> bytes:
        asked = _FORCE_RELEASE.read(body, form.packed) if body else models.LockForceReleaseRequest()
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
