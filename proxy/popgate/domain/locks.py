"""Defines the kinds and definitions of locks, the names of their queues on the broker, and their fencing tokens.

Pure. The lock protocol itself is in the package ``locks``.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from popgate.domain.errors import Conflict, InvalidRequest
from popgate.domain.names import NAME_LENGTH_MAX

SLOTS_MAX = 64
TOKENS_PER_SECOND = 2**20
"""Number of fencing tokens for each second of Unix time. The first token of a new token queue is the Unix time
multiplied by this number. This token is higher than all tokens of earlier queues, as long as they granted fewer tokens
per second than this number."""
MUTEX_KEPT_SECONDS = 86_400
"""Seconds without use after which the broker removes the queues of a mutex."""

HOLDER_LENGTH_MAX = 128
LOCK_SECONDS_MAX = 43_200
"""Maximum number of seconds for which a client may hold a lock without renewing it."""

KEEPER_LOCK = "replica-keeper"
"""The name of the replica keepers' lock, which clients of the proxy can't use."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class LockKind(StrEnum):
    """The three kinds of locks that the amqp-locks project defines."""

    MUTEX = "mutex"
    """A lock that one client at a time can hold. Its first use creates it, and no administrator has to enable it."""
    PERSISTENT_MUTEX = "persistent_mutex"
    """A semaphore with one slot that an administrator enables and disables."""
    SEMAPHORE = "semaphore"
    """A lock with the number of slots that an administrator sets."""


class Slot(NamedTuple):
    """One slot of a lock, and the names of its queues on the broker. A mutex has one slot."""

    lock: str
    kind: LockKind
    number: int
    """The number of the slot, from 1."""
    fenced: bool = True

    @property
    def token_queue(self) -> str:
        """The queue that always has one message. The client that received the message and has not acked it holds the
        slot."""
        return f"{self._prefix}:token"

    @property
    def slot_queue(self) -> str:
        """The queue that exists as long as the slot can be held. It stays empty, because RabbitMQ (3.10) closes the
        connection of a client that publishes to a quorum queue while the queue is being deleted."""
        return f"{self._prefix}:slot"

    @property
    def holder_queue(self) -> str:
        """The queue that stores the name of the last client that acquired the slot, even while the slot is removed."""
        return f"{self._prefix}:holder"

    @property
    def waiting_queue(self) -> str:
        """The queue whose consumers are the clients that wait for the lock, so that they can be counted. All slots of
        the lock share it."""
        return f"{lock_prefix(self.lock, self.kind, fenced=self.fenced)}:waiting"

    @property
    def held_queue(self) -> str:
        """The queue that is exclusive to the connection that holds an unfenced slot."""
        return f"{self._prefix}:held"

    @property
    def watched_queue(self) -> str:
        """The queue that a holder watches. If this queue does not exist, the holder has lost the slot.

        A mutex has no slot queue, because no administrator removes its slot. Its holder watches the token queue or, if
        the lock is unfenced, the held queue.
        """
        if self.kind is not LockKind.MUTEX:
            return self.slot_queue
        return self.token_queue if self.fenced else self.held_queue

    @property
    def kept_seconds(self) -> int | None:
        """Seconds without use after which the broker deletes the slot's queues, or None if it never deletes them."""
        return MUTEX_KEPT_SECONDS if self.kind is LockKind.MUTEX else None

    @property
    def _prefix(self) -> str:
        return f"{lock_prefix(self.lock, self.kind, fenced=self.fenced)}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockDefinition:
    """The definition of a lock. ``by_use``: whether the first use of a mutex created it, and no administrator defined
    it. ``deleted``: the lock is being deleted, and can't be used."""

    name: str
    kind: LockKind
    slots: int = 1
    enabled: bool = True
    by_use: bool = False
    deleted: bool = False

    @property
    def open_slots(self) -> int:
        """The number of clients that may hold the lock at the same time."""
        return self.slots if self.enabled else 0


def administered(
    present: LockDefinition | None, name: str, kind: LockKind, slots: int | None, enabled: bool | None
) -> LockDefinition:
    """Return the definition of the lock ``name`` after a change by an administrator.

    ``present``: the definition before the change; None if the lock is not defined. If ``slots`` or ``enabled`` is None,
    this value stays the same. Raises: Conflict, InvalidRequest.
    """
    if present is not None and present.kind is not kind:
        raise Conflict(f"lock {name} is a {present.kind}: delete it before you make it a {kind}")
    if slots is not None and kind is not LockKind.SEMAPHORE and slots != 1:
        raise InvalidRequest(f"slots: a {kind} has one slot, not {slots}", field="slots")
    if enabled is False and kind is LockKind.MUTEX:
        raise InvalidRequest("enabled: a mutex can't be disabled, a persistent_mutex can", field="enabled")
    base = present or LockDefinition(name=checked_lock_name(name), kind=kind)
    return replace(
        base,
        slots=base.slots if slots is None else checked_slots(slots, kind),
        enabled=base.enabled if enabled is None else enabled,
        by_use=False,
    )


def lock_prefix(lock: str, kind: LockKind, *, fenced: bool = True) -> str:
    """Return the prefix of the names of a lock's queues.

    A fenced and an unfenced lock with the same name use different queues and are separate locks, because a fenced lock
    can't exclude an unfenced one.
    """
    what = "mutex" if kind is LockKind.MUTEX else "semaphore"
    return f"popgate:{what if fenced else f'unfenced-{what}'}:{lock}"


def checked_lock_name(name: str) -> str:
    """Return ``name`` if it is a valid lock name. Raises: InvalidRequest."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"lock name {name[:80]!r}: use 1 to {NAME_LENGTH_MAX} of A-Z, a-z, 0-9, '.', '_' and '-'", field="name"
        )
    return name


def client_lock_name(name: str) -> str:
    """Return ``name`` if a client of the proxy may use a lock with this name. Raises: InvalidRequest."""
    if name == KEEPER_LOCK:
        raise InvalidRequest(f"lock name {name!r}: this is the lock of the replica keepers; use another", field="name")
    return checked_lock_name(name)


def checked_slots(slots: int, kind: LockKind) -> int:
    """Return ``slots`` if it is a valid number of slots for this kind of lock. Raises: InvalidRequest."""
    most = SLOTS_MAX if kind is LockKind.SEMAPHORE else 1
    if not 0 <= slots <= most:
        raise InvalidRequest(f"slots: {slots} is not between 0 and {most}, the maximum of a {kind}", field="slots")
    return slots


def first_token(wall_seconds: float, above: int = 0) -> int:
    """Return the first token of a new token queue. It is higher than every token of earlier queues, and than ``above``.

    The token is derived from the clock, because a deleted queue leaves no trace of its tokens. An earlier queue could
    have reached this token only with about one grant per microsecond.
    """
    return max(int(wall_seconds * TOKENS_PER_SECOND), above + 1)
