"""The broker port on a ``BrokerServer``, over connections that have latency and may be cut.

Each channel keeps its deliveries in the RabbitMQ adapter's own bookkeeping (``Settlements``) and sends the frames that
it produces.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from itertools import count
from struct import Struct
from typing import Any, TypeVar

from popgate.adapters.rabbitmq.settlements import Settlements
from popgate.domain.errors import BrokerUnavailable, QueueGone
from popgate.domain.names import BrokerQueue, Layout, TopicName
from popgate.ports.broker import (
    Broker,
    Capabilities,
    Channel,
    Delivery,
    Listener,
    Outgoing,
    PublishOutcome,
    PublishStatus,
    QueueDepth,
    QueueFacts,
)
from simulator.broker_server import BrokerServer, Pushed, ServerChannel
from simulator.wires import Pipe, Weather

T = TypeVar("T")

UNKNOWN = PublishOutcome(status=PublishStatus.FAILED, detail="the connection was lost before the confirmation")
RECONNECT_SECONDS = 0.1, 1.5
HOLD_SECONDS = 0.05
"""Seconds between two checks whether another proxy has released a queue."""
_NACK = 120
_frame = Struct(">BHIHHQBB")
_LOST = "the connection to RabbitMQ was lost"


class Connection:
    """Connection of a process to the server, from its beginning to its end. ``context``: the process's."""

    def __init__(self, server: BrokerServer, weather: Weather, context: Context, lost: Callable[[], None]) -> None:
        self.server = server
        self.is_open = True
        self.channels: list[SimulatedChannel] = []
        self.waiting: dict[asyncio.Future[Any], None] = {}
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._context = context
        self.up, self.down = Pipe(weather), Pipe(weather, context)
        self.at_server: list[ServerChannel] = []

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` at the server and return its answer. Raises: BrokerUnavailable, if the connection ends first."""
        if not self.is_open:
            raise BrokerUnavailable(_LOST)
        answered: asyncio.Future[T] = self._loop.create_future()
        self.waiting[answered] = None

        def arrive() -> None:
            self.down.send(partial(_answer, answered, work()))

        self.up.send(arrive)
        try:
            return await answered
        finally:
            del self.waiting[answered]

    def cut(self, *, loses: int | None = None) -> None:
        """End the connection. The process's latest messages are lost: all that are under way, or ``loses`` of them.
        The server's messages under way are lost, too.
        """
        self.up.cut(loses=loses, then=self._close_at_server)
        self.down.cut()
        self._loop.call_soon(self._end, context=self._context)

    def _close_at_server(self) -> None:
        for channel in self.at_server:
            channel.close()
        self.server.ended(self)

    def _end(self) -> None:
        """Runs in the process."""
        if not self.is_open:
            return
        self.is_open = False
        for answered in list(self.waiting):
            if not answered.done():
                answered.set_exception(BrokerUnavailable(_LOST))
        for channel in list(self.channels):
            channel.lost(_LOST, queue_gone=False)
        self._lost()


def _answer(answered: asyncio.Future[T], answer: T) -> None:
    if not answered.done():
        answered.set_result(answer)


class SimulatedBroker:
    """``chance`` decides how long a reconnect takes. ``context``: the one its process runs in."""

    def __init__(
        self, server: BrokerServer, weather: Weather, seconds: Callable[[float, float], float], context: Context
    ) -> None:
        self._server = server
        self._weather = weather
        self._seconds = seconds
        self._context = context
        self._consuming: Connection | None = None
        self._publishing: Connection | None = None
        self._is_stopped = True
        self._wanted: set[BrokerQueue] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="in memory", adopts_queues=False)

    async def start(self) -> None:
        self._is_stopped = False
        self._connect(consuming=True)
        self._connect(consuming=False)

    async def stop(self) -> None:
        self._is_stopped = True
        for connection in self.connections():
            connection.cut(loses=0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def unavailable_reason(self) -> str | None:
        return None if len(self.connections()) == 2 else _LOST

    def connections(self) -> list[Connection]:
        """Return the open connections."""
        return [one for one in (self._consuming, self._publishing) if one is not None and one.is_open]

    def _connect(self, *, consuming: bool) -> None:
        if self._is_stopped:
            return
        connection = Connection(self._server, self._weather, self._context, partial(self._lost, consuming=consuming))
        if consuming:
            self._consuming = connection
        else:
            self._publishing = connection

    def _lost(self, *, consuming: bool) -> None:
        if not self._is_stopped:
            wait = self._seconds(*RECONNECT_SECONDS)
            asyncio.get_running_loop().call_later(wait, partial(self._connect, consuming=consuming))

    def _open(self, connection: Connection | None) -> Connection:
        if connection is None or not connection.is_open:
            raise BrokerUnavailable(_LOST)
        return connection

    # -- topology -----------------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[], T]) -> T:
        return await self._open(self._consuming).call(work)

    async def declare_topic(self, topic: TopicName) -> None:
        await self._do(partial(self._server.declare_topic, topic))

    async def delete_topic(self, topic: TopicName) -> None:
        await self._do(partial(self._server.delete_topic, topic))

    async def declare_group(self, layout: Layout) -> None:
        await self._do(partial(self._server.declare_group, layout))

    async def delete_group(self, layout: Layout) -> None:
        await self._do(partial(self._server.delete_group, layout))

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        depth = await self._do(partial(self._server.depth, queue))
        return QueueFacts(
            exists=depth.ready is not None, kind="quorum", ready=depth.ready or 0, consumers=depth.consumers
        )

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        return await self._do(lambda: [self._server.depth(queue) for queue in queues])

    async def oldest_at(self, queue: BrokerQueue) -> float | None:
        return None

    # -- messages -----------------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        connection = self._open(self._publishing)
        try:
            return await connection.call(lambda: [self._server.publish(one) for one in messages])
        except BrokerUnavailable:
            return [UNKNOWN] * len(messages)

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        connection = self._open(self._consuming)
        if queue != layout.dead:
            connection = await self._held(queue)
        channel = SimulatedChannel(connection, queue, listener)
        await channel.open(prefetch)
        return channel

    async def _held(self, queue: BrokerQueue) -> Connection:
        """Same as the RabbitMQ adapter's ``holds``."""
        self._wanted.add(queue)
        while queue in self._wanted:
            connection = self._open(self._consuming)
            if await connection.call(partial(self._server.hold, queue, connection)):
                if queue in self._wanted:
                    return connection
                await self.let_go(queue)
            await asyncio.sleep(HOLD_SECONDS)
        raise BrokerUnavailable(f"this proxy may no longer consume queue {queue!r}")

    async def let_go(self, queue: BrokerQueue) -> None:
        self._wanted.discard(queue)
        connection = self._consuming
        if connection is not None and connection.is_open:
            with contextlib.suppress(BrokerUnavailable):
                await connection.call(partial(self._server.let_go, queue, connection))


class SimulatedChannel:
    """Implements the port's ``Channel``."""

    _numbers = count(1)

    def __init__(self, connection: Connection, queue: BrokerQueue, listener: Listener) -> None:
        self._connection = connection
        self._queue = queue
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._settlements = Settlements(1)
        self._is_opening = True
        self._is_ended = False
        self._early: list[Delivery] = []
        self._write_scheduled = False
        self._calls = asyncio.Lock()
        self._prefetch = 0
        self._consumer = 0
        self._at_server: ServerChannel | None = None

    @property
    def unsettled_seconds_max(self) -> float | None:
        return self._connection.server.unsettled_seconds_max

    async def open(self, prefetch: int) -> None:
        """Open the channel. Raises: QueueGone, BrokerUnavailable."""
        self._connection.channels.append(self)
        down = self._connection.down
        self._prefetch = prefetch
        self._consumer = 1
        self._settlements.begin(prefetch)

        def at_server() -> bool:
            channel = self._connection.server.open(
                self._queue,
                lambda pushed: down.send(partial(self._deliver, pushed)),
                lambda reason, gone: down.send(partial(self.lost, reason, queue_gone=gone)),
            )
            if channel is None:
                return False
            self._at_server = channel
            self._connection.at_server.append(channel)
            channel.consume(prefetch)
            return True

        try:
            is_there = await self._connection.call(at_server)
            if not is_there:
                raise QueueGone(f"queue {self._queue!r} does not exist")
            if self._is_ended:
                raise BrokerUnavailable(_LOST)
        except BaseException:
            self._end()
            self._connection.up.send(self._close_at_server)
            raise
        self._is_opening = False
        if self._early:
            self._loop.call_soon(self._deliver_early)

    # -- the port -----------------------------------------------------------------------------------------------

    def ack(self, tags: Sequence[int]) -> None:
        if not self._is_ended:
            self._settlements.ack(tags)
            self._write_soon()

    def requeue(self, tags: Sequence[int]) -> None:
        if not self._is_ended:
            self._settlements.requeue(tags)
            self._write_soon()

    async def flush(self) -> None:
        self._write()
        await asyncio.sleep(0)

    async def resize(self, prefetch: int) -> None:
        async with self._calls:
            if self._is_ended or prefetch == self._prefetch == 0:
                return
            self._write()
            self._prefetch = prefetch
            self._consumer += 1

            def cancel() -> None:
                if self._at_server is not None:
                    self._at_server.cancel()

            def consume() -> None:
                if self._at_server is not None:
                    self._at_server.consume(prefetch)

            await self._call(cancel)
            # Deliveries under way to the former consumer arrive before the answer.
            answered = self._call(consume)
            self._settlements.begin(prefetch)
            await answered

    async def backlog(self) -> int:
        async with self._calls:
            if self._is_ended:
                return 0
            self._write()
            return await self._call(lambda: 0 if self._at_server is None else self._at_server.ready_count())

    def settled_evidence(self) -> int:
        return self._settlements.proved_acks()

    async def close(self) -> None:
        if self._is_ended:
            return
        self._write()
        self._end()
        try:
            await self._connection.call(self._close_at_server)
        except BrokerUnavailable:
            return

    # -- inside -------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]:
        return self._connection.call(work)

    def _close_at_server(self) -> None:
        if self._at_server is not None:
            self._at_server.close()

    def _deliver(self, pushed: Sequence[Pushed]) -> None:
        if self._is_ended:
            return
        taken: list[Delivery] = []
        for tag, message, returns, consumer in pushed:
            self._settlements.deliver(tag, present=consumer == self._consumer)
            taken.append(
                Delivery(tag=tag, message=message, identified=True, earlier_deliveries=returns, returned=returns > 0)
            )
        if self._is_opening or self._early:
            self._early += taken
        else:
            self._listener.on_deliveries(taken)

    def _deliver_early(self) -> None:
        early, self._early = self._early, []
        if early and not self._is_ended:
            self._listener.on_deliveries(early)

    def _write_soon(self) -> None:
        if not self._write_scheduled:
            self._write_scheduled = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._write_scheduled = False
        if self._is_ended or not (frames := self._settlements.take_frames()):
            return
        self._connection.up.send(partial(self._read, frames))

    def _read(self, frames: bytes) -> None:
        """Runs at the server."""
        channel = self._at_server
        if channel is None:
            return
        for _, _, _, _, method, tag, flags, _ in _frame.iter_unpack(frames):
            if method == _NACK:
                channel.settle([tag], requeue=True)
            elif flags:
                channel.ack_through(tag)
            else:
                channel.settle([tag], requeue=False)

    def _end(self) -> None:
        self._is_ended = True
        self._early.clear()
        if self in self._connection.channels:
            self._connection.channels.remove(self)

    def lost(self, reason: str, *, queue_gone: bool) -> None:
        """Handle the end of the channel by the server or the connection."""
        if self._is_ended:
            return
        was_opening = self._is_opening
        self._end()
        if not was_opening:
            self._listener.on_channel_lost(reason, queue_gone=queue_gone)


_conforms: tuple[type[Broker], type[Channel]] = (SimulatedBroker, SimulatedChannel)
