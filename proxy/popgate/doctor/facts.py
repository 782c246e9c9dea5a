"""Defines the facts that are observed about RabbitMQ and Redis. None means that a fact could not be observed.

Times are in milliseconds if RabbitMQ itself uses milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
Definition: TypeAlias = Mapping[str, object]


class Owner(StrEnum):
    """The application that controls a queue."""

    POPGATE = "popgate"
    ADOPTED = "adopted"
    """Another application's queue, which popgate consumes or will consume."""


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
    """A queue.

    ``arguments`` are the known arguments of its declaration. ``is_expected``: the queue does not exist yet, and popgate
    would declare it with these arguments.
    """

    name: str
    owner: Owner
    kind: str = "quorum"
    exists: bool = True
    is_expected: bool = False
    arguments: Definition = field(default_factory=dict[str, object])

    @property
    def is_consumed(self) -> bool:
        """Whether popgate consumes the queue. Only then do returned messages and lost consumers matter."""
        if self.owner is Owner.ADOPTED:
            return True
        return self.arguments.get("x-single-active-consumer") is True or self.name.endswith(":dead")

    @property
    def is_exclusive(self) -> bool:
        """Whether this is one of the exclusive, empty classic queues that mark popgate's connections."""
        return self.owner is Owner.POPGATE and self.kind == "classic"

    @property
    def is_passage(self) -> bool:
        """Whether delayed messages pass through the queue. Its arguments then define its dead-lettering and its time to
        live."""
        return self.name.startswith("popgate:delay:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The permissions of a RabbitMQ user, as regular expressions of names."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An operation that RabbitMQ refused over AMQP. ``kind`` is configure, write or read."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVersion:
    """The version of the state machine that a quorum queue runs, and the newest version that its node supports."""

    queue: str
    running: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """The minimum number of seconds by which the clock of ``place`` is ahead of this machine's clock; negative if it is
    behind."""

    place: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """Redis settings by name, or None if Redis does not show its configuration."""

    place: str
    version: Version
    settings: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Something that was not examined, the reason, and the flag that would allow its examination."""

    what: str
    why: str
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All observed facts. ``consumer_timeout_seconds`` and ``has_keeper`` are popgate's own settings."""

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
