"""Implements the embedded broker, which keeps message queues in the embedded store.

A proxy uses it instead of RabbitMQ.

This module owns the list of queues and their consumers. ``publishing`` routes messages, and ``channel`` delivers them.
``broker_queues`` and ``messages`` own the rows, and ``delays`` owns delayed messages. The rows of queues are also
cached in memory, because no other process uses the file.

One job stores a published batch, or several jobs if it is large. After the commit of a job, the channels of its queues
are notified. A deleted queue disappears at once. A background task, the sweeper, then deletes the messages of the queue
in small steps. After a restart, the sweeper continues.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from popgate.adapters.sqlite.broker_queues import (
    QueueRow,
    declare_queue,
    delete_queues,
    load_queues,
    purge_garbage,
    unbind_topic,
)
from popgate.adapters.sqlite.channel import SqliteChannel, StoredQueue
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import insert_confirmed
from popgate.adapters.sqlite.delayed import DelayedRow, Place, insert_delayed
from popgate.adapters.sqlite.delays import DelayedPublishes
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.group_commit import Job
from popgate.adapters.sqlite.messages import oldest_message_at
from popgate.adapters.sqlite.publishing import Bindings, Part, route, steps, store
from popgate.domain.errors import BrokerUnavailable, Conflict, QueueGone, StartupError
from popgate.domain.names import BrokerQueue, Layout, TopicName
from popgate.ports.broker import (
    Broker,
    Capabilities,
    Channel,
    Listener,
    Outgoing,
    PublishOutcome,
    PublishStatus,
    QueueDepth,
    QueueFacts,
)
from popgate.ports.dedup import AtomicPublisher, DedupEntry

_log = logging.getLogger(__name__)

SWEEP_RETRY_SECONDS = 5.0

T = TypeVar("T")

_CAPABILITIES = Capabilities(name="embedded", adopts_queues=False)
_PUBLISHED = PublishOutcome(status=PublishStatus.PUBLISHED)


def _no_condition(_: sqlite3.Connection) -> bool:
    return True


@contextmanager
def _broker_errors() -> Generator[None]:
    """Translate StorageUnavailable into BrokerUnavailable."""
    try:
        yield
    except StorageUnavailable as error:
        raise BrokerUnavailable(error.detail, retry_after_seconds=error.retry_after_seconds) from error


class SqliteBroker:
    """Implements the broker port on ``database``. The caller opens and closes ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queues: dict[BrokerQueue, StoredQueue] = {}
        self._bindings: Bindings = {}
        self._places: dict[BrokerQueue, Place] = {}
        """For each bound queue, the topic and the queue index whose messages it receives."""
        self._delays = DelayedPublishes(database, self._bound)
        self._sweeper: asyncio.Task[None] | None = None
        self._garbage = asyncio.Event()

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    async def start(self) -> None:
        try:
            for row in await self._database.read(load_queues):
                self._know(row)
            await self._delays.start()
        except StorageUnavailable as error:
            raise StartupError(error.detail) from error
        self._garbage.set()
        self._sweeper = asyncio.create_task(self._sweep(), name="sqlite broker: sweep deleted queues")

    async def stop(self) -> None:
        sweeper, self._sweeper = self._sweeper, None
        await self._delays.stop()
        for queue in list(self._queues.values()):
            if queue.channel is not None:
                queue.channel.lose("the broker was stopped", queue_gone=False)
        self._queues.clear()
        self._places.clear()
        self._bindings.clear()
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.wait({sweeper})

    def unavailable_reason(self) -> str | None:
        return "the embedded broker is not started" if self._sweeper is None else self._database.failure()

    # -- topology --------------------------------------------------------------------------------------------------

    async def declare_topic(self, topic: TopicName) -> None:
        """Do nothing: a topic without groups accepts no messages."""

    async def delete_topic(self, topic: TopicName) -> None:
        def done(_: None) -> None:
            self._bindings.pop(topic, None)

        await self._write(lambda connection: unbind_topic(connection, topic), done)
        with _broker_errors():
            await self._delays.discard(topic)

    async def declare_group(self, layout: Layout) -> None:
        if layout.adopted:
            raise Conflict("adopting queues needs RabbitMQ: start popgate with --amqp-url")
        topic = layout.subscription.topic

        def job(connection: sqlite3.Connection) -> list[QueueRow]:
            rows = [declare_queue(connection, name, topic, index) for index, name in enumerate(layout.queues)]
            return [*rows, declare_queue(connection, layout.dead, None, 0)]

        def done(rows: list[QueueRow]) -> None:
            for row in rows:
                self._know(row)

        await self._write(job, done)

    async def delete_group(self, layout: Layout) -> None:
        self._check_started()
        names = [layout.dead] if layout.adopted else [*layout.queues, layout.dead]
        present = [self._queues[name] for name in names if name in self._queues]
        if not present:
            return
        queue_ids = [queue.queue_id for queue in present]
        # Unbind the queues before the write. Otherwise a message could be reported as published although its queue is
        # about to be deleted.
        bindings = [(queue, *self._unbind(queue)) for queue in present]

        def done(_: None) -> None:
            for queue in present:
                if queue.channel is not None:
                    queue.channel.lose("the queue was deleted", queue_gone=True)
            self._garbage.set()

        def undo() -> None:
            for queue, topic, index in bindings:
                self._bind(queue, topic, index)

        await self._write(lambda connection: delete_queues(connection, queue_ids), done, undo)

    async def inspect(self, queue: BrokerQueue) -> QueueFacts:
        self._check_started()
        stored = self._queues.get(queue)
        if stored is None:
            return QueueFacts(exists=False)
        return QueueFacts(exists=True, ready=stored.ready, consumers=int(stored.channel is not None))

    # -- messages --------------------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Outgoing]) -> list[PublishOutcome]:
        outcomes, parts, delayed = self._routed(messages)
        if not parts and not delayed:
            return outcomes
        first, *others = steps(parts)
        await self._store(first, delayed)
        try:
            for step in others:
                await self._store([part for part in step if self._queues.get(part.queue.name) is part.queue], ())
        except BrokerUnavailable as error:  # some copies are stored
            failed = PublishOutcome(status=PublishStatus.FAILED, detail=error.detail)
            return [failed if outcome is _PUBLISHED else outcome for outcome in outcomes]
        return outcomes

    async def publish_new(self, topic: TopicName, messages: Sequence[Outgoing], entries: Sequence[DedupEntry]) -> bool:
        outcomes, parts, delayed = self._routed(messages)
        if any(outcome is not _PUBLISHED for outcome in outcomes) or len(steps(parts)) > 1:
            return False
        now = self._database.now()
        return await self._store(parts, delayed, lambda connection: insert_confirmed(connection, topic, entries, now))

    def _routed(self, messages: Sequence[Outgoing]) -> tuple[list[PublishOutcome], list[Part], list[DelayedRow]]:
        self._check_started()
        outcomes = [_PUBLISHED] * len(messages)
        return outcomes, *route(messages, self._queues, self._bindings, outcomes, self._database.now())

    async def _store(
        self, parts: Sequence[Part], delayed: Sequence[DelayedRow], condition: Job[bool] = _no_condition
    ) -> bool:
        """Store ``parts`` and ``delayed`` in one transaction, if ``condition`` returns True in this transaction.

        If ``condition`` returns False, store nothing. Return whether the messages were stored.
        """
        is_stored = False
        firsts = [part.queue.take_positions(len(part.messages)) for part in parts]
        rows = [part.rows(first) for part, first in zip(parts, firsts, strict=True)]

        def job(connection: sqlite3.Connection) -> list[int] | None:
            if not condition(connection):
                return None
            if delayed:
                insert_delayed(connection, delayed)
            return store(connection, parts, rows)

        def done(counts: list[int] | None) -> None:
            nonlocal is_stored
            if counts is None:
                return
            is_stored = True
            if delayed:
                self._delays.added(delayed)
            for part, first, count in zip(parts, firsts, counts, strict=True):
                if part.once:
                    part.queue.published_once(first + len(part.messages), count)
                else:
                    part.queue.published(first, part.messages)

        await self._write(job, done)
        return is_stored

    async def consume(self, queue: BrokerQueue, layout: Layout, prefetch: int, listener: Listener) -> Channel:
        self._check_started()
        stored = self._queues.get(queue)
        if stored is None:
            raise QueueGone(f"queue {queue} does not exist; create its group again")
        if stored.channel is not None:
            raise Conflict(f"queue {queue} is consumed already")
        return SqliteChannel(self._database, stored, prefetch, listener)

    async def let_go(self, queue: BrokerQueue) -> None:
        """Do nothing, because no other process could consume the queue."""

    async def depth(self, queues: Sequence[BrokerQueue]) -> list[QueueDepth]:
        self._check_started()
        found = [self._queues.get(name) for name in queues]
        return [
            QueueDepth(ready=None)
            if queue is None
            else QueueDepth(
                ready=queue.ready, consumers=int(queue.channel is not None), delayed=self._delayed_for(queue)
            )
            for queue in found
        ]

    async def oldest_at(self, queue: BrokerQueue) -> float | None:
        self._check_started()
        stored = self._queues.get(queue)
        if stored is None or not stored.stored:
            return None
        return await self._database.read(partial(oldest_message_at, queue_id=stored.queue_id), BrokerUnavailable)

    def look_at_the_clock(self) -> None:
        """Check which delayed messages are due. Tests call this after they have advanced a manual clock."""
        self._delays.look()

    # -- how -------------------------------------------------------------------------------------------------------

    def _know(self, row: QueueRow) -> None:
        """Add a stored queue and its binding to the cache in memory.

        If the queue is already cached, change only the binding.
        """
        queue = self._queues.get(row.name)
        if queue is None:
            queue = StoredQueue(row.queue_id, row.name, stored=row.stored, next_position=row.next_position)
        self._bind(queue, row.topic, row.queue_index)

    def _bind(self, queue: StoredQueue, topic: TopicName | None, index: int | None) -> None:
        self._queues[queue.name] = queue
        if topic is not None and index is not None:
            bound = self._bindings.setdefault(topic, {}).setdefault(index, [])
            if queue not in bound:
                bound.append(queue)
            self._places[queue.name] = topic, index

    def _bound(self, place: Place) -> Sequence[StoredQueue]:
        """Return the queues that receive a delayed message that was published to ``place``.

        If the topic now has fewer queue indexes than when the message was published, the index is reduced modulo the
        present number of indexes.
        """
        topic, index = place
        by_index = {number: bound for number, bound in self._bindings.get(topic, {}).items() if bound}
        return by_index[index % (max(by_index) + 1)] if by_index else ()

    def _delayed_for(self, queue: StoredQueue) -> int:
        place = self._places.get(queue.name)
        return 0 if place is None else self._delays.count(place)

    def _unbind(self, queue: StoredQueue) -> tuple[TopicName | None, int | None]:
        """Remove the queue from the cache in memory.

        Return the topic and index with which ``_bind`` can add it again.
        """
        del self._queues[queue.name]
        self._places.pop(queue.name, None)
        for topic, by_index in self._bindings.items():
            for index, bound in by_index.items():
                if queue in bound:
                    bound.remove(queue)
                    return topic, index
        return None, None

    async def _write(self, job: Job[T], done: Callable[[T], None], undo: Callable[[], None] | None = None) -> None:
        """Commit ``job``. Then call ``done`` with its result, or ``undo`` if the commit failed.

        The callback is called even if the caller of this method was cancelled meanwhile.

        Raises: BrokerUnavailable.
        """
        self._check_started()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finished(result: T) -> None:
            try:
                done(result)
            finally:
                if not waiter.done():
                    waiter.set_result(None)

        def failed(error: Exception) -> None:
            if undo is not None:
                undo()
            if not waiter.done():
                waiter.set_exception(error)

        try:
            self._database.submit(job, finished, failed, writes=True)
        except StorageUnavailable as error:
            failed(error)
        with _broker_errors():
            await waiter

    async def _sweep(self) -> None:
        """Delete the messages of deleted queues in the background, in small steps."""
        while True:
            await self._garbage.wait()
            try:
                if not await self._database.write(purge_garbage):
                    self._garbage.clear()
            except StorageUnavailable as error:
                _log.warning("deleted queues are swept later", extra={"reason": error.detail})
                await asyncio.sleep(SWEEP_RETRY_SECONDS)

    def _check_started(self) -> None:
        if self._sweeper is None:
            raise BrokerUnavailable("the embedded broker is not started")


_conforms: tuple[type[Broker], type[AtomicPublisher]] = (SqliteBroker, SqliteBroker)
