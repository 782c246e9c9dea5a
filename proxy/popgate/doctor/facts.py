"""What can be observed of a RabbitMQ and a Redis. None means: it could not be seen.

Milliseconds are RabbitMQ's own unit, and stay so here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
Definition: TypeAlias = Mapping[str, object]


class Owner(StrEnum):
    """Who decides about a queue."""

    POPGATE = "popgate"
    ADOPTED = "adopted"
    """Another application's queue, which popgate consumes or is going to consume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPolicy:
    """A policy of RabbitMQ, or an operator policy."""

    name: str
    pattern: str
    definition: Definition
    priority: int = 0
    apply_to: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue. ``arguments`` are those of its declare as far as they were seen. ``is_expected``: it does not exist yet,
    and popgate would declare it like this."""

    name: str
    owner: Owner
    kind: str = "quorum"
    exists: bool = True
    is_expected: bool = False
    arguments: Definition = field(default_factory=dict[str, object])

    @property
    def is_consumed(self) -> bool:
        """Whether popgate consumes it, so that returns and lost consumers matter."""
        if self.owner is Owner.ADOPTED:
            return True
        return self.arguments.get("x-single-active-consumer") is True or self.name.endswith(":dead")

    @property
    def is_exclusive(self) -> bool:
        """Whether it is one of those by which connections of popgate's are known: classic, empty and exclusive."""
        return self.owner is Owner.POPGATE and self.kind == "classic"

    @property
    def is_passage(self) -> bool:
        """Whether it is on the way of delayed messages; its arguments say what it dead-letters, and when."""
        return self.name.startswith("popgate:delay:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What RabbitMQ lets a user do, as regular expressions of names."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An operation that RabbitMQ refused over AMQP: ``kind`` is configure, write or read."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVersion:
    """The version of the state machine that a quorum queue runs, and the newest that its node knows."""

    queue: str
    running: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """How far the clock of ``place`` is ahead of this machine's, at least; negative where it is behind."""

    place: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """Redis' settings by name; None where Redis does not show its configuration."""

    place: str
    version: Version
    settings: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Something that was not looked at, why, and the flag that would show it."""

    what: str
    why: str
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was observed. ``consumer_timeout_seconds`` and ``has_keeper`` are popgate's own settings."""

    vhost: str
    user: str
    version: Version
    queues: tuple[Queue, ...] = ()
    policies: tuple[BrokerPolicy, ...] | None = None
    operator_policies: tuple[BrokerPolicy, ...] | None = None
    disabled_flags: tuple[str, ...] | None = None
    auto_delete_exchanges: tuple[str, ...] | None = None
    permissions: Permissions | None = None
    refusals: tuple[Refusal, ...] = ()
    consumer_timeout_seconds: float = 1_800.0
    broker_consumer_timeout_ms: int | None = None
    reconciles_membership: bool | None = None
    has_keeper: bool = False
    machine_versions: tuple[MachineVersion, ...] | None = None
    clocks: tuple[ClockSkew, ...] = ()
    redis: RedisFacts | None = None
    unseen: tuple[Unseen, ...] = ()
