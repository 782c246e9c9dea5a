"""Consumes one queue on its own AMQP channel (decision 16).

Each queue has its own channel for two reasons. When the channel is closed, every version of RabbitMQ returns the
channel's messages to the queue in order. And a channel error does not affect other queues.

The frame interceptor calls this module for each batch of deliveries. This module writes acks and requeues in batches,
directly to the connection. It sends all other requests through aiormq, because they need an answer.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from enum import Enum
from itertools import count
from typing import Any, TypeVar

from aiormq.abc import AbstractChannel, DeliveredMessage

from popgate.adapters.rabbitmq.channel_parser import CloseReason, Confirm, RawDelivery
from popgate.adapters.rabbitmq.consumption import Consumption, is_deleted
from popgate.adapters.rabbitmq.delivery_reader import DeliveryReader
from popgate.adapters.rabbitmq.queue_shape import is_gone, queue_refused
from popgate.adapters.rabbitmq.session import ACCESS_REFUSED, ChannelRefusedError, Session
from popgate.adapters.rabbitmq.settlements import Settlements, return_all_frame
from popgate.adapters.rabbitmq.versions import (
    DISCONNECTED_MILLISECONDS,
    counts_only_lost_channels,
    keeps_consumer_timeout,
    waits_for_lost_nodes,
)
from popgate.domain.errors import BrokerUnavailable, Conflict, PopgateError, QueueGone
from popgate.ports.broker import Delivery, Listener

T = TypeVar("T")

HOST_LENGTH_MAX = 100
"""Maximum length of the host name in a consumer tag, which has at most 255 bytes."""
CHANNELS_RESERVED = 64
"""Number of channels of the connection that consumed queues leave to all other work: publishing, counting messages,
declaring queues, dead letters."""
ACK_DELAY_SECONDS = 0.01
"""Maximum seconds for which an ack is delayed, so that several acks share one frame. RabbitMQ's work grows with the
number of frames. No client waits for a delayed ack: either the lease record has already settled the message, or `flush`
sends the ack at once."""

RETURNED_SECONDS, LATE_SECONDS = DISCONNECTED_MILLISECONDS / 1000 + 0.2, 0.2
"""Seconds for which the first deliveries wait if the node of the former consumer was lost (from RabbitMQ 4.3 on).

Both times must pass: `RETURNED_SECONDS` after the loss was detected, and `LATE_SECONDS` after the first delivery. By
then RabbitMQ has returned all messages of the lost node's consumers to the queue. A channel whose prefetch was changed
has had several consumers. Each has its own timeout, after which RabbitMQ returns its messages. When none of them is
active any more, RabbitMQ starts the next consumer, and may deliver new messages to it before the last timeout ends."""
HOLDERS_LOOK_SECONDS, HOLDERS_SECONDS_MAX = 0.05, 5.0
"""Seconds between two checks whether other consumers still have unsettled messages of the queue, and maximum seconds
for which the checks are repeated. The first deliveries wait until the checks end. If a former channel ended while it
was being resized, RabbitMQ may deliver new messages before it returns the messages of the cancelled consumer."""
UNKNOWN_BACKLOG = sys.maxsize
"""The result of `backlog`, unless the channel is paused, while the queue's leader does not answer. RabbitMQ reports 0
messages in this case, after at most 0.25 s (`rabbit_quorum_queue:stat`). If `backlog` returned this 0, the engine would
put the returned messages in order before all of them have arrived."""
_log = logging.getLogger(__name__)


class _State(Enum):
    OPENING = "opening"
    """`open` has not returned yet. Deliveries are buffered. If the channel ends, `open` raises an error."""
    OPEN = "open"
    ENDED = "ended"


class RabbitChannel:
    """Implements the broker port's `Channel` for one queue of RabbitMQ.

    It also implements `ChannelHandler`: only the frame interceptor calls the `on_...` methods.
    """

    def __init__(self, session: Session, amqp: AbstractChannel, what: Consumption, listener: Listener) -> None:
        self._session = session
        self._interceptor = session.interceptor
        self._amqp = amqp
        self._what = what
        self._returns_uncounted = what.foreign and what.quorum and counts_only_lost_channels(session.server_version)
        self._reader = DeliveryReader(what, session.server_version)
        self._keeps_timeout = what.quorum and keeps_consumer_timeout(session.server_version)
        self._listener = listener
        self._state = _State.OPENING
        self._early: list[Delivery] = []
        self._gathers = not what.foreign and not what.notes
        """Whether the first deliveries are buffered for a while (`_gather`) instead of being passed on at once.

        This is done only on queues that popgate declares with a single active consumer. Adopted queues and dead-letter
        queues are not declared in this way.
        """
        self._gathers_until: float | None = None
        """The loop time before which `_gather` does not pass the first deliveries on, or None.

        It is set if the former consumer's node was lost, and this version of RabbitMQ returns its messages late.
        """
        if what.lost_node_at is not None and waits_for_lost_nodes(session.server_version):
            self._gathers_until = what.lost_node_at + RETURNED_SECONDS
        self._settlements = Settlements(amqp.number)
        self._write_scheduled = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._calls = asyncio.Lock()  # a resize consists of three calls, and no other call may come between them
        self._counts_begun = self._counted = 0
        """The number of the latest count of the backlog that was begun, and of the latest count that succeeded."""
        self._latest_count = (0, 0)
        """The result of the latest count that succeeded: the ready messages and the consumers."""
        self._consumer_numbers = count(1)
        self._consumer_tag = ""
        self._prefetch = 0

    @classmethod
    async def open(cls, session: Session, what: Consumption, prefetch: int, listener: Listener) -> "RabbitChannel":
        """Start to consume a queue, and return the channel. The listener is not called before this method returns.

        Raises: QueueGone; Conflict if another consumer has exclusive access to the queue; BrokerUnavailable.
        """
        amqp = await session.open_channel(reserve=0 if what.notes else CHANNELS_RESERVED)
        channel = cls(session, amqp, what, listener)
        session.interceptor.attach(amqp.number, channel)
        try:
            await channel._look_for_consumers()
            await channel._begin(prefetch)
            if channel._state is _State.ENDED:
                raise BrokerUnavailable(f"RabbitMQ ended the consumption of queue {what.queue!r} at once")
        except BaseException:
            await channel.close()
            raise
        channel._state = _State.OPEN
        if channel._early:
            channel._deliver_early_soon()
        return channel

    # ------------------------------------------------------------ the port

    @property
    def unsettled_seconds_max(self) -> float | None:
        return self._what.asked_timeout_seconds if self._keeps_timeout else self._what.consumer_timeout_seconds

    def ack(self, tags: Sequence[int]) -> None:
        if self._state is not _State.ENDED:
            self._settlements.ack(tags)
            if self._ack_timer is None and not self._write_scheduled:
                self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_SECONDS, self._write)

    def requeue(self, tags: Sequence[int]) -> None:
        if self._state is not _State.ENDED:
            self._settlements.requeue(tags)
            self._schedule_write()

    async def flush(self) -> None:
        self._write()
        try:
            await self._interceptor.drain()
        except OSError:
            return  # the channel is lost, and the interceptor reports this to the listener

    async def resize(self, prefetch: int) -> None:
        async with self._calls:
            if self._state is _State.ENDED or prefetch == self._prefetch == 0:
                return
            self._write()
            try:
                if self._prefetch:
                    # Deliveries to the cancelled consumer may arrive even after the answer to the cancel. They are
                    # accepted like all other deliveries.
                    await self._call(self._amqp.basic_cancel(self._consumer_tag))
                await self._begin(prefetch)
            except PopgateError as error:
                self._lose(error.detail, queue_gone=isinstance(error, QueueGone))
                raise BrokerUnavailable(error.detail) from error

    async def backlog(self) -> int:
        begun_before = self._counts_begun
        async with self._calls:
            if self._state is _State.ENDED:
                return 0
            if self._counted <= begun_before:  # callers that waited for the lock together share one count
                number = self._counts_begun = self._counts_begun + 1
                try:
                    self._latest_count = await self._count()
                except PopgateError as error:
                    self._lose(error.detail, queue_gone=isinstance(error, QueueGone))
                    raise BrokerUnavailable(error.detail) from error
                self._counted = number
            ready, consumers = self._latest_count
        if not ready and not consumers and self._prefetch:
            return UNKNOWN_BACKLOG  # RabbitMQ could not count: it did not even count this channel's consumer
        return ready

    def settled_evidence(self) -> int:
        return self._settlements.proved_acks()

    async def close(self) -> None:
        self._write()
        returns = self._returns_uncounted and self._state is _State.OPEN and self._prefetch > 0
        self._end()
        try:
            if returns:
                await self._return_all()
        finally:  # the caller may be cancelled
            await self._session.close_channel(self._amqp)

    # ------------------------------------------------------------ the ChannelHandler

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None:
        if self._state is _State.ENDED:
            return
        present_tag, note = self._consumer_tag.encode(), self._settlements.deliver
        for consumer_tag, tag, *_ in deliveries:
            note(tag, present=consumer_tag == present_tag)
        taken = self._reader.read(deliveries)
        if self._state is _State.OPEN and not self._early and not self._gathers:
            self._listener.on_deliveries(taken)
            return
        is_first = not self._early
        self._early += taken
        if is_first and self._state is _State.OPEN:
            self._deliver_early_soon()

    def on_confirms(self, confirms: list[Confirm]) -> None:
        """Do nothing, because no message is published on this channel."""

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        """Do nothing, because no message is published on this channel."""

    def on_cancelled(self) -> None:
        if self._state is _State.OPEN:
            self._write()
            self._end()
            self._session.spawn(self._report_cancelled(), "popgate cancelled consumer")
        self._end()

    def on_closed(self, reason: CloseReason) -> None:
        self._lose(reason.text, queue_gone=is_gone(reason))

    # ------------------------------------------------------------ inside

    async def _return_all(self) -> None:
        """Requeue all unsettled messages in order, so that these deliveries do not count towards the delivery limit.

        From RabbitMQ 4.3 on, a delivery counts only if it was returned by the end of its channel. An adopted queue may
        have a low limit, and RabbitMQ drops messages that exceed the limit. The consumer is cancelled first. Otherwise
        RabbitMQ would deliver the messages to it again, and the end of the channel would return these deliveries.
        """
        try:
            await self._session.call(self._amqp.basic_cancel(self._consumer_tag))
        except (ChannelRefusedError, BrokerUnavailable):
            return  # RabbitMQ returns the messages when the channel ends
        self._interceptor.write(return_all_frame(self._amqp.number))

    async def _look_for_consumers(self) -> None:
        """Check whether the first deliveries must wait for messages of the queue's former consumers (`_gather`).

        They need not wait if the queue has ready messages and no consumer before this channel consumes it.
        """
        if self._gathers and self._gathers_until is None:
            answer = await self._call(self._amqp.queue_declare(self._what.queue, passive=True))
            self._gathers = bool(answer.consumer_count) or not answer.message_count

    async def _begin(self, prefetch: int) -> None:
        """Start a consumer with the given prefetch. If the prefetch is 0, only check whether the queue exists."""
        self._prefetch = prefetch
        if prefetch:
            await self._call(self._amqp.basic_qos(prefetch_count=prefetch))
        # Operators see the consumer tag in RabbitMQ's management interface. When a channel ends, a quorum queue returns
        # the messages of one consumer after the other, in the text order of the consumer tags. The consumer numbers
        # have leading zeros so that this is the order in which the consumers were started.
        host = socket.gethostname()[:HOST_LENGTH_MAX]
        self._consumer_tag = f"popgate {host}:{os.getpid()} {self._amqp.number}.{next(self._consumer_numbers):05}"
        self._settlements.begin(prefetch)
        if prefetch:
            milliseconds = round(self._what.asked_timeout_seconds * 1000)
            consume = self._amqp.basic_consume(
                self._what.queue,
                _refuse,
                exclusive=self._what.exclusive,
                arguments={"x-consumer-timeout": milliseconds} if self._keeps_timeout else None,
                consumer_tag=self._consumer_tag,
            )
            await self._call(consume)
        else:
            await self._call(self._amqp.queue_declare(self._what.queue, passive=True))

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        queue = self._what.queue
        try:
            return await self._session.call(call, give_up=self._give_up)
        except ChannelRefusedError as error:
            if is_gone(error.reason):
                raise QueueGone(f"queue {queue!r} does not exist on RabbitMQ") from error
            if error.reason.code == ACCESS_REFUSED:
                raise Conflict(f"popgate may not consume queue {queue!r}: {error}") from error
            raise queue_refused(queue, error) from error

    def _give_up(self) -> None:
        self._lose("a call to RabbitMQ was given up", queue_gone=False)

    def _schedule_write(self) -> None:
        if not self._write_scheduled:
            self._write_scheduled = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._write_scheduled = False
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._state is not _State.ENDED and (frames := self._settlements.take_frames()):
            self._interceptor.write(frames)

    def _deliver_early_soon(self) -> None:
        if self._gathers:
            self._session.spawn(self._gather(), "popgate first deliveries")
        else:
            asyncio.get_running_loop().call_soon(self._deliver_early)

    async def _gather(self) -> None:
        """Pass the first deliveries on as soon as no other consumer has unsettled messages of this queue.

        Redelivered messages are passed on before new ones. If the queue still has ready messages at that time, or if
        the checks ended without success, RabbitMQ may still have returned messages that precede the first deliveries.
        All first deliveries are then marked as returned, so that the engine puts them in order with those messages.
        """
        loop = asyncio.get_running_loop()
        async with self._calls:  # a resize at the same time would add another consumer to the count
            if self._gathers_until is not None:
                await asyncio.sleep(max(LATE_SECONDS, self._gathers_until - loop.time()))
            deadline = loop.time() + HOLDERS_SECONDS_MAX
            try:
                ready, consumers = await self._count()
                while consumers != 1 and self._state is _State.OPEN:
                    if loop.time() >= deadline:
                        _log.warning("another consumer still holds messages", extra={"queue": self._what.queue})
                        break
                    await asyncio.sleep(HOLDERS_LOOK_SECONDS)
                    ready, consumers = await self._count()
            except PopgateError as error:
                self._lose(error.detail, queue_gone=isinstance(error, QueueGone))
                return
        self._gathers = False
        self._early.sort(key=lambda delivery: not delivery.returned)
        if ready or consumers != 1:
            for delivery in self._early:
                delivery.returned = True
        self._deliver_early()

    async def _count(self) -> tuple[int, int]:
        """Return the number of ready messages and the number of consumers of the queue.

        When this method returns, all messages that RabbitMQ had delivered before the count have arrived.

        RabbitMQ does not count a consumer that waits to become the single active consumer. It counts a cancelled
        consumer as long as this consumer has unsettled messages. If the queue's leader does not answer, RabbitMQ
        reports 0 messages and 0 consumers.
        """
        answer = await self._call(self._amqp.queue_declare(self._what.queue, passive=True))
        # At the time of the count, messages that have left the queue may still be on the way to RabbitMQ's channel
        # process. The channel process sends them before it answers a second request.
        await self._call(self._amqp.queue_declare(self._what.queue, passive=True))
        return answer.message_count or 0, answer.consumer_count or 0

    def _deliver_early(self) -> None:
        early, self._early = self._early, []
        if early and self._state is _State.OPEN:
            self._listener.on_deliveries(early)

    def _end(self) -> None:
        """Stop sending settlements and passing on deliveries, because the delivery tags of the channel become void."""
        self._state = _State.ENDED
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        self._early.clear()
        self._interceptor.discard(self._amqp.number)

    def _lose(self, reason: str, *, queue_gone: bool) -> None:
        was = self._state
        self._end()
        if was is _State.OPEN:
            self._session.spawn(self._session.close_channel(self._amqp), "popgate lost channel")
            self._listener.on_channel_lost(reason, queue_gone=queue_gone)

    async def _report_cancelled(self) -> None:
        """Notify the listener that RabbitMQ has cancelled the consumer, and whether the queue was deleted.

        If the queue was deleted, the listener drops the queue's messages. RabbitMQ usually cancels a consumer because
        of a deletion. It also does so if the node of a classic queue is down, or (from RabbitMQ 4.3 on) if a delivery
        was unsettled for longer than the consumer timeout.
        """
        gone = False
        try:
            await self._session.close_channel(self._amqp)
            gone = await is_deleted(self._session, self._what.queue)
        except PopgateError as error:
            _log.info("can't tell whether the queue was deleted", extra={"queue": self._what.queue, "why": str(error)})
        finally:
            self._listener.on_channel_lost("RabbitMQ ended the consumption", queue_gone=gone)


async def _refuse(message: DeliveredMessage) -> None:
    raise AssertionError("the frame interceptor takes all deliveries")
