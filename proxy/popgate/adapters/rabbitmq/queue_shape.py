"""Finds out the type and arguments of a queue over AMQP alone, without changing the queue.

AMQP has no call that returns a queue's arguments. But if a declaration contradicts an existing queue, RabbitMQ answers
with 406 and reports one argument that differs, with its present value: `inequivalent arg 'x-queue-type' for queue ...
but current is 'quorum'`. So a contradicting declaration is repeated until RabbitMQ reports the wanted argument. Before
each repetition, the argument that RabbitMQ reported last is corrected. Every one of these declarations contains an
argument with which no queue can be created (an unknown type, or an argument that the type does not have). So if the
queue is deleted in the meantime, no declaration creates it by accident. The method was developed on RabbitMQ 3.10. If
the text of an answer has an unknown form, the queue's kind is reported as "unknown".
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from popgate.adapters.rabbitmq.channel_parser import CloseReason
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
"""An argument that RabbitMQ does not compare for an existing quorum queue, but with which it refuses to create one."""
PROBES_MAX = 24

_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .* but current is "
    r"(?:(?P<none>none)|(?:the value )?'(?P<value>.*?)'(?: of type '(?P<type>\w+)')?)$",
    re.DOTALL,
)
_INTEGER_TYPES = frozenset({"signedint", "long", "short", "byte", "unsignedint", "unsignedshort", "unsignedbyte"})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShape:
    """The type and arguments of a queue. A policy, which may also set a delivery limit, can't be seen over AMQP."""

    kind: str
    durable: bool = True
    auto_delete: bool = False
    single_active: bool = False
    expires: bool = False
    delivery_limit: int | None = None
    disconnected_milliseconds: int | None = None
    """Milliseconds that the queue waits for a consumer whose node is lost, or None for RabbitMQ's default."""


async def queue_shape(session: Session, queue: BrokerQueue) -> QueueShape | None:
    """Find out the shape of a queue, or return None if it does not exist. Raises: Conflict, BrokerUnavailable."""
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
    """The queue does not exist, or was deleted during the inspection."""


class _NotUnderstoodError(Exception):
    """The broker's answer has a form that popgate does not recognize."""


class _Declare:
    """A declaration of a queue. After each answer of the broker, it matches the queue's arguments more closely."""

    def __init__(self, queue: BrokerQueue) -> None:
        self.queue = queue
        self.durable = True
        self.auto_delete = False
        self.arguments: dict[str, Argument] = {}

    async def find(self, session: Session, wanted: str) -> Argument | None:
        """Return the queue's value of the argument `wanted`, or None if the queue does not have this argument.

        The value of `wanted` in this declaration must differ from the queue's value.
        """
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
        """Set the argument `name` of this declaration to the queue's value, so that RabbitMQ no longer reports it."""
        if value is None:
            self.arguments.pop(name, None)
        else:
            self.arguments[name] = value

    async def _refusal(self, session: Session) -> str:
        """Send this declaration. Return the text with which the broker refuses it, or "" if the broker accepts it."""
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
    """Return whether `reason` means that the queue does not exist.

    The reply code "not found" is not sufficient, because it may also mean that a classic queue's node is down.
    """
    return reason.code == NOT_FOUND and "no queue" in reason.text


def queue_refused(queue: BrokerQueue, error: ChannelRefusedError) -> Conflict | BrokerUnavailable:
    """Return the error to raise when RabbitMQ refuses a call that concerns `queue`. The queue exists."""
    code, text = error.reason
    if code == RESOURCE_LOCKED:
        return Conflict(f"queue {queue!r} is exclusive to another connection: {text}")
    if code in {NOT_FOUND, 0}:  # RabbitMQ also reports "not found" for a classic queue whose node is down
        return BrokerUnavailable(f"queue {queue!r} is not available: {text}")
    return Conflict(f"RabbitMQ refuses queue {queue!r}: {text}")


def _integer(value: Argument | None) -> int | None:
    """Return `value` as an integer, or None if it is not an integer.

    An integer may be given as text, because RabbitMQ does not report the type of a value if the declaration has a value
    of the same type.
    """
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
