"""Gathers the doctor's facts through the best available interface, and reports which facts could not be seen.

Only AMQP must be available. The management API, the command line tools and Redis add the facts that they can show.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from popgate.adapters.doctor.amqp import consumer_count, find_refusals, inspect_queue
from popgate.adapters.doctor.broker_api import (
    NodeSettings,
    ToolFacts,
    api_clock,
    auto_delete_exchanges,
    broker_policies,
    disabled_flags,
    kind_of,
    node_settings,
    permissions_of,
    tool_facts,
)
from popgate.adapters.doctor.catalog import CatalogQueue
from popgate.adapters.doctor.redis_facts import redis_facts
from popgate.adapters.rabbitmq.delay_levels import level_name
from popgate.adapters.rabbitmq.guard import GUARD
from popgate.adapters.rabbitmq.queue_shape import DELIVERY_LIMIT, QUEUE_TYPE, SINGLE_ACTIVE
from popgate.adapters.rabbitmq.session import Session
from popgate.adapters.rabbitmq.topology import DELIVERY_LIMIT_UNREACHABLE
from popgate.adapters.rabbitmq.versions import DISCONNECTED_MILLISECONDS, DISCONNECTED_TIMEOUT
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.reading import Row, as_object
from popgate.adapters.replicas.tools import BrokerTools
from popgate.doctor.facts import ClockSkew, Facts, Owner, Queue, RedisFacts, Refusal, Unseen, Version
from popgate.doctor.permission_rules import OWN_EXAMPLE
from popgate.doctor.policies import OWN_PREFIX
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.locks import KEEPER_LOCK, LockKind, Slot
from popgate.ports.replicas import ReplicaRefused

T = TypeVar("T")

RECONCILES_FROM = (3, 13)
API_FLAG, TOOLS_FLAG = "--management-url", "--replica-commands"
NO_API = "no management API is known"
NO_TOOLS = "no way to RabbitMQ's command line tools is known"
KEEPER_QUEUE = Slot(KEEPER_LOCK, LockKind.MUTEX, 1).token_queue
"""The queue that the active replica keeper consumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interfaces:
    """The interfaces through which the facts are observed. An interface is None if it is not available."""

    session: Session
    management: Management | None
    tools: BrokerTools | None
    redis: RedisConnection | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The virtual host, user and queues to observe, and popgate's own settings.

    ``named`` contains the names of queues that an administrator plans to adopt. ``known`` contains the queues of
    popgate's catalog. If the catalog could not be read, ``unseen`` contains the reason.
    """

    vhost: str
    user: str
    consumer_timeout_seconds: float
    has_keeper: bool
    named: Sequence[str] = ()
    known: Sequence[CatalogQueue] = ()
    unseen: Sequence[Unseen] = ()


@dataclass(slots=True)
class _Api:
    """The answers of the management API. A field is None if the API did not answer this request."""

    queues: list[Row] | None = None
    policies: list[Row] | None = None
    operator_policies: list[Row] | None = None
    flags: list[Row] | None = None
    exchanges: list[Row] | None = None
    permissions: Row | None = None
    configuration: str | None = None
    clock: ClockSkew | None = None
    unseen: list[Unseen] = field(default_factory=list[Unseen])


async def observe(interfaces: Interfaces, scope: Scope) -> Facts:
    """Observe each fact once, and return all facts. Raises: BrokerUnavailable, StateUnavailable."""
    api = await _ask_api(interfaces, scope)
    tools, no_tools = await _ask_tools(interfaces, scope.vhost)
    unseen = [*scope.unseen, *api.unseen]
    queues, refused = await _queues(interfaces.session, api, scope)
    settings = None if api.configuration is None else node_settings(api.configuration)
    settings = settings or (None if tools is None else tools.settings)
    version = interfaces.session.server_version
    unseen += _unseen_settings(settings, tools, no_tools)
    redis: RedisFacts | None = None
    clocks = [] if api.clock is None else [api.clock]
    if interfaces.redis is not None:
        redis, clock = await redis_facts(interfaces.redis)
        clocks.append(clock)
        if redis.settings is None:
            why = "Redis does not let this user see it (CONFIG GET)"
            unseen.append(Unseen(what="persistence and eviction of Redis", why=why, flag="--redis-url"))
    refusals = [*await find_refusals(interfaces.session), *refused]
    if api.permissions is None and any(queue.owner is Owner.ADOPTED for queue in queues):
        why = "trying it would take a message"
        unseen.append(Unseen(what="whether the user may read the adopted queues", why=why, flag=API_FLAG))
    keeper = scope.has_keeper or await consumer_count(interfaces.session, KEEPER_QUEUE) > 0
    return Facts(
        vhost=scope.vhost,
        user=scope.user,
        version=version,
        queues=tuple(queues),
        named=frozenset(scope.named),
        policies=None if api.policies is None else broker_policies(api.policies),
        operator_policies=None if api.operator_policies is None else broker_policies(api.operator_policies),
        disabled_flags=None if api.flags is None else disabled_flags(api.flags),
        auto_delete_exchanges=None if api.exchanges is None else auto_delete_exchanges(api.exchanges),
        permissions=permissions_of(api.permissions),
        refusals=tuple(refusals),
        consumer_timeout_seconds=scope.consumer_timeout_seconds,
        broker_consumer_timeout_ms=None if settings is None else settings.consumer_timeout_ms,
        reconciles_membership=_reconciles(version, settings),
        has_keeper=keeper,
        machine_versions=None if tools is None else tools.machines,
        clocks=tuple(clocks),
        redis=redis,
        unseen=tuple(unseen),
    )


def _reconciles(version: Version, settings: NodeSettings | None) -> bool | None:
    if version < RECONCILES_FROM:
        return False
    return None if settings is None else settings.reconciles_membership


def _unseen_settings(settings: NodeSettings | None, tools: ToolFacts | None, no_tools: str) -> list[Unseen]:
    unseen: list[Unseen] = []
    if settings is None:
        what = "RabbitMQ's consumer_timeout and its continuous membership reconciliation"
        why = f"the management API shows it from RabbitMQ 3.13 on, to administrators; {no_tools}"
        unseen.append(Unseen(what=what, why=why, flag=f"{API_FLAG} or {TOOLS_FLAG}"))
    if tools is None:
        what = "the versions of the quorum queues' state machines"
        unseen.append(Unseen(what=what, why=f"only RabbitMQ's tools show it; {no_tools}", flag=TOOLS_FLAG))
    return unseen


# -- the management API and the tools ----------------------------------------------------------------------------------


async def _ask_api(interfaces: Interfaces, scope: Scope) -> _Api:
    api = _Api()

    async def asked(what: str, call: Awaitable[T]) -> T | None:
        try:
            return await call
        except BrokerUnavailable as error:
            api.unseen.append(Unseen(what=what, why=error.detail, flag=API_FLAG))
            return None

    what = "policies, feature flags, exchanges, permissions by name, the clock, and queues that no catalog names"
    management = interfaces.management
    if management is None:
        api.unseen.append(Unseen(what=what, why=NO_API, flag=API_FLAG))
        return api
    overview = await asked(what, management.overview())
    if overview is None:
        return api
    cluster = str(overview.get("cluster_name") or "")
    if interfaces.session.cluster_name and cluster and cluster != interfaces.session.cluster_name:
        why = f"the management API belongs to another cluster, {cluster!r} and not {interfaces.session.cluster_name!r}"
        api.unseen.append(Unseen(what=what, why=why, flag=API_FLAG))
        return api
    api.queues = await asked("queues that no catalog names", management.queues())
    api.policies = await asked("policies", management.policies())
    api.operator_policies = await asked("operator policies", management.operator_policies())
    api.flags = await asked("feature flags", management.feature_flags())
    api.exchanges = await asked("exchanges", management.exchanges())
    api.permissions = await asked("permissions by name", management.permissions(scope.user))
    try:  # the tools can show the configuration, too: ``_unseen_settings`` reports if neither interface shows it
        api.configuration = await management.effective_configuration()
    except BrokerUnavailable:
        api.configuration = None
    api.clock = await asked("the clock of RabbitMQ", api_clock(management, "RabbitMQ"))
    return api


async def _ask_tools(interfaces: Interfaces, vhost: str) -> tuple[ToolFacts | None, str]:
    """Return the facts that the command line tools show, or None and the reason why they show nothing."""
    if interfaces.tools is None:
        return None, NO_TOOLS
    try:
        told = await tool_facts(interfaces.tools, vhost)
    except (BrokerUnavailable, ReplicaRefused) as error:
        return None, error.detail
    if interfaces.session.cluster_name and told.cluster and told.cluster != interfaces.session.cluster_name:
        return None, f"rabbitmqctl leads to another cluster, {told.cluster!r}"
    return told, ""


# -- queues ------------------------------------------------------------------------------------------------------------


async def _queues(session: Session, api: _Api, scope: Scope) -> tuple[list[Queue], list[Refusal]]:
    """Return popgate's own and the adopted queues, and a Refusal for each queue that this user may not inspect."""
    owners = {one.name: one.owner for one in scope.known} | dict.fromkeys(scope.named, Owner.ADOPTED)
    rows = {str(row.get("name")): row for row in api.queues or ()}
    # popgate's exclusive queues exist only temporarily, so ``_expected`` returns one queue that represents them.
    owners |= {
        name: Owner.POPGATE for name, row in rows.items() if name.startswith(OWN_PREFIX) and kind_of(row) != "classic"
    }
    found: list[Queue] = _expected()
    refused: list[Refusal] = []
    for name, owner in sorted(owners.items()):
        row = rows.get(name)
        if row is not None and owner is Owner.POPGATE:
            found.append(_of_row(name, owner, row))
            continue
        seen = await inspect_queue(session, name, owner)
        if isinstance(seen, Refusal):
            refused.append(seen)
        if row is not None:
            found.append(_of_row(name, owner, row))
        elif isinstance(seen, Queue) and (seen.exists or owner is Owner.ADOPTED):  # popgate declares its own if missing
            found.append(seen)
    return found, refused


def _expected() -> list[Queue]:
    """Return one queue of each kind that popgate declares: a message queue, a delay queue and an exclusive queue."""
    return [
        own_queue(OWN_EXAMPLE),
        Queue(name=level_name(0), owner=Owner.POPGATE, is_expected=True),
        Queue(name=f"{GUARD}:0", owner=Owner.POPGATE, is_expected=True, kind="classic"),
    ]


def own_queue(name: str) -> Queue:
    """Return a message queue named ``name``, with the arguments with which popgate declares its own message queues."""
    arguments = {
        QUEUE_TYPE: "quorum",
        DELIVERY_LIMIT: DELIVERY_LIMIT_UNREACHABLE,
        DISCONNECTED_TIMEOUT: DISCONNECTED_MILLISECONDS,
        SINGLE_ACTIVE: True,
    }
    return Queue(name=name, owner=Owner.POPGATE, is_expected=True, arguments=arguments)


def _of_row(name: str, owner: Owner, row: Row) -> Queue:
    return Queue(name=name, owner=owner, kind=kind_of(row), arguments=dict(as_object(row.get("arguments"))))
