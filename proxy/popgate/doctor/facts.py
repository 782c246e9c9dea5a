"""Defines the facts that are observed about RabbitMQ and Redis. None means that a fact could not be observed.

RabbitMQ's own settings stay in the unit that RabbitMQ uses, which is usually milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
Definition: TypeAlias = Mapping[str, object]


class Owner(StrEnum):
    """The application that declares and controls a queue: popgate or another application."""

    POPGATE = "popgate"
    ADOPTED = "adopted"
    """The queue is controlled by another application, and popgate consumes or will consume it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPolicy:
    """A policy or an operator policy of RabbitMQ."""

    name: str
    pattern: str
    definition: Definition
    priority: int = 0
    apply_to: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A RabbitMQ queue, observed or expected.

    ``arguments`` are the known arguments of the queue's declaration. If ``is_expected`` is True, the queue was not
    observed, and ``arguments`` are those with which popgate declares it.
    """

    name: str
    owner: Owner
    kind: str = "quorum"
    exists: bool = True
    is_expected: bool = False
    arguments: Definition = field(default_factory=dict[str, object])

    @property
    def is_consumed(self) -> bool:
        """Whether popgate consumes the queue. Rules about returned messages and lost consumers skip other queues."""
        if self.owner is Owner.ADOPTED:
            return True
        return self.arguments.get("x-single-active-consumer") is True or self.name.endswith(":dead")

    @property
    def is_exclusive(self) -> bool:
        """Whether this is one of popgate's exclusive classic queues, which store no messages."""
        return self.owner is Owner.POPGATE and self.kind == "classic"

    @property
    def is_passage(self) -> bool:
        """Whether delayed messages pass through the queue. If so, the queue's arguments set its dead-lettering and its
        time to live."""
        return self.name.startswith("popgate:delay:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The permissions of a RabbitMQ user: regular expressions for the names of permitted queues and exchanges."""

    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An operation that RabbitMQ refused over AMQP, because popgate's user lacks a permission.

    ``kind`` is the missing permission: configure, write or read. ``name`` is the name of the queue or exchange.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineVersion:
    """The version of the state machine that a quorum queue runs, and the newest version that RabbitMQ supports."""

    queue: str
    running: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """The difference between the clock of ``place`` and this machine's clock.

    If ``seconds`` is positive, the clock of ``place`` is ahead by at least ``seconds``. If ``seconds`` is negative, it
    is behind by at least ``-seconds``. If ``seconds`` is 0, no difference was detected.
    """

    place: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """The version and the settings of the Redis server at ``place``.

    ``settings`` maps names to values. It is None if popgate's user may not read the configuration of Redis.
    """

    place: str
    version: Version
    settings: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A fact that was not observed: its description, the reason, and the command line flag that makes it observable."""

    what: str
    why: str
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts that were observed of the broker, the store and their settings, as the input of the checks.

    ``consumer_timeout_seconds`` is popgate's own setting. ``has_keeper`` is True if popgate is configured to run a
    replica keeper, or if a replica keeper runs at present. ``named`` are the queues that the operator has named; other
    adopted queues are known from the catalog only, into which another program may have written.
    """

    vhost: str
    user: str
    version: Version
    queues: tuple[Queue, ...] = ()
    named: frozenset[str] = frozenset()
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
