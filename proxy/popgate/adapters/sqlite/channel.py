"""Implements the consumer channel of one embedded queue: deliveries, unsettled messages, and pending acks.

Theory of operation. Each message of a queue has a position. The channel reads the messages with a cursor. Every message
before the cursor was delivered on this channel. ``_returned`` lists the requeued messages that must be fetched and
delivered again. While there is credit and there are committed messages after the cursor, the channel fetches messages
from the database, with one fetch at a time. When the cursor has reached the tail, the channel does not need to fetch:
it delivers each new message from memory, right after the commit of the message.

    cursor           tail
    |  not yet read  |  not yet committed
    ----------------------------------------> positions

The tail is exact, because the database reports the results of jobs to the event loop in the order in which the jobs
ran. When a fetch reports that it reached the end, all commits that the fetch could see have been reported, and no other
commits.

The channel applies an ack in memory at once. ``acks`` later writes it to the disk.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from functools import partial

from popgate.adapters.sqlite.acks import AckWriter
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.messages import (
    FETCH_COUNT_MAX,
    POSITION_MIN,
    Fetched,
    fetch_after,
    fetch_positions,
)
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue
from popgate.ports.broker import Channel, Delivery, Listener

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
FETCH_DELAY_SECONDS = 0.02
"""Seconds that the channel waits for more credit before it fetches few messages, so that not every ack causes a
fetch."""


class StoredQueue:
    """The state of one queue in memory. ``tail`` is the position after the last committed message.

    ``stored`` is the number of committed messages that were not deleted. ``channel`` is the channel that consumes the
    queue, or None.
    """

    __slots__ = ("channel", "name", "next_position", "queue_id", "stored", "tail")

    def __init__(self, queue_id: int, name: BrokerQueue, *, stored: int, next_position: int) -> None:
        self.queue_id = queue_id
        self.name = name
        self.stored = stored
        self.tail = next_position
        self.next_position = next_position
        """The position of the next published message. It is greater than ``tail`` while commits are in progress."""
        self.channel: SqliteChannel | None = None

    @property
    def ready(self) -> int:
        """The number of stored messages that are neither delivered nor acked."""
        return max(0, self.stored - (0 if self.channel is None else self.channel.held_count))

    def take_positions(self, count: int) -> int:
        """Reserve ``count`` consecutive positions for new messages, and return the first position.

        If the publish fails, its positions remain unused. Such a gap is harmless.
        """
        first = self.next_position
        self.next_position += count
        return first

    def published(self, first: int, messages: Sequence[Message]) -> None:
        """Record that ``messages`` were committed at consecutive positions that start at ``first``."""
        self.stored += len(messages)
        self.tail = first + len(messages)
        if self.channel is not None:
            self.channel.offer(first, messages)

    def published_once(self, end: int, count: int) -> None:
        """Record that ``count`` messages were committed. ``end`` is the position after the last reserved position.

        ``count`` can be lower than the number of reserved positions, for example because a duplicate is not stored.
        """
        self.stored += count
        self.tail = end
        if self.channel is not None:
            self.channel.pump()

    def deleted(self, count: int) -> None:
        self.stored -= count


class SqliteChannel:
    """Delivers the messages of ``queue`` to ``listener``. Until the channel ends, it is ``queue.channel``."""

    def __init__(self, database: Database, queue: StoredQueue, prefetch: int, listener: Listener) -> None:
        self._database = database
        self._queue = queue
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._ended = False
        # Deliveries
        self._cursor = POSITION_MIN
        self._returned: list[int] = []
        self._fetching = False
        self._pump_due = False
        self._unsettled: dict[int, int] = {}
        """The position of each unsettled message, by delivery tag."""
        self._last_tag = 0
        # As with RabbitMQ, a resize grants the whole prefetch as new credit. Messages delivered before the resize do
        # not use this credit.
        self._prefetch = prefetch
        self._credit_from_tag = 0
        self._credit_used = 0
        self._acks = AckWriter(database, queue.queue_id, queue.name, queue.deleted)
        queue.channel = self
        self.pump()

    # -- the port --------------------------------------------------------------------------------------------------

    unsettled_seconds_max: float | None = None

    def ack(self, tags: Sequence[int]) -> None:
        if self._ended:
            return
        unsettled, acked = self._unsettled, list[int]()
        credit_from, returned_credit = self._credit_from_tag, 0
        for tag in tags:
            position = unsettled.pop(tag, None)
            if position is not None:
                acked.append(position)
                returned_credit += tag > credit_from
        self._credit_used -= returned_credit
        self._acks.add(acked, len(tags))
        self.pump()

    def requeue(self, tags: Sequence[int]) -> None:
        if self._ended:
            return
        for tag in tags:
            position = self._unsettled.pop(tag, None)
            if position is not None:
                self._returned.append(position)
                self._credit_used -= tag > self._credit_from_tag
        self.pump()

    async def flush(self) -> None:
        await self._acks.flush()

    async def resize(self, prefetch: int) -> None:
        if not self._ended:
            self._prefetch = prefetch
            self._credit_from_tag = self._last_tag
            self._credit_used = 0
            self.pump()

    async def backlog(self) -> int:
        if self._ended:
            return 0
        # The database reports reads in order. So the messages of a fetch in progress have been delivered when this read
        # returns.
        await self._database.read(_nothing, BrokerUnavailable)
        return self._queue.ready if self._queue.channel is self else 0

    def settled_evidence(self) -> int:
        return self._acks.written_count

    async def close(self) -> None:
        if not self._ended:
            self._end()
            self._acks.end()
            await self._acks.ended()

    # -- for the broker --------------------------------------------------------------------------------------------

    @property
    def held_count(self) -> int:
        """The number of stored messages that are either unsettled on this channel, or acked but not yet deleted."""
        return len(self._unsettled) + self._acks.pending_count

    def lose(self, reason: str, *, queue_gone: bool) -> None:
        """End the channel on behalf of the broker, and notify the listener.

        Earlier acks are still written, unless the queue was deleted.
        """
        if not self._ended:
            self._end()
            if queue_gone:
                self._acks.discard()
            else:
                self._acks.end()
            self._listener.on_channel_lost(reason, queue_gone=queue_gone)

    def offer(self, first: int, messages: Sequence[Message]) -> None:
        """Deliver newly committed messages from memory. Their positions are consecutive and start at ``first``.

        If other messages must be delivered first, or there is no credit, call ``pump``, which later fetches these
        messages from the database.
        """
        credit = self._prefetch - self._credit_used
        if self._fetching or self._returned or self._cursor != first or credit <= 0:
            self.pump()
            return
        taken = messages[:credit]
        self._cursor = first + len(taken)
        self._deliver(list(enumerate(taken, first)))

    def pump(self, *, now: bool = False) -> None:
        """Start a fetch if there is credit, if messages can be delivered, and if no fetch is in progress.

        If the credit is below half of the prefetch, wait a short time for more credit before new messages are fetched.
        If ``now`` is set, don't wait.
        """
        credit = self._prefetch - self._credit_used
        if self._fetching or self._ended or credit <= 0:
            return
        count = min(credit, FETCH_COUNT_MAX)
        queue_id = self._queue.queue_id
        if self._returned:
            self._returned.sort()
            wanted, self._returned = self._returned[:count], self._returned[count:]
            job = partial(fetch_positions, queue_id=queue_id, positions=wanted)
        elif self._cursor < self._queue.tail:
            if credit * 2 < self._prefetch and not now:
                self._pump_soon()
                return
            wanted = []
            job = partial(fetch_after, queue_id=queue_id, position=self._cursor, count_max=count)
        else:
            return
        self._fetching = True

        def failed(error: Exception) -> None:
            self._fetching = False
            self._returned += wanted
            _log.warning("a fetch failed", extra={"queue": self._queue.name, "error": str(error)})
            self._loop.call_later(RETRY_SECONDS, self.pump)

        try:
            self._database.submit(job, partial(self._fetched, wanted), failed, writes=False)
        except StorageUnavailable as error:
            failed(error)

    # -- how -------------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_later(FETCH_DELAY_SECONDS, self._pump_now)

    def _pump_now(self) -> None:
        self._pump_due = False
        self.pump(now=True)

    def _fetched(self, wanted: Sequence[int], fetched: Fetched) -> None:
        self._fetching = False
        if self._ended:
            return
        messages, cut = fetched
        if wanted:
            if cut and messages:
                self._returned += [position for position in wanted if position > messages[-1][0]]
        elif cut:
            self._cursor = messages[-1][0] + 1
        else:
            self._cursor = self._queue.tail
        if messages:
            self._deliver(messages)
        self.pump()

    def _deliver(self, messages: Sequence[tuple[int, Message]]) -> None:
        tag = self._last_tag
        deliveries: list[Delivery] = []
        for position, message in messages:
            # Tags only have to ascend. A tag that equals the position shares its object, which saves memory.
            tag = position if position > tag else tag + 1
            self._unsettled[tag] = position
            deliveries.append(Delivery(tag=tag, message=message, identified=True, earlier_deliveries=0))
        self._last_tag = tag
        self._credit_used += len(deliveries)
        self._listener.on_deliveries(deliveries)

    def _end(self) -> None:
        """Stop delivering messages. The next channel of the queue delivers the unsettled messages again."""
        self._ended = True
        self._unsettled.clear()
        if self._queue.channel is self:
            self._queue.channel = None


def _nothing(_: sqlite3.Connection) -> None:
    pass


_conforms: type[Channel] = SqliteChannel
