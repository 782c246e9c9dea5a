"""Lets the members of a group tell each other over RabbitMQ which places they have, without the management interface.

Each member has an exclusive queue on one exchange, bound to "all" and to its name. It sends a statement of its places
when they change, and heartbeats in between; a new member, or one that has missed a statement, asks for it. A member is
alive as long as its queue exists, which ends with the connection of its consumers. If a member misses some heartbeats,
the others check its queue: RabbitMQ returns a mandatory message if it is gone. So a suspended process stays a member as
long as RabbitMQ keeps its consumers.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from popgate_client.amqp.roster import GroupView, Roster, Spot, Statement
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.errors import BrokerUnavailable
from popgate_client.facts import FactLogger, cause_of

logger = FactLogger(__name__)

ALL = "all"
BEAT_SECONDS = 2.0
SILENT_SECONDS = 3.5
"""Seconds without a heartbeat after which a member's queue is checked; longer than the longest interval with jitter."""
GATHER_SECONDS = 1.0
"""Seconds that a new member listens before it assumes that it knows all others."""
BACKLOG_MAX = 1_000
"""Maximum backlog of messages of a suspended member; the oldest are dropped, and requested again later."""


class Presence:
    """Exchanges statements with the other members. `state` returns what to state about this member; `on_change` is
    called when something changed."""

    def __init__(
        self,
        session: Session,
        exchange: str,
        me: str,
        state: Callable[[], tuple[bool, tuple[Spot, ...]]],
        on_change: Callable[[], None],
        chance: random.Random,
    ) -> None:
        self._session = session
        self._exchange = exchange
        self._me = me
        self._state = state
        self._on_change = on_change
        self._chance = chance
        self.roster = Roster()
        self._channel: AbstractChannel | None = None
        self._due = asyncio.Event()
        self._version = 0
        self._echoed = 0
        self._said: tuple[bool, tuple[Spot, ...]] | None = None
        self._knows_all_at = 0.0
        self._heard_myself_at = 0.0
        self._to_ask: set[str] = set()
        self._to_answer: set[str] = set()

    # ------------------------------------------------------------ what is known

    @property
    def is_complete(self) -> bool:
        """Whether all others are known, as far as possible, and have this member's latest statement."""
        is_open = self._channel is not None and not self._channel.is_closed and not self._hears_nothing()
        knows_all = asyncio.get_running_loop().time() >= self._knows_all_at
        return is_open and knows_all and self._echoed == self._version and self._said == self._state()

    def group_view(self, queues: Sequence[str]) -> GroupView:
        """Return a view for the plan."""
        return self.roster.group_view(self._statement(), queues)

    # ------------------------------------------------------------ telling

    def tell_soon(self) -> None:
        """Send a statement soon, because something has changed."""
        self._due.set()

    async def run(self) -> None:
        """Join and take part until the session or the channel ends. Raises: ChannelRefused, BrokerUnavailable."""
        channel = await self._join()
        while not self._session.lost.is_set():
            if self._hears_nothing():
                await self._session.close_channel(channel)
                raise BrokerUnavailable("broker_unavailable", "this program does not receive its own messages")
            await self._say()
            await self._look_for_silent()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS * self._chance.uniform(0.8, 1.2)):
                    await self._due.wait()
            self._due.clear()

    async def say_last(self) -> None:
        """Send the current state at once. Never raises an error of the broker."""
        if self._channel is not None and not self._channel.is_closed:
            with contextlib.suppress(ChannelRefused, BrokerUnavailable):
                await self._say()

    async def _join(self) -> AbstractChannel:
        channel = await self._session.open_channel(confirms=True)
        await self._bind(channel)
        self._knows_all_at = asyncio.get_running_loop().time() + GATHER_SECONDS
        self._channel = channel
        self._said = None
        self._heard_myself_at = asyncio.get_running_loop().time()
        self._to_ask.add(ALL)
        return channel

    async def _bind(self, channel: AbstractChannel) -> None:
        queue = f"{self._exchange}:{self._me}"
        call = self._session.call

        def end(_: object) -> None:
            """Close the channel if the queue was deleted: without it this member hears nothing and counts as gone."""
            self._session.spawn(self._session.close_channel(channel), "popgate presence lost")

        cast(Any, channel).on_consumer_cancel_callbacks.add(end)
        # Not auto-delete: RabbitMQ 4.3.6 could then not recover the virtual host (docs/rabbitmq.md).
        await call(channel.exchange_declare(self._exchange, exchange_type="direct"))
        await call(channel.queue_declare(queue, exclusive=True, arguments={"x-max-length": BACKLOG_MAX}))
        for key in (ALL, self._me):
            await call(channel.queue_bind(queue, self._exchange, key))
        await call(channel.basic_consume(queue, self._hear, no_ack=True, consumer_tag=f"popgate-presence {self._me}"))

    def _hears_nothing(self) -> bool:
        """Whether this member no longer receives its own messages: the exchange or its bindings were deleted."""
        return asyncio.get_running_loop().time() - self._heard_myself_at > SILENT_SECONDS * 2

    async def _say(self) -> None:
        state = self._state()
        if state != self._said:
            self._version += 1
            self._said = state
            await self._publish(ALL, self._stated())
        else:
            await self._publish(ALL, {"beat": self._me, "version": self._version})
        while self._to_answer:
            await self._publish(self._to_answer.pop(), self._stated())
        while self._to_ask:
            await self._publish(self._to_ask.pop(), {"ask": self._me})

    async def _look_for_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        for member in self.roster.silent(now, SILENT_SECONDS):
            if not await self._publish(member, {"ask": self._me}) and self.roster.drop(member):
                logger.info("a member of the group is gone", extra={"member": member})
                self._on_change()

    async def _publish(self, key: str, what: Mapping[str, Any]) -> bool:
        """Publish a message; False if no queue received it."""
        assert self._channel is not None
        body = json.dumps(what, separators=(",", ":")).encode()
        publish = self._channel.basic_publish(
            body,
            exchange=self._exchange,
            routing_key=key,
            mandatory=True,
            properties=Basic.Properties(content_type="application/json", delivery_mode=1),
        )
        try:
            await self._session.call(publish)
        except DeliveryError:  # no queue received it; or, from RabbitMQ 4 on, only one that is just ending
            return False
        return True

    # ------------------------------------------------------------ hearing

    async def _hear(self, delivered: DeliveredMessage) -> None:
        try:
            said = cast("dict[str, Any]", json.loads(delivered.body))
            self._take_in(said, asyncio.get_running_loop().time())
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("a member's statement can't be read", extra={"cause": cause_of(error)})

    def _take_in(self, said: Mapping[str, Any], now: float) -> None:
        if (asker := said.get("ask")) is not None:
            if asker != self._me:
                self._to_answer.add(asker)
                self._due.set()
        elif (member := said.get("beat")) is not None:
            if member == self._me:
                self._heard_myself_at = now
            elif self.roster.hear_beat(member, said["version"], now):
                self._to_ask.add(member)
                self._due.set()
        elif said["member"] == self._me:
            self._echoed, self._heard_myself_at = said["version"], now
            self._on_change()
        elif self.roster.hear(_read(said), now):
            self._on_change()

    def _statement(self) -> Statement:
        return Statement(self._me, self._version, *self._state())

    def _stated(self) -> dict[str, Any]:
        assert self._said is not None
        is_member, spots = self._said
        return {
            "member": self._me,
            "version": self._version,
            "is_member": is_member,
            "spots": [[spot.queue, spot.tag, spot.priority, sorted(spot.behind), spot.is_active] for spot in spots],
        }


def _read(said: Mapping[str, Any]) -> Statement:
    spots = [
        Spot(str(queue), str(tag), int(priority), frozenset(map(str, behind)), bool(is_active))
        for queue, tag, priority, behind, is_active in said["spots"]
    ]
    return Statement(str(said["member"]), int(said["version"]), bool(said["is_member"]), tuple(spots))
