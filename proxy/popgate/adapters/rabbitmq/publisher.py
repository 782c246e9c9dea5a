"""Publishes many messages at once on one channel, and determines the outcome of each.

No message is lost silently, and no success is reported falsely. The result of a call:
- All outcomes are known: the call returns them.
- The connection or the channel is lost, or confirms do not arrive: messages that were sent have the outcome FAILED,
  which means that it is unknown whether they were stored.
- The broker stops reading (a memory or disk alarm): the call raises BrokerUnavailable at once, unless the outcome of
  some messages is known.
- No message was sent: the call raises BrokerUnavailable.

If RabbitMQ refuses a message, the publisher replaces the channel, even though the refusal may be justified. A channel
in RabbitMQ checks only once, at the first message for a quorum queue, whether the queue accepts messages. If the queue
has no leader at that moment because the leader's node was killed, the channel refuses all later messages for this queue
as long as the channel exists (3.10). A new channel repeats the check.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from popgate.adapters.rabbitmq.body_limit import BodyLimit
from popgate.adapters.rabbitmq.channel_parser import CloseReason
from popgate.adapters.rabbitmq.confirms import Batch, Chunk, ConfirmChannel
from popgate.adapters.rabbitmq.delay_key import entry_level, whole_seconds
from popgate.adapters.rabbitmq.delay_levels import DelayLevels, Relay
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.session import NOT_FOUND, ChannelRefusedError, Session
from popgate.domain.errors import BrokerUnavailable, Conflict, PopgateError
from popgate.domain.identity import IdentityKeys
from popgate.domain.names import TopicName, exchange_name
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from popgate.runtime.histogram import Histogram

WRITE_BYTES = 256 * 1024
"""Approximate number of bytes of frames that are collected before they are written."""
UNSENT_BYTES_MAX = 1024 * 1024
BLOCKED_RETRY_SECONDS = 5.0
BLOCKED_GRACE_SECONDS = 0.2
"""Seconds for which publish calls continue to wait for confirms after RabbitMQ has announced an alarm. RabbitMQ
announces an alarm when it reads the first message during the alarm. It stores this message, so a confirm may still
arrive."""
RENEWAL_SECONDS, RENEWAL_SECONDS_MAX = 0.1, 5.0
"""Minimum seconds between two replacements of a channel that refuses messages: the first interval, and the longest one.
A full queue may refuse messages for a long time, so the interval doubles while refusals continue."""

_NO_TOPIC = PublishOutcome(status=PublishStatus.UNROUTED, detail="the topic's exchange does not exist on RabbitMQ")
_NO_LEVEL = PublishOutcome(
    status=PublishStatus.REFUSED, detail="a queue of popgate:delay:... is missing, and can't be declared"
)
_FAILED = PublishStatus.FAILED

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes messages. `session` returns the live session, or raises BrokerUnavailable. `keys` sign the copy ids."""

    def __init__(self, session: Callable[[], Session], options: RabbitOptions, keys: IdentityKeys) -> None:
        self._session = session
        self._keys = keys
        self._options = options
        self._turn = asyncio.Lock()  # messages are sent in the order of the calls
        self._channel: ConfirmChannel | None = None
        self._body_limit: BodyLimit | None = None
        self._renewed_at = 0.0
        self._renewal_seconds = RENEWAL_SECONDS
        self._limits: set[asyncio.Timeout] = set()
        self._exchanges: set[TopicName] = set()
        self._exchanges_seen_by: Session | None = None
        self._levels = DelayLevels()
        self.confirm_seconds = Histogram()
        """How long batches took from the call until RabbitMQ had confirmed all their messages."""

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        """Publish messages and return one outcome for each, in order.

        If the call is cancelled, the outcomes are unknown.

        Raises: BrokerUnavailable. In this case no message is known to be stored, but some may be.
        """
        self._refuse_while_blocked()
        if not messages:
            return []
        outcomes = await self._publish(messages)
        again = [
            place
            for place, (one, outcome) in enumerate(zip(messages, outcomes, strict=True))
            if one.delay_seconds > 0 and outcome.status is PublishStatus.UNROUTED
        ]
        if again:  # an operator may have deleted a level
            self._levels.forget()
            for place, outcome in zip(
                again, await self._publish_again([messages[place] for place in again]), strict=True
            ):
                outcomes[place] = outcome
        return outcomes

    async def _publish_again(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        """Publish unrouted messages a second time, and return their outcomes.

        This method never raises BrokerUnavailable, because other messages of the same call may be stored.
        """
        try:
            outcomes = await self._publish(messages)
        except BrokerUnavailable as error:
            return [PublishOutcome(status=_FAILED, detail=error.detail)] * len(messages)
        return [_NO_LEVEL if outcome.status is PublishStatus.UNROUTED else outcome for outcome in outcomes]

    async def _publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        batch, began = Batch(messages), perf_counter()
        limit = asyncio.timeout(self._options.confirm_timeout_seconds)
        try:
            async with limit:
                self._limits.add(limit)
                await self._look_for_exchanges(batch)
                await self._look_for_levels(batch)
                async with self._turn:
                    await self._send(batch)
                await batch.done
            self.confirm_seconds.add(perf_counter() - began)
        except TimeoutError:
            self._give_up(batch)
        finally:
            self._limits.discard(limit)
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def on_blocked(self, reason: str | None) -> None:
        """If the broker has stopped reading messages (`reason` is not None), shorten the wait of all publish calls."""
        if reason is None:
            return
        deadline = asyncio.get_running_loop().time() + BLOCKED_GRACE_SECONDS
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(deadline)

    def forget_exchange(self, topic: TopicName) -> None:
        """Forget that the exchange of ``topic`` exists. The next publish then checks whether the exchange exists."""
        self._exchanges.discard(topic)

    def forget_delays(self) -> None:
        """Forget the declared levels and relays, because some were deleted. The next delayed publish declares them."""
        self._levels.forget()

    def blocked_reason(self) -> str | None:
        """Return why the broker accepts no messages although it can be reached. Return None if it accepts messages."""
        blocked = self._session().blocked
        return None if blocked is None else f"RabbitMQ accepts no messages ({blocked})"

    def _refuse_while_blocked(self, *, sent: bool = False) -> None:
        if (reason := self.blocked_reason()) is not None:
            raise BrokerUnavailable(reason, retry_after_seconds=BLOCKED_RETRY_SECONDS, outcome_unknown=sent)

    def _give_up(self, batch: Batch) -> None:
        """End a publish call that has timed out: messages without an outcome fail.

        Raises: BrokerUnavailable if no outcome is known, and if the broker is blocked or no message was sent.
        """
        if self._channel is not None:
            self._channel.forget(batch)
        self._refuse_where_nothing_is_stored(batch)
        batch.fail_open(f"RabbitMQ did not confirm it within {self._options.confirm_timeout_seconds:g} s")

    def _refuse_where_nothing_is_stored(self, batch: Batch) -> None:
        if not any(outcome is not None and outcome.status is not _FAILED for outcome in batch.outcomes):
            self._refuse_while_blocked(sent=bool(batch.sent))  # RabbitMQ may store the messages when the alarm ends
            if not batch.sent:
                raise BrokerUnavailable("RabbitMQ is slow to confirm earlier messages")

    async def _send(self, batch: Batch) -> None:
        """Write the messages of a batch as fast as the window and the socket accept them.

        All messages are encoded before the first one is numbered, because RabbitMQ numbers the messages that it
        receives. If a numbered message were never sent, each later message would get the confirm of another message.
        """
        channel = await self._open_channel()
        limit = await self._learn_body_limit(channel.session, batch)
        if channel.closed is not None:  # the connection was lost while the limit was determined
            raise BrokerUnavailable(channel.closed.text)
        chunks = _encoded(channel, limit, batch)
        try:
            await self._write_all(channel, batch, chunks)
        except (PopgateError, asyncio.CancelledError):  # both occur only when all numbered messages are written
            raise
        except Exception as error:
            channel.abandon(f"popgate failed while it published: {type(error).__name__}: {error}")
            raise

    async def _learn_body_limit(self, session: Session, batch: Batch) -> BodyLimit:
        if self._body_limit is None or self._body_limit.session is not session:
            self._body_limit = BodyLimit(session)
        await self._body_limit.learn(max(len(outgoing.message.body) for outgoing in batch.messages))
        return self._body_limit

    async def _write_all(self, channel: ConfirmChannel, batch: Batch, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            await self._wait_for_room(channel, chunk)
            if channel.closed is not None:
                if not batch.sent:
                    raise BrokerUnavailable(channel.closed.text)
                batch.fail_open(channel.closed.text)
                return
            channel.expect(batch, chunk)
            batch.sent = chunk.places[-1] + 1
            channel.session.interceptor.write_soon(b"".join(chunk.pieces))
        batch.sent = len(batch.messages)

    async def _wait_for_room(self, channel: ConfirmChannel, chunk: Chunk) -> None:
        """Wait until the socket has accepted most of what was written, and the window has room for ``chunk``.

        Return early if the channel closes.
        """
        interceptor = channel.session.interceptor
        try:
            if interceptor.unsent_bytes > UNSENT_BYTES_MAX:
                await interceptor.drain()
        except OSError as error:
            interceptor.end(CloseReason(0, f"the connection to RabbitMQ was lost: {error}"))
        await channel.wait_for_room(len(chunk.places), chunk.size)

    async def _open_channel(self) -> ConfirmChannel:
        session = self._session()
        channel = self._channel
        if channel is None or channel.closed is not None or channel.session is not session or self._renew(channel):
            amqp = await session.open_channel(confirms=True)
            channel = ConfirmChannel(session, amqp, self._options, self._keys)
            session.interceptor.attach(amqp.number, channel)
            self._channel = channel
        return channel

    def _renew(self, channel: ConfirmChannel) -> bool:
        """Return whether the caller must replace `channel` now because it refused a message.

        If so, this method starts a task that closes `channel` after its last confirm.
        """
        if not channel.refused:
            return False
        now = asyncio.get_running_loop().time()
        since = now - self._renewed_at
        if since < self._renewal_seconds:
            return False
        again = since < 2 * RENEWAL_SECONDS_MAX
        self._renewal_seconds = min(self._renewal_seconds * 2, RENEWAL_SECONDS_MAX) if again else RENEWAL_SECONDS
        self._renewed_at = now
        channel.session.spawn(channel.retire(self._options.confirm_timeout_seconds), "popgate refusing channel")
        return True

    async def _look_for_exchanges(self, batch: Batch) -> None:
        """Record the outcome UNROUTED for messages whose exchange is missing, so that they are not published.

        If one such message were published, RabbitMQ would close the channel, and all other messages would fail.
        """
        session = self._session()
        closed = self._channel is not None and self._channel.closed is not None  # a missing exchange may be the reason
        if closed or self._exchanges_seen_by is not session:
            self._exchanges_seen_by = session
            self._exchanges.clear()
        for topic in {outgoing.topic for outgoing in batch.messages if not outgoing.delay_seconds} - self._exchanges:
            if topic is None or await self._exists(session, topic):
                continue
            for index, outgoing in enumerate(batch.messages):
                if outgoing.topic == topic and not outgoing.delay_seconds:
                    batch.settle(index, _NO_TOPIC)

    async def _look_for_levels(self, batch: Batch) -> None:
        """Declare the delay levels and the relays that the delayed messages of a batch need."""
        places = [index for index, outgoing in enumerate(batch.messages) if outgoing.delay_seconds > 0]
        if not places:
            return
        longest = max(batch.messages[index].delay_seconds for index in places)
        relays = {
            Relay(one.topic, one.index, one.queue)
            for one in (batch.messages[index] for index in places)
            if one.topic is not None and one.queue is not None
        }
        try:
            await self._levels.ensure(self._session(), entry_level(whole_seconds(longest)), relays)
        except Conflict as error:
            for index in places:
                batch.settle(index, PublishOutcome(status=PublishStatus.REFUSED, detail=error.detail))

    async def _exists(self, session: Session, topic: TopicName) -> bool:
        channel = await session.open_channel()
        try:
            await session.call(channel.exchange_declare(exchange_name(topic), passive=True))
        except ChannelRefusedError as error:
            if error.reason.code != NOT_FOUND:
                raise BrokerUnavailable(f"RabbitMQ refuses the exchange of topic {topic!r}: {error}") from error
            return False
        finally:
            await session.close_channel(channel)
        self._exchanges.add(topic)
        return True


def _encoded(channel: ConfirmChannel, limit: BodyLimit, batch: Batch) -> list[Chunk]:
    """Encode the messages of a batch that have no outcome yet, in order.

    A message that can't be encoded gets the outcome REFUSED. The other messages are not affected.
    """
    chunk = Chunk()
    chunks = [chunk]
    for index, outgoing in enumerate(batch.messages):
        if batch.outcomes[index] is not None:
            continue
        try:
            limit.check(len(outgoing.message.body))
            frames, size = channel.frames(outgoing)
        except ValueError as error:
            batch.settle(index, PublishOutcome(status=PublishStatus.REFUSED, detail=str(error), unfit=True))
        except Exception as error:
            _log.exception("a message can't be encoded", extra={"copy_id": outgoing.message.copy_id})
            detail = f"the message can't be encoded: {type(error).__name__}: {error}"
            batch.settle(index, PublishOutcome(status=PublishStatus.REFUSED, detail=detail, unfit=True))
        else:
            if chunk.size >= WRITE_BYTES or not channel.fits(chunk, size):
                chunk = Chunk()
                chunks.append(chunk)
            chunk.add(index, frames, size)
    return [one for one in chunks if one.places]
