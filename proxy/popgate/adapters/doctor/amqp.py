"""Reads facts about RabbitMQ over AMQP alone: arguments and consumers of named queues, and the user's permissions."""

import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from aiormq.abc import AbstractChannel

from popgate.adapters.rabbitmq.queue_shape import DELIVERY_LIMIT, SINGLE_ACTIVE, queue_shape
from popgate.adapters.rabbitmq.session import ACCESS_REFUSED, ChannelRefusedError, Session
from popgate.adapters.rabbitmq.versions import DISCONNECTED_TIMEOUT
from popgate.doctor.facts import Owner, Queue, Refusal
from popgate.doctor.permission_rules import DEFAULT_EXCHANGE
from popgate.domain.errors import Conflict
from popgate.domain.names import BrokerQueue

_Step = Callable[[AbstractChannel], Coroutine[Any, Any, object]]


async def inspect_queue(session: Session, name: str, owner: Owner) -> Queue | Refusal | None:
    """Return what AMQP shows of the queue ``name``, or a Refusal if this user may not inspect the queue.

    If the queue does not exist, the result has ``exists=False``. Return None if the queue can't be inspected for
    another reason, for example because it is exclusive to another connection.

    Raises: BrokerUnavailable.
    """
    try:
        shape = await queue_shape(session, BrokerQueue(name))
    except Conflict as error:
        cause = error.__cause__
        is_forbidden = isinstance(cause, ChannelRefusedError) and cause.reason.code == ACCESS_REFUSED
        return Refusal(kind="configure", name=name) if is_forbidden else None
    if shape is None:
        return Queue(name=name, owner=owner, exists=False)
    arguments: dict[str, object] = {SINGLE_ACTIVE: shape.single_active}
    if shape.delivery_limit is not None:
        arguments[DELIVERY_LIMIT] = shape.delivery_limit
    if shape.disconnected_milliseconds is not None:
        arguments[DISCONNECTED_TIMEOUT] = shape.disconnected_milliseconds
    return Queue(name=name, owner=owner, kind=shape.kind, arguments=arguments)


async def find_refusals(session: Session) -> list[Refusal]:
    """Try the operations that popgate needs, and return those that RabbitMQ does not permit to this user.

    The operations use a queue and an exchange that this function creates and deletes.

    Raises: BrokerUnavailable.
    """
    name = f"popgate:doctor:{secrets.token_hex(6)}"
    steps: list[tuple[str, str, _Step]] = [
        ("configure", name, lambda channel: channel.queue_declare(name, exclusive=True)),
        ("configure", name, lambda channel: channel.exchange_declare(name, exchange_type="fanout")),
        ("read", name, lambda channel: channel.queue_purge(name)),
        ("write", name, lambda channel: channel.basic_publish(b"", exchange=name)),
        # The queue does not exist, so RabbitMQ confirms the message and drops it.
        ("write", DEFAULT_EXCHANGE, lambda channel: channel.basic_publish(b"", routing_key=f"{name}:none")),
    ]
    found = [Refusal(kind=kind, name=what) for kind, what, step in steps if not await _may(session, step)]
    await _may(session, lambda channel: channel.exchange_delete(name))
    await _may(session, lambda channel: channel.queue_delete(name))
    return list(dict.fromkeys(found))


async def consumer_count(session: Session, queue: str) -> int:
    """Return the number of consumers of ``queue``.

    Return 0 if the queue does not exist, or if this user may not inspect it.

    Raises: BrokerUnavailable.
    """
    channel = await session.open_channel()
    try:
        answer = await session.call(channel.queue_declare(queue, passive=True))
    except ChannelRefusedError:
        return 0
    finally:
        await session.close_channel(channel)
    return answer.consumer_count or 0


async def _may(session: Session, step: _Step) -> bool:
    """Run ``step``, and return False if this user lacks the permission. Return True after any other refusal."""
    channel = await session.open_channel(confirms=True)
    try:
        await session.call(step(channel))
    except ChannelRefusedError as error:
        return error.reason.code != ACCESS_REFUSED
    finally:
        await session.close_channel(channel)
    return True
