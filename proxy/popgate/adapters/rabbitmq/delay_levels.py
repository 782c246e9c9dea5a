"""Implements delayed publishes on RabbitMQ without a plugin: each bit of a delay has a queue.

Theory of operation. Level n is a topic exchange and a quorum queue. Messages in the queue expire after 2^n seconds and
are then dead-lettered, at least once, to the exchange of the level below. The exchange of each level checks the level's
bit in the routing key. If the bit is 1, the message waits in the level's queue. If the bit is 0, the message continues
to the next exchange at once. All messages of a queue wait for the same time. So the message at the head expires first,
and a long delay does not block a short one. A message enters at the level of the highest bit of its delay that is 1. It
always waits at that level, so it is published to the level's entrance ``in``, a fanout exchange. The topic exchange
would compare the key with its patterns, which costs RabbitMQ more than half of a publish on 3.10, and a third on 4.3.

    publish, 5 s = 101b             4 s             0         1 s
    -------------------> (in:2) --> [2] --dead--> (1) ----> (0) --> [0] --dead--> (deliver) --> queues of the groups
                                                                                     |
                                                                                     +--alternate--> [unclaimed]

The last exchange has a binding for each queue of each group. So a message reaches the groups that exist when the
message becomes visible. ``unclaimed`` discards messages for which no group exists: at-least-once dead-lettering would
retry them for ever, and a few of them would block the level. If the exchange of a level is missing, in contrast,
RabbitMQ's retries are useful: the messages in the level above continue when the exchange is declared again.

An adopted queue must stay unchanged, so it has no binding. Instead it has a relay, which is a queue of popgate in which
no message stays. The relay dead-letters messages to the adopted queue through the default exchange, also at least once.

The first delayed publish on a new connection declares the levels from the lowest up to the highest that it needs, and
the relays. These declarations are repeated every ``DECLARED_AGAIN_SECONDS``.
"""

import asyncio
import time
from collections.abc import Collection
from typing import NamedTuple

from aiormq.abc import AbstractChannel

from popgate.adapters.rabbitmq.delay_key import level_milliseconds, passes_pattern, place_pattern, waits_pattern
from popgate.adapters.rabbitmq.queue_shape import QUEUE_TYPE, Argument
from popgate.adapters.rabbitmq.session import ChannelRefusedError, Session
from popgate.domain.errors import Conflict
from popgate.domain.names import BrokerQueue, TopicName

DELIVER_EXCHANGE = "popgate:delay:deliver"
UNCLAIMED = "popgate:delay:unclaimed"
DECLARED_AGAIN_SECONDS = 60.0
"""Seconds after which a delayed publish declares its levels again, in case a level was deleted."""


def level_name(level: int) -> str:
    """Return the name of the level's exchange. The level's queue has the same name."""
    return f"popgate:delay:{level}"


def entrance_name(level: int) -> str:
    """Return the name of the exchange to which messages that enter at the level are published."""
    return f"popgate:delay:in:{level}"


def relay_name(topic: TopicName, index: int) -> str:
    """Return the name of the queue that passes delayed messages on to an adopted queue."""
    return f"popgate:delay:to:{topic}:{index}"


class Relay(NamedTuple):
    """The route of delayed messages to ``queue``, which is the adopted queue number ``number`` of ``topic``."""

    topic: TopicName
    number: int
    queue: BrokerQueue


class DelayLevels:
    """The levels and relays that one session has declared on the broker."""

    def __init__(self) -> None:
        self._declaring = asyncio.Lock()  # one caller declares for all callers that wait
        self._session: Session | None = None
        self._declared = 0
        """All levels below this number exist."""
        self._relays: set[Relay] = set()
        self._until = 0.0

    async def ensure(self, session: Session, level: int, relays: Collection[Relay]) -> None:
        """Declare ``level``, all levels below it, and the ``relays``, except those that were declared a short time ago.

        Raises: Conflict if an exchange or a queue with other properties has one of the names; BrokerUnavailable.
        """
        async with self._declaring:
            if self._session is not session or time.monotonic() >= self._until:
                self._session = session
                self.forget()
            if level < self._declared and self._relays.issuperset(relays):
                return
            channel = await session.open_channel()
            try:
                if not self._declared:
                    await declare_delivery(session, channel)
                    self._until = time.monotonic() + DECLARED_AGAIN_SECONDS
                for each in range(self._declared, level + 1):
                    await _declare_level(session, channel, each)
                    self._declared = each + 1
                for relay in set(relays) - self._relays:
                    await _declare_relay(session, channel, relay)
                    self._relays.add(relay)
            except ChannelRefusedError as error:
                raise Conflict(f"RabbitMQ refuses the queues and exchanges that delays need: {error}") from error
            finally:
                await session.close_channel(channel)

    def forget(self) -> None:
        """Forget the declared levels and relays, because some may be missing. ``ensure`` then declares them again."""
        self._declared = 0
        self._relays.clear()


async def declare_delivery(session: Session, channel: AbstractChannel) -> None:
    """Declare the exchange that routes to the groups' queues, and the exchange and the queue ``unclaimed``.

    Raises: ChannelRefusedError, BrokerUnavailable.
    """
    await session.call(channel.exchange_declare(UNCLAIMED, exchange_type="fanout", durable=True))
    discarding: dict[str, Argument] = {QUEUE_TYPE: "quorum", "x-message-ttl": 0}
    await session.call(channel.queue_declare(UNCLAIMED, durable=True, arguments=dict(discarding)))
    await session.call(channel.queue_bind(UNCLAIMED, UNCLAIMED))
    await session.call(
        channel.exchange_declare(
            DELIVER_EXCHANGE, exchange_type="topic", durable=True, arguments={"alternate-exchange": UNCLAIMED}
        )
    )


async def _declare_relay(session: Session, channel: AbstractChannel, relay: Relay) -> None:
    topic, index, queue = relay
    name = relay_name(topic, index)
    arguments = {**_expiring(0, exchange=""), "x-dead-letter-routing-key": queue}
    await session.call(channel.queue_declare(name, durable=True, arguments=dict(arguments)))
    await session.call(channel.queue_bind(name, DELIVER_EXCHANGE, place_pattern(topic, index)))


async def _declare_level(session: Session, channel: AbstractChannel, level: int) -> None:
    name, below = level_name(level), level_name(level - 1) if level else DELIVER_EXCHANGE
    arguments = _expiring(level_milliseconds(level), exchange=below)
    await session.call(channel.exchange_declare(name, exchange_type="topic", durable=True))
    await session.call(channel.queue_declare(name, durable=True, arguments=dict(arguments)))
    await session.call(channel.queue_bind(name, name, waits_pattern(level)))
    await session.call(channel.exchange_bind(below, name, passes_pattern(level)))
    entrance = entrance_name(level)
    await session.call(channel.exchange_declare(entrance, exchange_type="fanout", durable=True))
    await session.call(channel.queue_bind(name, entrance))


def _expiring(milliseconds: int, *, exchange: str) -> dict[str, Argument]:
    """Return the arguments of a queue whose messages are dead-lettered to ``exchange`` after ``milliseconds``."""
    return {
        QUEUE_TYPE: "quorum",
        "x-message-ttl": milliseconds,
        "x-dead-letter-exchange": exchange,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",  # otherwise at-least-once would silently become at-most-once
    }
