"""Reads a dead-letter queue once, from its front, in order and without changing the queue.

A walk uses one channel, and sets the channel's prefetch. The caller of the walk decides what happens to each dead
letter. A dead letter that the caller does not ``ack`` stays unsettled at the broker, and returns to its old place when
the walk closes. So even if the queue is long, a walk keeps in memory only dead letters that have arrived but were not
read yet.

The broker delivers messages while the channel has credit. Each delivery uses one credit, and its ack returns this
credit. A dead letter that is not acked returns no credit. When no credit is left, the walk grants new credit by setting
the channel's prefetch again. Large dead letters may follow small ones, so the walk takes the credit back when
``SHARE_BYTES`` have arrived for it. RabbitMQ has then already sent more of them, but at most ``CREDIT_MAX``.

A RabbitMQ queue stores returned messages in a separate list, ahead of the other messages. A message that is returned
again moves to the end of this list. If a walk has read only a part of the list, it therefore reads the rest of the list
before it closes. All messages of the list are then returned, and have their old order again.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from popgate.domain.dead_letter import dead_letter_details, unpacked
from popgate.domain.errors import BrokerUnavailable, Conflict, PopgateError, QueueGone, queue_gone_detail
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.letter_filter import LetterFilter
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, Layout, transient_copy_id
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import cost_of
from popgate.engine.queue.prefetch_window import PrefetchWindow
from popgate.ports.broker import Channel, Delivery

_log = logging.getLogger(__name__)

READ_COUNT = 256
"""Number of dead letters that most callers request from ``read`` at a time."""
SHARE_BYTES = 32 * 1024 * 1024
"""Approximate maximum size, in bytes, of the dead letters that have arrived but were not read yet."""
CREDIT_MAX = 64
"""Maximum number of dead letters that the broker may deliver ahead of the caller."""
RESTORE_CREDIT_MAX = 16_384
"""Maximum credit to read the rest of the returned messages before a walk closes. No body of them stays in memory."""
SLOW_CREDIT = 16
REMEMBERED_MAX = 4_096
"""Maximum number of dead letters that a walk remembers, to recognize a second copy of one of them."""
LOOK_SECONDS = 0.2
"""Seconds between two queries to the broker for its backlog or its consumers."""
ALONE_ATTEMPTS = 5
ARRIVAL_SECONDS_MAX = 15.0
"""Maximum seconds to wait for the next dead letter. If a queue's leader hangs, RabbitMQ elects another leader after
10 s."""
ROUND_SECONDS_MAX = 10.0
"""Maximum seconds to read the rest of the returned messages before a walk closes. If more time is needed, the walk
closes anyway, and the order of the returned messages changes."""
_SETTLED = (RecordState.ACKED, RecordState.DEAD)


class Letter(NamedTuple):
    """One dead letter that a walk has read.

    ``tag``: its delivery tag on the walk's channel. ``record``: its record in the store, or None if it has no record.
    """

    tag: int
    copy_id: CopyId
    message: Message
    record: LeaseRecord | None

    @property
    def is_half_moved(self) -> bool:
        """Whether a move of the dead letter was begun but not finished. Its copy may already be in the target queue."""
        return self.record is not None and self.record.state is RecordState.MOVING

    @property
    def dead_lettered_at(self) -> float:
        """The Unix time at which the message was dead-lettered. If this is unknown, the time of its publish."""
        at = dead_letter_details(self.message.headers).dead_lettered_at
        return self.message.published_at if at is None else at

    def meets(self, wanted: LetterFilter) -> bool:
        """Return whether the dead letter meets the conditions of a search."""
        return wanted.takes(self.message, self.copy_id, self.dead_lettered_at)


class DeadWalk:
    """Reads the dead-letter queue of ``layout``. Only one task may use a walk at a time."""

    def __init__(self, context: EngineContext, layout: Layout, *, epoch: int) -> None:
        self.ended = False
        self._context = context
        self._layout = layout
        self._queue: BrokerQueue = layout.dead
        self._epoch = epoch
        self._channel: Channel | None = None
        self._window = PrefetchWindow()
        self._credit_max = CREDIT_MAX
        self._credit = 0
        self._credit_from_tag = 0
        self._credit_bytes = 0
        """The bytes that have arrived since credit was granted."""
        self._last_tag = 0
        self._arrived: deque[Delivery] = deque()
        self._unread: list[Letter] = []
        self._news: asyncio.Future[None] | None = None
        self._left = 0
        self._is_in_line = False
        """Whether the last delivery is a message from the queue's list of returned messages."""
        self._lost = ""
        self._gone = False
        self._unsettled = 0
        self._passed: dict[CopyId, None] = {}

    async def open(self) -> None:
        """Begin at the front of the queue. Messages that are dead-lettered later are not part of this walk.

        Raises: BrokerUnavailable, QueueGone; Conflict if another program consumes the queue.
        """
        await self._be_alone()
        self._channel = await self._context.broker.consume(self._queue, self._layout, 0, self)
        try:
            self._left = await self._channel.backlog()
        except BaseException:
            await self.close()
            raise

    @property
    def dead(self) -> int:
        """The number of dead letters that this walk has read and not acked, or has still to read."""
        return self._left + self._unsettled - len(self._arrived) - len(self._unread)

    @property
    def held_count(self) -> int:
        """The number of dead letters that are unsettled on the channel. The broker does not count them as ready."""
        return 0 if self.ended else self._unsettled

    def limit(self, count: int, *, slowly: bool = False) -> None:
        """End the walk after at most ``count`` more dead letters.

        If ``slowly`` is True, the broker may deliver only ``SLOW_CREDIT`` dead letters ahead of the caller.
        """
        self._left = min(self._left, count)
        if slowly:
            self._credit_max = SLOW_CREDIT

    async def read(self, count_max: int) -> list[Letter]:
        """Return at least one and at most ``count_max`` dead letters, or an empty list at the end of the walk.

        Dead letters that the store has already settled are acked and not returned.

        Raises: BrokerUnavailable, StateUnavailable, QueueGone.
        """
        if self._unread:
            letters, self._unread = self._unread[:count_max], self._unread[count_max:]
            self._left -= len(letters)
            return letters
        while self._left > 0:
            if not self._arrived and not await self._more():
                self._left = 0
                break
            taken: list[Delivery] = []
            while self._arrived and len(taken) < count_max:
                taken.append(self._arrived.popleft())
            self._left -= len(taken)
            letters = await self._letters(taken)
            if letters:
                return letters
        return []

    def unread(self, letters: Sequence[Letter]) -> None:
        """Put back the dead letters that were read last. The next ``read`` begins with them."""
        self._unread = [*letters, *self._unread]
        self._left += len(letters)

    def ack(self, letters: Sequence[Letter]) -> None:
        """Ack dead letters at the broker. They must already be settled in the store."""
        self._ack([letter.tag for letter in letters])

    async def flush(self) -> None:
        """Wait until the acks have left this process (RabbitMQ) or are durable (embedded broker)."""
        if self._channel is not None and not self.ended:
            await self._channel.flush()

    async def close(self, *, in_order: bool = True) -> None:
        """Close the channel, which returns all unsettled dead letters to the queue. Idempotent.

        If ``in_order`` is True, restore their old order first, unless this takes longer than ``ROUND_SECONDS_MAX``.
        """
        try:
            if in_order and self._is_in_line and not self.ended:
                await self._restore_order()
        finally:  # also if the caller is cancelled: if the consumer stayed, every later walk would fail
            channel, self._channel, self.ended = self._channel, None, True
            self._arrived.clear()
            self._tell()
            if channel is not None:
                await channel.close()

    # -- the channel's listener -----------------------------------------------------------------------------------

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        if self.ended:
            return
        self._credit -= len(deliveries)
        self._unsettled += len(deliveries)
        for delivery in deliveries:
            self._last_tag = max(self._last_tag, delivery.tag)
            size = cost_of(delivery.message)
            self._credit_bytes += size
            self._window.observe(size)
        self._arrived += deliveries
        self._is_in_line = deliveries[-1].earlier_deliveries > 0
        if self._credit_bytes > SHARE_BYTES and self._credit > 0 and self._channel is not None:
            self._credit, self._credit_from_tag = 0, self._last_tag
            self._context.background.spawn(self._pause(self._channel), name=f"pause {self._queue}")
        self._tell()

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        self._lost, self._gone, self.ended, self._channel = reason, queue_gone, True, None
        self._arrived.clear()
        self._tell()

    # -- how ------------------------------------------------------------------------------------------------------

    async def _be_alone(self) -> None:
        """Check that the queue has no other consumer. Raises: Conflict, QueueGone."""
        for _ in range(ALONE_ATTEMPTS):
            (depth,) = await self._context.broker.depth([self._queue])
            if depth.ready is None:
                raise QueueGone(queue_gone_detail(self._queue))
            if not depth.consumers:
                return
            await asyncio.sleep(LOOK_SECONDS)  # RabbitMQ may still count this proxy's previous consumer
        raise Conflict(
            f"queue {self._queue} has other consumers, which may hold dead letters; stop them first "
            "(rabbitmqctl list_consumers names them)"
        )

    async def _restore_order(self) -> None:
        """Read the rest of the list of returned messages. The end of the channel then returns all of them in order."""
        self._arrived.clear()
        self._credit_max = RESTORE_CREDIT_MAX
        try:
            async with asyncio.timeout(ROUND_SECONDS_MAX):
                while self._is_in_line and await self._more():
                    self._arrived.clear()
        except (TimeoutError, PopgateError) as error:
            _log.info("dead letters may have changed their order", extra={"queue": self._queue, "why": str(error)})

    async def _more(self) -> bool:
        """Wait until dead letters have arrived. Return False if the broker has no more of them.

        Raises: BrokerUnavailable if the broker has dead letters but delivers none, or can't count them; QueueGone.
        """
        deadline = self._context.clock.monotonic() + ARRIVAL_SECONDS_MAX
        while not self._arrived:
            channel = self._still_open()
            ready = await channel.backlog()
            if self._arrived:
                break
            self._still_open()
            if not ready:
                return False
            if self._context.clock.monotonic() > deadline:
                raise BrokerUnavailable(f"the broker does not deliver the messages of queue {self._queue}")
            if self._credit <= 0:
                await self._ask(channel)
            self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._news}, timeout=LOOK_SECONDS)
        return True

    def _still_open(self) -> Channel:
        if self._gone:
            raise QueueGone(queue_gone_detail(self._queue))
        if self._channel is None:
            raise BrokerUnavailable(f"the channel on queue {self._queue} has ended: {self._lost or 'it was closed'}")
        return self._channel

    async def _ask(self, channel: Channel) -> None:
        """Grant the broker new credit. It is chosen so that dead letters of the usual size fit into ``SHARE_BYTES``."""
        grown = self._window.grown(SHARE_BYTES) if self._last_tag else self._window.restart(SHARE_BYTES)
        self._credit = min(grown, self._credit_max)
        self._credit_from_tag, self._credit_bytes = self._last_tag, 0
        await channel.resize(self._credit)

    async def _pause(self, channel: Channel) -> None:
        """Take the credit back. ``read`` grants new credit when it has read what has arrived."""
        with contextlib.suppress(PopgateError):  # the channel is lost, and the walk is notified
            await channel.resize(0)

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def _letters(self, deliveries: Sequence[Delivery]) -> list[Letter]:
        """Return the dead letters in ``deliveries``, but ack those that the store has settled, and second copies."""
        named = [(self._copy_id(delivery), delivery) for delivery in deliveries]
        records = await self._context.leases.peek(
            self._queue, [copy_id for copy_id, delivery in named if delivery.identified]
        )
        letters: list[Letter] = []
        over: list[int] = []
        for copy_id, delivery in named:
            record = records.get(copy_id)
            is_settled = record is not None and record.state in _SETTLED
            if is_settled or copy_id in self._passed:  # moved, purged, or dead-lettered twice
                over.append(delivery.tag)
                continue
            self._passed[copy_id] = None
            letters.append(Letter(delivery.tag, copy_id, self._unpacked(delivery), record))
        while len(self._passed) > REMEMBERED_MAX:
            del self._passed[next(iter(self._passed))]
        self._ack(over)
        return letters

    def _unpacked(self, delivery: Delivery) -> Message:
        message = delivery.message
        try:
            return unpacked(message) if delivery.identified else message  # popgate itself packs only identified copies
        except Exception as error:
            self._context.faults.message_failed(self._queue, message.copy_id, error)
            return message

    def _copy_id(self, delivery: Delivery) -> CopyId:
        if delivery.identified:
            return delivery.message.copy_id
        number = self._context.next_transient()  # another application published the message
        return transient_copy_id(self._context.instance, self._epoch, number)

    def _ack(self, tags: Sequence[int]) -> None:
        if tags and self._channel is not None:
            self._channel.ack(tags)
            self._unsettled -= len(tags)
            self._credit += sum(tag > self._credit_from_tag for tag in tags)
