"""Moves each delayed message to the queues of its topic when the message is due.

This module owns the timer, and the number of delayed messages of each topic and queue index (``Place``). ``delayed``
owns the rows. The broker determines the queues of a topic. Messages are moved in small steps, and each step has its own
transaction. So other jobs can run between the steps, even if many messages are due at once.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from popgate.adapters.sqlite.channel import StoredQueue
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.delayed import (
    DUE_BYTES_MAX,
    DelayedRow,
    Due,
    Move,
    Place,
    count_delayed,
    find_due,
    move_due,
)
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.domain.names import TopicName

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
SLEEP_SECONDS_MAX = 3600.0
NEVER = float("inf")


class DelayedPublishes:
    """Counts and moves the delayed messages of one store.

    A ``Place`` is a topic and a queue index. ``targets`` returns the queues that receive the messages of a place.
    """

    def __init__(self, database: Database, targets: Callable[[Place], Sequence[StoredQueue]]) -> None:
        self._database = database
        self._targets = targets
        self._counts: dict[Place, int] = {}
        self._next_due = NEVER
        self._news = asyncio.Event()
        self._moving = asyncio.Lock()
        """Locked from the search for messages until they are moved, so that no message is moved or counted twice."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the numbers of delayed messages, and start the timer. Raises: StorageUnavailable."""
        self._counts, earliest = await self._database.read(count_delayed)
        self._next_due = NEVER if earliest is None else earliest
        self._task = asyncio.create_task(self._run(), name="sqlite broker: delayed publishes")

    async def stop(self) -> None:
        """Stop the timer. Idempotent. Messages that are due but not moved yet will be moved after the next start."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def count(self, place: Place) -> int:
        """Return the number of delayed messages of ``place``."""
        return self._counts.get(place, 0)

    def added(self, rows: Sequence[DelayedRow]) -> None:
        """Count ``rows``, which have just been committed, and set the timer for them."""
        for due_at, topic, index, *_ in rows:
            self._counts[topic, index] = self._counts.get((topic, index), 0) + 1
            self._next_due = min(self._next_due, due_at)
        self.look()

    def look(self) -> None:
        """Check the clock at once, because a message may be due earlier than the timer expects."""
        self._news.set()

    async def discard(self, topic: TopicName) -> None:
        """Delete the delayed messages of a topic that has no queues, in small steps. Raises: StorageUnavailable."""
        since: float | None = 0.0
        while since is not None:
            since = await self._move(NEVER, since=since, topic=topic)

    async def _run(self) -> None:
        while True:
            wait = self._next_due - self._database.now()
            if wait > 0.0:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(wait, SLEEP_SECONDS_MAX)):
                        await self._news.wait()
                continue
            now = self._database.now()
            self._next_due = NEVER  # ``added`` lowers this time for rows that are added from now on
            try:
                following = await self._move(now)
                self._next_due = min(self._next_due, NEVER if following is None else following)
            except StorageUnavailable as error:
                self._next_due = now
                _log.warning("delayed messages have to wait", extra={"reason": error.detail})
                await asyncio.sleep(RETRY_SECONDS)

    async def _move(self, now: float, *, since: float = 0.0, topic: TopicName | None = None) -> float | None:
        """Move the messages of one step, which ``find_due`` finds, and return the time at which the next one is due.

        Raises: StorageUnavailable if nothing was moved.
        """
        async with self._moving:
            due = self._one_step(await self._database.read(partial(find_due, now=now, since=since, topic=topic)), now)
            if due.messages:
                await self._hand_on(due)
        return due.following

    def _one_step(self, due: Due, now: float) -> Due:
        """Return the first messages, as many as one step may copy to all of their queues. The next ones are due now."""
        copies = {place: len(self._targets(place)) for place in {place for _, place, _ in due.messages}}
        size = 0
        for count, (_, place, body_bytes) in enumerate(due.messages):
            if size >= DUE_BYTES_MAX:
                return Due(due.messages[:count], now)
            size += body_bytes * copies[place]
        return due

    async def _hand_on(self, due: Due) -> None:
        """Move the messages of one step to their queues. Raises: StorageUnavailable if nothing was moved."""
        by_place: dict[Place, list[int]] = {}
        for delayed_id, place, _ in due.messages:
            by_place.setdefault(place, []).append(delayed_id)
        queues: list[StoredQueue] = []
        moves: list[Move] = []
        for place, ids in by_place.items():
            for queue in self._targets(place):
                queues.append(queue)
                moves.append(Move(queue.queue_id, queue.take_positions(len(ids)), ids))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(counts: Sequence[int]) -> None:
            # Update the queues in this callback, not later in the task. The next callback may report a fetch that has
            # already seen these messages.
            for queue, move, count in zip(queues, moves, counts, strict=True):
                queue.published_once(move.first + len(move.ids), count)
            for place, ids in by_place.items():
                self._counts[place] -= len(ids)
                if not self._counts[place]:
                    del self._counts[place]
            if not waiter.done():
                waiter.set_result(None)

        def failed(error: Exception) -> None:
            if not waiter.done():
                waiter.set_exception(error)

        def job(connection: sqlite3.Connection) -> list[int]:
            return move_due(connection, moves, [delayed_id for delayed_id, *_ in due.messages])

        self._database.submit(job, done, failed, writes=True)
        await waiter
