"""Finds out over AMQP, without changing a queue, which type it has and whether it has a single active consumer.

AMQP has no call for this. But RabbitMQ rejects a declare that contradicts an existing queue with 406, and names the
argument that differs and its current value. So the declare is repeated, corrected with each answer, until the argument
in question differs. Each declare has a value with which no queue can be created. The twin of
``popgate.adapters.rabbitmq.queue_shape``, which also looks at delivery limits.
"""

import re
from typing import NamedTuple, TypeAlias

from popgate_client.amqp.session import NOT_FOUND, PRECONDITION_FAILED, ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable, Conflict

Argument: TypeAlias = str | int | bool

QUEUE_TYPE, SINGLE_ACTIVE = "x-queue-type", "x-single-active-consumer"
PROBE = "popgate-probe"
PROBES_MAX = 24
_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .* but current is "
    r"(?:(?P<none>none)|(?:the value )?'(?P<value>.*?)'(?: of type '(?P<type>\w+)')?)$",
    re.DOTALL,
)


class QueueKind(NamedTuple):
    """The kind of a queue. `type` is "classic", "quorum", "stream" and so on."""

    type: str
    is_single_active: bool


async def queue_kind(session: Session, queue: str) -> QueueKind | None:
    """Return the kind of a queue, or None if there is no such queue. Raises: Conflict, BrokerUnavailable."""
    known: dict[str, Argument] = {QUEUE_TYPE: PROBE}
    type_ = ""
    for _ in range(PROBES_MAX):
        refusal = await _refusal(session, queue, known)
        found = _DIFFERS.search(refusal)
        if found is None:
            if "no queue" in refusal or "invalid arg" in refusal:
                return None
            break
        name, value = found["name"], _value(found)
        if name == QUEUE_TYPE and not type_:
            type_ = str(value or "classic")
            known |= {QUEUE_TYPE: type_, SINGLE_ACTIVE: PROBE}
        elif name == SINGLE_ACTIVE and type_:
            return QueueKind(type_, value is True)
        elif value is None:
            known.pop(name, None)
        else:
            known[name] = value
    raise Conflict("conflict", f"RabbitMQ did not report whether queue {queue!r} has a single active consumer")


async def _refusal(session: Session, queue: str, known: dict[str, Argument]) -> str:
    """Declare the queue; return RabbitMQ's reason to reject it."""
    arguments = dict(known)
    durable, auto_delete = arguments.pop("durable", True), arguments.pop("auto_delete", False)
    channel = await session.open_channel()
    try:
        declare = channel.queue_declare(
            queue,
            durable=bool(durable),
            auto_delete=bool(auto_delete),
            arguments={name: value for name, value in arguments.items()},  # noqa: C416  # of the declared type
        )
        await session.call(declare)
    except ChannelRefused as error:
        if error.code in (NOT_FOUND, PRECONDITION_FAILED):
            return error.text
        raise Conflict("conflict", f"queue {queue!r} can't be inspected: {error}") from error
    finally:
        await session.close_channel(channel)
    raise BrokerUnavailable("broker_unavailable", f"queue {queue!r} can't be inspected")


def _value(found: re.Match[str]) -> Argument | None:
    text, kind = found["value"], found["type"]
    if found["none"] or text is None:
        return None
    if kind == "bool" or text in ("true", "false"):
        return text == "true"
    is_number = kind not in (None, "longstr", "shortstr") and re.fullmatch(r"-?\d+", text)
    return int(text) if is_number else text
