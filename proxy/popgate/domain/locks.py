"""Locks: their kinds and definitions, what they are called on the broker, and their fencing tokens.

Pure. Knows no broker; the protocol is ``locks``'.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from popgate.domain.errors import Conflict, InvalidRequest
from popgate.domain.names import NAME_LENGTH_MAX

SLOTS_MAX = 64
TOKENS_PER_SECOND = 2**20
"""A queue that is made anew counts above every earlier one, as long as fewer grants than that were given a second."""
MUTEX_KEPT_SECONDS = 86_400
"""What is left of a mutex that nobody wants is removed after that long."""

HOLDER_LENGTH_MAX = 128
LOCK_SECONDS_MAX = 43_200
"""For how long a client may hold a lock without renewing it."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class LockKind(StrEnum):
    """The three of amqp-locks."""

    MUTEX = "mutex"
    """Comes into being by use; free wherever nobody holds it."""
    PERSISTENT_MUTEX = "persistent_mutex"
    """A semaphore of one, enabled and disabled by an administrator."""
    SEMAPHORE = "semaphore"
    """As many slots as an administrator says."""


class Slot(NamedTuple):
    """One slot of a lock, and what stands for it on the broker. A mutex is one slot."""

    lock: str
    kind: LockKind
    number: int
    """From 1."""
    fenced: bool = True

    @property
    def token_queue(self) -> str:
        """Holds one message, for ever: whoever has it unacked holds the slot."""
        return f"{self._prefix}:token"

    @property
    def slot_queue(self) -> str:
        """Exists as long as the slot is there to be held. Nothing is ever put into it: RabbitMQ (3.10) closes the
        connection of whoever publishes to a quorum queue at the moment it is deleted."""
        return f"{self._prefix}:slot"

    @property
    def holder_queue(self) -> str:
        """Says who got the slot last, also while it is removed."""
        return f"{self._prefix}:holder"

    @property
    def waiting_queue(self) -> str:
        """One for all slots of the lock: every client that waits consumes it, and so is counted."""
        return f"{lock_prefix(self.lock, self.kind, fenced=self.fenced)}:waiting"

    @property
    def held_queue(self) -> str:
        """Exclusive to the connection that holds an unfenced slot."""
        return f"{self._prefix}:held"

    @property
    def watched_queue(self) -> str:
        """Whose absence tells a holder that the slot is gone. A mutex has no administrator who could remove it."""
        if self.kind is not LockKind.MUTEX:
            return self.slot_queue
        return self.token_queue if self.fenced else self.held_queue

    @property
    def kept_seconds(self) -> int | None:
        """After how long without use the broker removes what is left of it; None: never."""
        return MUTEX_KEPT_SECONDS if self.kind is LockKind.MUTEX else None

    @property
    def _prefix(self) -> str:
        return f"{lock_prefix(self.lock, self.kind, fenced=self.fenced)}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockDefinition:
    """What an administrator has said of a lock; ``by_use``: nobody has, it is a mutex that came into being by use."""

    name: str
    kind: LockKind
    slots: int = 1
    enabled: bool = True
    by_use: bool = False

    @property
    def open_slots(self) -> int:
        """How many may hold it."""
        return self.slots if self.enabled else 0


def administered(
    present: LockDefinition | None, name: str, kind: LockKind, slots: int | None, enabled: bool | None
) -> LockDefinition:
    """The definition as an administrator wants it; what is None stays as it is. Raises: Conflict, InvalidRequest."""
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
    """What the names of a lock's queues begin with. A persistent mutex is a semaphore of one.

    A fenced and an unfenced lock of one name are two locks: they could not exclude each other.
    """
    what = "mutex" if kind is LockKind.MUTEX else "semaphore"
    return f"popgate:{what if fenced else f'unfenced-{what}'}:{lock}"


def checked_lock_name(name: str) -> str:
    """``name`` itself. Raises: InvalidRequest."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"lock name {name[:80]!r}: use 1 to {NAME_LENGTH_MAX} of A-Z, a-z, 0-9, '.', '_' and '-'", field="name"
        )
    return name


def checked_slots(slots: int, kind: LockKind) -> int:
    """``slots`` itself. Raises: InvalidRequest."""
    most = SLOTS_MAX if kind is LockKind.SEMAPHORE else 1
    if not 0 <= slots <= most:
        raise InvalidRequest(f"slots: {slots} is not between 0 and {most}, the most of a {kind}", field="slots")
    return slots


def first_token(wall_seconds: float, above: int = 0) -> int:
    """Where a new token queue begins to count: above whatever an earlier one has given.

    By the clock, for a queue that was deleted tells nothing: a grant every microsecond would be needed to pass it.
    """
    return max(int(wall_seconds * TOKENS_PER_SECOND), above + 1)
