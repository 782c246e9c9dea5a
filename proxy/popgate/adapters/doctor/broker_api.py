"""Reads facts for the doctor from RabbitMQ's management API and its command line tools."""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.reading import Row, as_list, as_object
from popgate.adapters.replicas.tools import BrokerTools
from popgate.doctor.facts import BrokerPolicy, ClockSkew, MachineVersion, Permissions
from popgate.domain.errors import BrokerUnavailable

CLOCK_RESOLUTION_SECONDS = 1.0
"""Resolution of HTTP's Date header in seconds."""
STABLE = frozenset({"stable", "required"})
KIND_OF = {"rabbit_quorum_queue": "quorum", "rabbit_classic_queue": "classic", "rabbit_stream_queue": "stream"}
_TIMEOUT = re.compile(r"\{consumer_timeout,(\w+)\}")
_RECONCILES = re.compile(r"\{quorum_membership_reconciliation_enabled,true\}")
_LOOK = (
    "#{{cluster => rabbit_nodes:cluster_name(), newest => rabbit_fifo:version(), "
    "consumer_timeout => application:get_env(rabbit, consumer_timeout, undefined), "
    "reconciles => application:get_env(rabbit, quorum_membership_reconciliation_enabled, false), "
    "queues => [begin {{resource, _, queue, Name}} = amqqueue:get_name(Queue), "
    "#{{name => Name, running => case catch ra:member_overview(amqqueue:get_pid(Queue)) of "
    "{{ok, #{{effective_machine_version := Running}}, _}} -> Running; _ -> none end}} end "
    "|| Queue <- rabbit_amqqueue:list(<<{vhost}>>), amqqueue:get_type(Queue) =:= rabbit_quorum_queue]}}."
)
"""An Erlang expression that reads facts that the management API does not show. It works on 3.10.8, 4.0.5 and 4.3.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of a RabbitMQ node that affect popgate.

    ``consumer_timeout_ms`` is 0 if the timeout is disabled, and None if the node's configuration does not contain it.
    """

    consumer_timeout_ms: int | None
    reconciles_membership: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    cluster: str
    settings: NodeSettings
    machines: tuple[MachineVersion, ...]


def broker_policies(rows: Iterable[Row]) -> tuple[BrokerPolicy, ...]:
    return tuple(
        BrokerPolicy(
            name=str(row.get("name")),
            pattern=str(row.get("pattern", "")),
            definition=dict(as_object(row.get("definition"))),
            priority=priority if isinstance(priority := row.get("priority"), int) else 0,
            apply_to=str(row.get("apply-to", "all")),
        )
        for row in rows
    )


def disabled_flags(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the disabled feature flags that RabbitMQ's next release may need. Experimental flags are not included."""
    return tuple(
        sorted(str(row.get("name")) for row in rows if row.get("state") != "enabled" and row.get("stability") in STABLE)
    )


def auto_delete_exchanges(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(sorted(str(row.get("name")) for row in rows if row.get("auto_delete") is True))


def permissions_of(row: Row | None) -> Permissions | None:
    if row is None or not all(isinstance(row.get(kind), str) for kind in ("configure", "write", "read")):
        return None
    return Permissions(configure=row["configure"], write=row["write"], read=row["read"])


def kind_of(row: Row) -> str:
    kind = str(row.get("type"))
    return KIND_OF.get(kind, kind)


def node_settings(configuration: str) -> NodeSettings:
    """Read a node's settings from its effective configuration, a text that consists of Erlang terms."""
    found = _TIMEOUT.search(configuration)
    return NodeSettings(
        consumer_timeout_ms=None if found is None else _milliseconds(found[1]),
        reconciles_membership=_RECONCILES.search(configuration) is not None,
    )


async def api_clock(management: Management, place: str) -> ClockSkew | None:
    """Compare RabbitMQ's clock, which the Date header of the management API shows, with this machine's clock.

    Return None if the header is missing or invalid.

    Raises: BrokerUnavailable.
    """
    before = time.time()
    date = await management.date()
    after = time.time()
    try:
        shown = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    return ClockSkew(place=place, seconds=skew_seconds(before, after, shown, shown + CLOCK_RESOLUTION_SECONDS))


def skew_seconds(before: float, after: float, earliest: float, latest: float) -> float:
    """Return the smallest number of seconds by which another clock may differ from this machine's clock.

    The result is positive if the other clock is ahead, negative if it is behind, and 0 if no difference is certain.

    The other clock was read between the times ``before`` and ``after`` of this machine's clock. It showed a time
    between ``earliest`` and ``latest``.
    """
    if earliest > after:
        return earliest - after
    return min(0.0, latest - before)


async def tool_facts(tools: BrokerTools, vhost: str) -> ToolFacts:
    """Return the facts that RabbitMQ's command line tools show. Raises: BrokerUnavailable, ReplicaRefused."""
    expression = _LOOK.format(vhost=",".join(str(byte) for byte in vhost.encode()))
    told = as_object(await tools.run_json("rabbitmqctl", "eval", expression))
    value = as_object(told.get("value"))
    if "newest" not in value:
        raise BrokerUnavailable(f"rabbitmqctl eval did not answer as expected: {str(told)[:200]}")
    return ToolFacts(
        cluster=str(value.get("cluster") or ""),
        settings=NodeSettings(
            consumer_timeout_ms=_milliseconds(value.get("consumer_timeout")),
            reconciles_membership=value.get("reconciles") is True,
        ),
        machines=tuple(_machines(value)),
    )


def _machines(value: Mapping[str, Any]) -> Iterable[MachineVersion]:
    newest = value.get("newest")
    for row in map(as_object, as_list(value.get("queues"))):
        running = row.get("running")
        if isinstance(running, int) and isinstance(newest, int):
            yield MachineVersion(queue=str(row.get("name")), running=running, newest=newest)


def _milliseconds(value: object) -> int:
    """Return a timeout setting in milliseconds, or 0 if ``value`` is not a number, which disables the timeout."""
    return int(str(value)) if str(value).isdecimal() else 0
