"""Stores the grants of locks to this proxy's clients by token, and records how each grant ends.

    acquired --> HELD --> released | expired (its ttl) | lost (slot removed, or broker connection ended)
                  | ^              | force_released | deleted (the lock)
                renewed

A token consists of the name of this proxy and a secret of 256 bits. Other proxies use the name to find the proxy that
holds the lock. Only the digest of a token is stored, so that the duration of a look-up reveals nothing about valid
tokens. When a grant ends, the reason is stored for some time, and later requests with the token are answered with it.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from hashlib import sha256

from popgate.domain.errors import LockLost
from popgate.domain.locks import LockDefinition, LockKind
from popgate.domain.names import InstanceId
from popgate.locks.grants import Grant, lost_detail
from popgate.ports.clock import Clock
from popgate.runtime.background import Background
from popgate.runtime.deadlines import NEVER, Deadlines

TOKEN_BYTES = 32
ENDED_MAX = 10_000
"""Maximum number of ended grants whose reasons are stored. If there are more, the oldest reason is deleted."""


class LockEvent(StrEnum):
    """An event of a lock that the metrics count. Each of the last five events ends a grant."""

    ACQUIRED = "acquired"
    NOT_ACQUIRED = "not_acquired"
    RELEASED = "released"
    EXPIRED = "expired"
    LOST = "lost"
    FORCE_RELEASED = "force_released"
    DELETED = "deleted"


_REASONS = {
    LockEvent.RELEASED: "it was released",
    LockEvent.EXPIRED: "it was not renewed within its ttl_seconds",
    LockEvent.FORCE_RELEASED: "an operator released it",
    LockEvent.DELETED: "the lock was deleted",
}
_UNKNOWN = "nothing is held under this token (a restart of the proxy ends all locks that it held)"


class HostedGrant:
    """A lock that the proxy holds for a client until ``ends_at`` (monotonic seconds).

    A renewal changes ``ends_at``. ``expires_at`` is the same time in Unix seconds.
    """

    __slots__ = (
        "_look",
        "acquired_at",
        "definition",
        "digest",
        "ends_at",
        "expires_at",
        "grant",
        "holder",
        "timer",
        "ttl_seconds",
    )

    def __init__(
        self,
        definition: LockDefinition,
        holder: str,
        grant: Grant,
        *,
        digest: bytes,
        acquired_at: float,
        look: "Callable[[HostedGrant], None]",
    ) -> None:
        self.timer = NEVER
        self.definition = definition
        self.holder = holder
        self.grant = grant
        self.digest = digest
        self.acquired_at = acquired_at
        self.ttl_seconds = 0.0
        self.ends_at = 0.0
        self.expires_at = 0.0
        self._look = look

    @property
    def slot(self) -> int:
        return self.grant.slot.number

    @property
    def fencing_token(self) -> int:
        assert self.grant.fencing_token is not None, "a proxy holds fenced locks only"
        return self.grant.fencing_token

    def due(self, now: float) -> None:
        self._look(self)


class HostedGrants:
    """Stores the present grants of this proxy, and the reasons why former grants ended.

    All methods are synchronous. If a method ends a grant, it releases the slot in the background. Only ``end`` does
    not release the slot.
    """

    def __init__(self, clock: Clock, deadlines: Deadlines, background: Background, instance: InstanceId) -> None:
        self._instance = instance
        self._clock = clock
        self._deadlines = deadlines
        self._background = background
        self._by_digest: dict[bytes, HostedGrant] = {}
        self._by_lock: dict[str, list[HostedGrant]] = {}
        self._ended: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        """For each ended grant, by the digest of its token: the lock's name, and the reason why the grant ended."""
        self.counts: dict[tuple[LockEvent, LockKind], int] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def count(self, event: LockEvent, kind: LockKind) -> None:
        self.counts[event, kind] = self.counts.get((event, kind), 0) + 1

    def add(self, definition: LockDefinition, holder: str, grant: Grant, ttl_seconds: float) -> tuple[str, HostedGrant]:
        """Store a new grant for a client. Return the token for the client, and the stored grant."""
        token = f"{self._instance}.{secrets.token_urlsafe(TOKEN_BYTES)}"
        digest, acquired_at = _digest(token), self._clock.wall()
        hosted = HostedGrant(definition, holder, grant, digest=digest, acquired_at=acquired_at, look=self._look_at)
        self._by_digest[hosted.digest] = hosted
        self._by_lock.setdefault(definition.name, []).append(hosted)
        self.prolong(hosted, ttl_seconds, since=self._clock.monotonic())
        self.count(LockEvent.ACQUIRED, definition.kind)
        return token, hosted

    def find(self, lock: str, token: str) -> HostedGrant:
        """Return the grant of ``token``, if the token belongs to ``lock`` and the grant has not ended.

        The arbiter is not asked, so a loss that it has not reported to this proxy yet is not detected. Raises:
        LockLost, with the reason why the grant ended.
        """
        return self.still_held(lock, _digest(token))

    def still_held(self, lock: str, digest: bytes) -> HostedGrant:
        """Do the same as ``find``, for the token with this digest."""
        hosted = self._by_digest.get(digest)
        if hosted is not None and hosted.definition.name == lock:
            self._look_at(hosted)
            if digest in self._by_digest:
                return hosted
        ended_lock, reason = self._ended.get(digest, ("", ""))
        raise LockLost(lost_detail(lock, reason if ended_lock == lock else _UNKNOWN))

    def knows(self, lock: str, token: str) -> bool:
        """Return whether ``token`` belongs to a present or ended grant of ``lock``."""
        digest = _digest(token)
        hosted = self._by_digest.get(digest)
        return (hosted is not None and hosted.definition.name == lock) or self._ended.get(digest, ("",))[0] == lock

    def prolong(self, hosted: HostedGrant, ttl_seconds: float, *, since: float) -> None:
        """Let the grant end ``ttl_seconds`` after ``since`` (monotonic seconds)."""
        hosted.ttl_seconds = ttl_seconds
        hosted.ends_at = since + ttl_seconds
        hosted.expires_at = self._clock.wall() + hosted.ends_at - self._clock.monotonic()
        self._deadlines.schedule(hosted.ends_at, hosted)

    def end(self, hosted: HostedGrant, event: LockEvent) -> bool:
        """End a grant without releasing its slot. Return False if the grant had already ended.

        If the result is True, the caller must release the slot.
        """
        if self._by_digest.pop(hosted.digest, None) is None:
            return False
        name = hosted.definition.name
        self._deadlines.cancel(hosted)
        self._by_lock[name].remove(hosted)
        if not self._by_lock[name]:
            del self._by_lock[name]
        reason = hosted.grant.reason if event is LockEvent.LOST else _REASONS[event]
        self._ended[hosted.digest] = (name, reason)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self.count(event, hosted.definition.kind)
        return True

    def end_soon(self, hosted: HostedGrant, event: LockEvent) -> None:
        """End a grant, and release its slot in the background."""
        if self.end(hosted, event):
            self._background.spawn(hosted.grant.release(), name=f"release lock {hosted.definition.name}")

    def of(self, lock: str) -> list[HostedGrant]:
        """Return the present grants of one lock, sorted by slot number.

        Before that, end the grants that have expired or that this proxy knows to be lost.
        """
        for hosted in list(self._by_lock.get(lock, ())):
            self._look_at(hosted)
        return sorted(self._by_lock.get(lock, ()), key=lambda hosted: hosted.slot)

    def all(self) -> list[HostedGrant]:
        for hosted in list(self._by_digest.values()):
            self._look_at(hosted)
        return list(self._by_digest.values())

    def _look_at(self, hosted: HostedGrant) -> None:
        """End a grant if this proxy knows that its slot is lost, or if its time to live has passed.

        The time to live is checked here because the timer may be late.
        """
        if hosted.grant.lost.is_set():
            self.end_soon(hosted, LockEvent.LOST)
        elif self._clock.monotonic() >= hosted.ends_at:
            self.end_soon(hosted, LockEvent.EXPIRED)


def holder_of(token: str) -> InstanceId | None:
    """Return the name of the proxy that issued ``token``, or None if ``token`` does not have the format of a token."""
    instance, dot, _ = token.partition(".")
    return InstanceId(instance) if instance and dot else None


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()
