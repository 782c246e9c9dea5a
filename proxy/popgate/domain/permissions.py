"""Decides what a caller may do: actions on resources, granted by patterns. Everything that no grant allows is refused.

A pattern is a name in which each ``*`` matches any number of characters. No other character is special.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from popgate.domain.errors import Forbidden

ANY = "*"
"""The pattern that matches every name. As a name in a ``Resource``, it stands for all names: only ``*`` matches it."""
PATTERN_LENGTH_MAX = 255
GRANTS_MAX = 64
"""Maximum number of grants of one principal. A forwarded request carries the grants of its caller."""
PATTERNS_MAX = 64
"""Maximum number of patterns of each kind in one grant."""


class Action(StrEnum):
    """What an operation does, as far as permissions are concerned."""

    PUBLISH = "publish"
    CONSUME = "consume"
    """Pop, pull, settle, use lease groups, and read dead letters."""
    INSPECT = "inspect"
    """Read states, policies and lists."""
    LOCK = "lock"
    """Acquire, verify, renew and release locks."""
    CREATE = "create"
    """Create topics and groups, but not change existing ones."""
    METRICS = "metrics"
    ADMIN = "admin"
    """Change or delete topics, groups, policies, modes and locks; purge, redrive and adopt."""


class Resource(NamedTuple):
    """What an operation acts on. A field is None if it does not concern the operation.

    ``queue`` is a queue on the broker that a topic shall adopt. A resource without any name is the whole server.
    """

    topic: str | None = None
    group: str | None = None
    lock: str | None = None
    queue: str | None = None

    def __str__(self) -> str:
        named = [f"{kind} {name}" for kind, name in zip(self._fields, self, strict=True) if name is not None]
        return " ".join(named) or "the server"


SERVER = Resource()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Allows ``actions`` on the topics, groups and locks whose names match one of the patterns.

    Adopting needs a pattern for the broker's queues, which no grant has by default.
    """

    actions: frozenset[Action]
    topics: tuple[str, ...] = (ANY,)
    groups: tuple[str, ...] = (ANY,)
    locks: tuple[str, ...] = (ANY,)
    queues: tuple[str, ...] = ()

    def allows(self, action: Action) -> bool:
        """Return whether the grant contains the action. ``admin`` includes ``inspect``."""
        return action in self.actions or (action is Action.INSPECT and Action.ADMIN in self.actions)

    def covers(self, resource: Resource) -> bool:
        topic, group, lock, queue = resource
        if resource == SERVER:
            return ANY in self.topics and ANY in self.groups
        return (
            (topic is None or matches_any(self.topics, topic))
            and (group is None or matches_any(self.groups, group))
            and (lock is None or matches_any(self.locks, lock))
            and (queue is None or matches_any(self.queues, queue))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one principal may use of each proxy. None means no limit.

    ``topics`` limits the number of existing topics that match the principal's grants of ``create``.
    """

    requests_per_second: float | None = None
    parked_pops: int | None = None
    connections: int | None = None
    bytes_in_flight: int | None = None
    topics: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A named caller: a program, a team or a person."""

    name: str
    grants: tuple[Grant, ...] = ()
    limits: Limits = NO_LIMITS

    def may(self, action: Action, resource: Resource) -> bool:
        return any(grant.allows(action) and grant.covers(resource) for grant in self.grants)

    def may_any(self, actions: Sequence[Action], resource: Resource) -> bool:
        """Return whether the principal may do at least one of ``actions``."""
        return any(self.may(action, resource) for action in actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A principal, and the credential that proved it. ``credential`` is the id of a key, or names a token or
    certificate; it is never secret. ``expires_at`` is in Unix seconds, or None if the credential does not expire.

    ``proof`` distinguishes credentials that have had the same id one after the other.
    """

    principal: Principal
    credential: str
    expires_at: float | None = None
    proof: bytes = field(default=b"", repr=False)

    def require(self, action: Action, resource: Resource) -> None:
        """Raises: Forbidden if no grant allows the action. The text is the same whether or not the resource exists."""
        if not self.principal.may(action, resource):
            raise forbidden(self.principal, action, resource)


Permit: TypeAlias = Callable[[Action, Resource], None]
"""Checks an action that depends on what exists, at the moment when the engine does it. Raises: Forbidden."""


def permit_all(action: Action, resource: Resource) -> None:
    """The ``Permit`` of a proxy that does not authenticate callers."""


def forbidden(principal: Principal, action: Action, resource: Resource) -> Forbidden:
    detail = f"{principal.name} has no permission {action.value!r} on {resource}; an administrator can grant it"
    return Forbidden(detail, action=action.value)


def matches(pattern: str, name: str) -> bool:
    """Return whether ``name`` matches ``pattern``. The time is linear in the length of the name for each ``*``."""
    if ANY not in pattern:
        return pattern == name
    first, *middle, last = pattern.split(ANY)
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    place, end = len(first), len(name) - len(last)
    for part in middle:  # the first place that fits leaves most room for the parts that follow
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True


def matches_any(patterns: Sequence[str], name: str) -> bool:
    return any(pattern == ANY or matches(pattern, name) for pattern in patterns)
