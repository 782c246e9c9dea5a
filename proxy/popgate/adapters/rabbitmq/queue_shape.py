"""What kind of queue stands on the broker, found out over AMQP alone and without touching it.

AMQP has no question for it. But RabbitMQ answers a declare that contradicts an existing queue with 406 and the argument
that differs, its present value included: `inequivalent arg 'x-queue-type' for queue ... but current is 'quorum'`. So a
contradicting declare is repeated, each time corrected by one answer, until the argument in question is the one that is
reported. Every one of these declares carries an argument with which no queue can be created (an unknown type; one that
the type does not have), so a queue that vanishes in between is not made by accident. Found out on 3.10; an answer that
is not understood gives the kind "unknown".
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from popgate.adapters.rabbitmq.fast_lane import CloseReason
from popgate.adapters.rabbitmq.session import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    RESOURCE_LOCKED,
    ChannelRefusedError,
    Session,
)
from popgate.adapters.rabbitmq.versions import DISCONNECTED_TIMEOUT, waits_for_lost_nodes
from popgate.domain.errors import BrokerUnavailable, Conflict
from popgate.domain.names import BrokerQueue

Argument: TypeAlias = str | int | float | bool

QUEUE_TYPE, DELIVERY_LIMIT, SINGLE_ACTIVE = "x-queue-type", "x-delivery-limit", "x-single-active-consumer"
PROBE_VALUE = "popgate-probe"
STREAM_ONLY = {"x-max-age": "1s"}
"""Not compared for an existing quorum queue, and refused when one is to be created."""
PROBES_MAX = 24

_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .* but current is "
    r"(?:(?P<none>none)|(?:the value )?'(?P<value>.*?)'(?: of type '(?P<type>\w+)')?)$",
    re.DOTALL,
)
_INTEGER_TYPES = frozenset({"signedint", "long", "short", "byte", "unsignedint", "unsignedshort", "unsignedbyte"})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShape:
    """`delivery_limit` and the like are the queue's arguments; a policy can't be seen over AMQP."""

    kind: str
    durable: bool = True
    auto_delete: bool = False
    single_active: bool = False
    expires: bool = False
    delivery_limit: int | None = None
    disconnected_milliseconds: int | None = None
    """How long it waits for a lost node; None: for RabbitMQ's default."""


async def queue_shape(session: Session, queue: BrokerQueue) -> QueueShape | None:
    """Find out, or return None when there is no such queue. Raises: Conflict, BrokerUnavailable."""
    declare = _Declare(queue)
    limit: int | None = None
    disconnected: int | None = None
    try:
        declare.arguments[QUEUE_TYPE] = PROBE_VALUE
        kind = str(await declare.find(session, QUEUE_TYPE) or "classic")
        if kind == "quorum":
            declare.arguments |= {QUEUE_TYPE: kind, DELIVERY_LIMIT: PROBE_VALUE, **STREAM_ONLY}
            limit = _integer(await declare.find(session, DELIVERY_LIMIT))
            if waits_for_lost_nodes(session.server_version):
                declare.know(DELIVERY_LIMIT, limit)
                declare.arguments[DISCONNECTED_TIMEOUT] = PROBE_VALUE
                disconnected = _integer(await declare.find(session, DISCONNECTED_TIMEOUT))
    except _VanishedError:
        return None
    except _NotUnderstoodError:
        kind = "unknown"
    return QueueShape(
        kind=kind,
        durable=declare.durable,
        auto_delete=declare.auto_delete,
        single_active=declare.arguments.get(SINGLE_ACTIVE) is True,
        expires="x-expires" in declare.arguments,
        delivery_limit=limit,
        disconnected_milliseconds=disconnected,
    )


class _VanishedError(Exception):
    """There is no such queue (any more)."""


class _NotUnderstoodError(Exception):
    """The broker answered something else than the versions that this was tried on."""


class _Declare:
    """The declare that comes closer with each answer."""

    def __init__(self, queue: BrokerQueue) -> None:
        self.queue = queue
        self.durable = True
        self.auto_delete = False
        self.arguments: dict[str, Argument] = {}

    async def find(self, session: Session, wanted: str) -> Argument | None:
        """The present value of argument `wanted`, which this declare contradicts; None where it is not set."""
        for _ in range(PROBES_MAX):
            text = await self._refusal(session)
            if "invalid arg" in text or "no queue" in text:
                raise _VanishedError
            found = _DIFFERS.search(text)
            if found is None:
                break
            name, value = found["name"], _argument(found)
            if name == wanted:
                return value
            if name == "durable":
                self.durable = value in {True, "true"}
            elif name == "auto_delete":
                self.auto_delete = value in {True, "true"}
            else:
                self.know(name, value)
        raise _NotUnderstoodError

    def know(self, name: str, value: Argument | None) -> None:
        """Contradict the queue in this argument no longer."""
        if value is None:
            self.arguments.pop(name, None)
        else:
            self.arguments[name] = value

    async def _refusal(self, session: Session) -> str:
        """The broker's words against this declare, or "" where it had none."""
        channel = await session.open_channel()
        try:
            await session.call(
                channel.queue_declare(
                    self.queue, durable=self.durable, auto_delete=self.auto_delete, arguments=dict(self.arguments)
                )
            )
        except ChannelRefusedError as error:
            if error.reason.code in {NOT_FOUND, PRECONDITION_FAILED}:
                return error.reason.text
            raise queue_refused(self.queue, error) from error
        finally:
            await session.close_channel(channel)
        return ""


def is_gone(reason: CloseReason) -> bool:
    """Whether the broker says that a queue does not exist; "not found" alone may be a classic one's node being down."""
    return reason.code == NOT_FOUND and "no queue" in reason.text


def queue_refused(queue: BrokerQueue, error: ChannelRefusedError) -> Conflict | BrokerUnavailable:
    """What it means that the broker refuses a look at `queue`, for other reasons than that it does not exist."""
    code, text = error.reason
    if code == RESOURCE_LOCKED:
        return Conflict(f"queue {queue!r} is exclusive to another connection: {text}")
    if code in {NOT_FOUND, 0}:  # a classic queue whose node is down is "not found", too
        return BrokerUnavailable(f"queue {queue!r} is not available: {text}")
    return Conflict(f"RabbitMQ refuses queue {queue!r}: {text}")


def _integer(value: Argument | None) -> int | None:
    """Where both sides have a value RabbitMQ shows them without their types."""
    return int(str(value)) if re.fullmatch(r"-?\d+", str(value)) else None


def _argument(found: re.Match[str]) -> Argument | None:
    if found["none"]:
        return None
    value: str = found["value"]
    if found["type"] == "bool":
        return value == "true"
    if found["type"] in _INTEGER_TYPES:
        return int(value)
    if found["type"] in {"double", "float"}:
        return float(value)
    return value
