"""A place in the line of one queue: one channel with one consumer, and what is handled while it is its turn.

    waiting --first delivery--> active --leave(), or the channel is lost--> leaving --what runs has ended--> left

RabbitMQ gives messages to one consumer of a queue only; the others stand in line. One learns that it is one's turn by
the first delivery. Nothing is handled before this program holds the queue (`holding`). Leaving finishes and acks what
is running, and closes the channel without cancelling the consumer first: that alone brings all the rest back to the
queue in its order, and gives it to the next in line. Where the channel is lost, what runs is told by `lease_lost`.

Handled one after the other a queue keeps its order: a message that fails is tried again, and all behind it wait.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.common import FieldValue

from popgate_client.amqp.balance import Handover
from popgate_client.amqp.dead_letter import bury
from popgate_client.amqp.delivered import read
from popgate_client.amqp.group import Group
from popgate_client.amqp.holding import PATIENCE_SECONDS, TAKEN_PATIENCE_SECONDS, hold, let_go
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.amqp.working import Burial, Work, again, call_handler, is_worth_handling, judge
from popgate_client.errors import BrokerUnavailable, Conflict, PopgateError
from popgate_client.message import Message

logger = logging.getLogger(__name__)


class Place:
    """`on_change` is called when it becomes active, is refused, or is lost."""

    def __init__(
        self,
        session: Session,
        group: Group,
        queue: str,
        work: Work,
        on_change: Callable[[], None],
        *,
        tag: str,
        behind: frozenset[str],
    ) -> None:
        self.queue = queue
        self.tag = tag
        self.behind = behind
        """The places of others that were known to be in line before this one."""
        self.priority = 0
        self.taken_at = 0.0
        self.is_first = False
        """As others tell it is the active consumer, though it was given nothing yet."""
        self.was_given = False
        """RabbitMQ has given it a message, so it is the active consumer until it leaves."""
        self.is_leaving = False
        self.refusal: PopgateError | None = None
        """Why nothing may be handled here."""
        self._session = session
        self._group = group
        self._work = work
        self._on_change = on_change
        self._channel: AbstractChannel | None = None
        self._undone: deque[DeliveredMessage] = deque()
        self._arrived = asyncio.Event()
        self._running: dict[asyncio.Task[Any], Message] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._beginning: asyncio.Task[str | None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def take(self, priority: int = 0) -> None:
        """Stand in line. Raises: BrokerUnavailable; Conflict where the broker refuses it."""
        self.priority = priority
        channel = self._channel = await self._session.open_channel()
        cast(Any, channel).on_consumer_cancel_callbacks.add(self._note_lost)
        arguments: dict[str, FieldValue] | None = {"x-priority": priority} if priority else None
        try:
            await self._session.call(channel.basic_qos(prefetch_count=self._work.prefetch_count))
            consume = channel.basic_consume(self.queue, self._deliver, consumer_tag=self.tag, arguments=arguments)
            await self._session.call(consume)
        except ChannelRefused as error:
            raise Conflict("conflict", f"RabbitMQ does not let queue {self.queue!r} be consumed: {error}") from error
        cast(Any, channel).closing.add_done_callback(self._note_lost)
        self.taken_at = asyncio.get_running_loop().time()

    @property
    def is_active(self) -> bool:
        """It is this program's turn at the queue, as far as is known."""
        return self.was_given or self.is_first

    @property
    def is_handling(self) -> bool:
        """The queue is held, so that its messages are handled."""
        return self._beginning is not None and self._beginning.done() and self._beginning.result() is not None

    @property
    def standing(self) -> str:
        """For people: "active", "waiting" or "leaving"."""
        if self.is_leaving:
            return "leaving"
        return "active" if self.is_active else "waiting"

    @property
    def has_left(self) -> bool:
        """Nothing of it is at RabbitMQ any more, and nothing runs."""
        return self._leaving is not None and self._leaving.done()

    @property
    def in_line(self) -> bool:
        """Its consumer is at RabbitMQ, as far as is known."""
        return self._channel is not None and not self._channel.is_closed

    def leave_soon(self, *, seconds: float | None = None) -> asyncio.Task[None]:
        """Finish what is running, for `seconds` at most, give the rest back, and leave. A second call is the first."""
        self.is_leaving = True
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(seconds), name="popgate leaving a queue")
        return self._leaving

    # ------------------------------------------------------------ what RabbitMQ does

    async def _deliver(self, delivered: DeliveredMessage) -> None:
        if self.is_leaving:
            return
        self._undone.append(delivered)
        self._arrived.set()
        if not self.was_given:
            self.was_given = True
            self._beginning = asyncio.create_task(self._begin(), name="popgate holding a queue")
            self._on_change()

    def _note_lost(self, _: object) -> None:
        for message in self._running.values():
            if not message.lease_lost:
                message.lease_lost.set()
                self._work.counters.leases_lost += 1
        if self._leaving is None:
            self.leave_soon()
            self._on_change()

    # ------------------------------------------------------------ handling

    async def _begin(self) -> str | None:
        """Returns the name under which the queue is held, None where it is not."""
        try:
            is_taken = self._group.handover is Handover.TAKE and bool(self.behind)
            held_as = await hold(
                self._session,
                self.queue,
                lambda: not self.is_leaving,
                patience_seconds=TAKEN_PATIENCE_SECONDS if is_taken else PATIENCE_SECONDS,
            )
        except PopgateError as error:
            self.refusal = error
            self.leave_soon()
            self._on_change()
            return None
        for _ in range(self._work.workers if held_as else 0):
            self._spawn(self._handle_all())
        return held_as

    async def _handle_all(self) -> None:
        try:
            while not self.is_leaving:
                while not self._undone:
                    self._arrived.clear()
                    await self._arrived.wait()
                await self._handle(self._undone.popleft())
        except BrokerUnavailable as error:  # then the channel is lost, or about to be
            logger.info("a queue is not handled on", extra={"queue": self.queue, "why": str(error)})

    async def _handle(self, delivered: DeliveredMessage) -> None:
        if not is_worth_handling(delivered):
            return await self._ack(delivered)
        message = read(delivered, self._group.topic, self._group.name, self._group.queues.index(self.queue))
        self._work.counters.popped += 1
        while True:
            async with self._work.slots:
                await self._session.prove_alive()
                if self.is_leaving:
                    return None
                delay_seconds = await self._try(delivered, message)
            if delay_seconds is None or self.is_leaving:
                return None
            await asyncio.sleep(delay_seconds)
            message = again(message)

    async def _try(self, delivered: DeliveredMessage, message: Message) -> float | None:
        """Call the handler and settle; returns after how long to try again, None where that is not to be."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = message
        try:
            verdict = judge(self._work, message, await call_handler(self._work, message))
            if isinstance(verdict, float):
                return verdict
            if isinstance(verdict, Burial):
                try:
                    await bury(self._session, self._group, delivered, message, verdict.cause, verdict.reason)
                except BrokerUnavailable as error:
                    logger.warning("a message could not be dead-lettered", extra={"why": str(error)})
                    return self._work.delays.delay_seconds(message.delivery_count)
            await self._ack(delivered)
            if isinstance(verdict, Burial):
                self._work.counters.rejected += 1
            elif not message.lease_lost:
                self._work.counters.acked += 1
            return None
        finally:
            del self._running[task]

    async def _ack(self, delivered: DeliveredMessage) -> None:
        if self._channel is None or not self.in_line:
            return  # it was delivered to somebody else, or will be
        try:
            await self._channel.basic_ack(delivered.delivery_tag or 0, wait=False)
        except Exception as error:  # aiormq raises RuntimeError and its own for one thing
            logger.info("an ack came too late", extra={"queue": self.queue, "why": str(error)})

    # ------------------------------------------------------------ leaving

    async def _leave(self, seconds: float | None) -> None:
        try:
            held_as = None if self._beginning is None else await self._beginning
            for task in self._tasks - self._running.keys():
                task.cancel()
            if busy := self._tasks & self._running.keys():
                await asyncio.wait(busy, timeout=seconds)
        finally:  # also where this is cancelled: no handler outlives the run
            for task in self._tasks:
                task.cancel()
        self._undone.clear()
        if held_as:  # before the channel, with which the queue goes to the next in line: that one wants to hold it
            await let_go(self._session, held_as)
        if self._channel is not None:
            await self._session.close_channel(self._channel)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"popgate queue {self.queue}")
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a queue's handling broke off", exc_info=error, extra={"queue": self.queue})
            self.leave_soon()
