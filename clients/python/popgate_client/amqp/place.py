"""A place in the line of one queue: one channel with one consumer, and the messages handled while it is active.

    waiting --first delivery--> active --leave(), or the channel is lost--> leaving --running handlers ended--> left

RabbitMQ delivers a queue's messages to only one consumer; the others wait in line. A consumer learns from the first
delivery that it is active. No message is handled before this program holds the queue (`holding`). Leaving waits for
running handlers, acks their messages, and closes the channel without cancelling the consumer first: only this returns
the other messages to the queue in their order, and gives the queue to the next consumer in line. If the channel is
lost, `lease_lost` is set for running handlers.

If messages are handled one after the other, the queue keeps its order: a message that fails is tried again, and all
behind it wait.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.common import FieldValue

from popgate_client.amqp.balance import Handover
from popgate_client.amqp.dead_letter import publish_dead_letter
from popgate_client.amqp.delivered import read
from popgate_client.amqp.group import Group
from popgate_client.amqp.holding import PATIENCE_SECONDS, TAKEN_PATIENCE_SECONDS, hold, let_go
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.amqp.tries import Tries
from popgate_client.amqp.working import (
    DeadLetterCause,
    Work,
    again,
    call_handler,
    is_worth_handling,
    judge,
    settlement_of,
)
from popgate_client.errors import BrokerUnavailable, Conflict, PopgateError
from popgate_client.facts import FactLogger
from popgate_client.message import Message, Verb

logger = FactLogger(__name__)


class Place:
    """A place in a queue's line. `on_change` is called when it becomes active, is rejected, or is lost."""

    def __init__(
        self,
        session: Session,
        group: Group,
        queue: str,
        work: Work,
        on_change: Callable[[], None],
        *,
        client_id: str,
        tag: str,
        behind: frozenset[str],
    ) -> None:
        self.queue = queue
        self.tag = tag
        self.behind = behind
        """Tags of the other members' places that were known to be in line before this one."""
        self.priority = 0
        self.taken_at = 0.0
        self.is_first = False
        """Whether it is the active consumer according to the other members, although nothing was delivered yet."""
        self.was_given = False
        """Whether RabbitMQ has delivered a message; then it is the active consumer until it leaves."""
        self.is_leaving = False
        self.refusal: PopgateError | None = None
        """Why no message may be handled here."""
        self._session = session
        self._group = group
        self._client_id = client_id
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
        """Start to wait in line. Raises: BrokerUnavailable; Conflict if the broker rejects the consumer."""
        self.priority = priority
        channel = self._channel = await self._session.open_channel()
        cast(Any, channel).on_consumer_cancel_callbacks.add(self._note_lost)
        arguments: dict[str, FieldValue] | None = {"x-priority": priority} if priority else None
        try:
            await self._session.call(channel.basic_qos(prefetch_count=self._work.prefetch_count))
            consume = channel.basic_consume(self.queue, self._deliver, consumer_tag=self.tag, arguments=arguments)
            await self._session.call(consume)
        except ChannelRefused as error:
            raise Conflict("conflict", f"RabbitMQ rejects a consumer of queue {self.queue!r}: {error}") from error
        cast(Any, channel).closing.add_done_callback(self._note_lost)
        self.taken_at = asyncio.get_running_loop().time()

    @property
    def is_active(self) -> bool:
        """Whether this is the active consumer of the queue, as far as is known."""
        return self.was_given or self.is_first

    @property
    def is_handling(self) -> bool:
        """Whether the queue is held, so that its messages are handled."""
        return self._beginning is not None and self._beginning.done() and self._beginning.result() is not None

    @property
    def standing(self) -> str:
        """The state to show: "active", "waiting" or "leaving"."""
        if self.is_leaving:
            return "leaving"
        return "active" if self.is_active else "waiting"

    @property
    def has_left(self) -> bool:
        """Whether the channel is closed and no handler runs."""
        return self._leaving is not None and self._leaving.done()

    @property
    def in_line(self) -> bool:
        """Whether RabbitMQ has its consumer, as far as is known."""
        return self._channel is not None and not self._channel.is_closed

    def leave_soon(self, *, seconds: float | None = None) -> asyncio.Task[None]:
        """Wait up to `seconds` for running handlers, return the other messages, and leave. A second call returns the
        same task."""
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
        """Hold the queue and start the workers; return the name under which it is held, None if it is not."""
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
        except BrokerUnavailable as error:  # the channel is lost, or about to be
            logger.info("the handling of a queue has stopped", extra={"queue": self.queue, "cause": str(error)})

    async def _handle(self, delivered: DeliveredMessage) -> None:
        if not is_worth_handling(delivered):
            return await self._ack(delivered)
        message = read(delivered, self._group.topic, self._group.name, self._group.queues.index(self.queue))
        self._work.counters.popped += 1
        tries = Tries(self._client_id, error_texts=self._work.error_texts)
        while True:
            async with self._work.slots:
                await self._session.prove_alive()
                if self.is_leaving:
                    return None
                delay_seconds = await self._try(delivered, message, tries)
            if delay_seconds is None or self.is_leaving:
                return None
            await asyncio.sleep(delay_seconds)
            message = again(message)

    async def _try(self, delivered: DeliveredMessage, message: Message, tries: Tries) -> float | None:
        """Call the handler and settle the message; return the seconds before the next try, None if there is none."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = message
        try:
            began_at = time.time()
            settlement = settlement_of(self._work, message, await call_handler(self._work, message))
            if settlement.verb is not Verb.ACK:
                tries.note(message, settlement.verb, settlement.entry, began_at=began_at, ended_at=time.time())
            verdict = judge(self._work, message, settlement)
            if isinstance(verdict, float | int):
                return verdict
            try:
                await self._settle(delivered, message, verdict, tries)
            except BrokerUnavailable as error:
                logger.warning("a message could not be dead-lettered", extra={"cause": str(error)})
                return self._work.delays.delay_seconds(message.delivery_count)
            if isinstance(verdict, DeadLetterCause):
                self._work.counters.rejected += 1
            elif not message.lease_lost:
                self._work.counters.acked += 1
            return None
        finally:
            del self._running[task]

    async def _settle(
        self, delivered: DeliveredMessage, message: Message, cause: DeadLetterCause | None, tries: Tries
    ) -> None:
        """Ack a message, after its dead letter if it has a `cause`. Raises: BrokerUnavailable."""
        with self._work.settling(message, "ack" if cause is None else "reject"):
            if cause is not None:
                await publish_dead_letter(self._session, self._group, delivered, message, cause, tries)
            await self._ack(delivered)

    async def _ack(self, delivered: DeliveredMessage) -> None:
        if self._channel is None or not self.in_line:
            return  # the message was delivered to another consumer, or will be
        try:
            await self._channel.basic_ack(delivered.delivery_tag or 0, wait=False)
        except Exception as error:  # aiormq raises RuntimeError or errors of its own
            logger.info("an ack came too late", extra={"queue": self.queue, "cause": str(error)})

    # ------------------------------------------------------------ leaving

    async def _leave(self, seconds: float | None) -> None:
        try:
            held_as = None if self._beginning is None else await self._beginning
            for task in self._tasks - self._running.keys():
                task.cancel()
            if busy := self._tasks & self._running.keys():
                await asyncio.wait(busy, timeout=seconds)
        finally:  # also if this is cancelled: no handler outlives the run
            for task in self._tasks:
                task.cancel()
        self._undone.clear()
        if held_as:  # before closing the channel, because the next consumer in line must then hold the queue
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
            logger.error("the handling of a queue has failed", exc_info=error, extra={"queue": self.queue})
            self.leave_soon()
