"""Writes the acks of one channel to the disk.

Acks are written in the order in which they were given, one write at a time. Acks that arrive during a write are part of
the next write. If a write fails (a full disk), it is retried until it succeeds or the channel ends.
"""

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.messages import delete_messages
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.names import BrokerQueue

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
DELETE_DELAY_SECONDS = 0.1
"""Seconds that a deletion waits for others, so that they share a commit. No client waits for the deletion, because the
lease record has already settled the message."""


class AckWriter:
    """Deletes acked messages of a queue.

    After each commit, it calls ``deleted`` with the number of deleted messages.
    """

    def __init__(self, database: Database, queue_id: int, name: BrokerQueue, deleted: Callable[[int], None]) -> None:
        self._database = database
        self._queue_id = queue_id
        self._name = name
        self._deleted = deleted
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._waiting: list[int] = []
        """Positions whose deletion is not yet submitted."""
        self._writing: list[int] = []
        self._given_count = 0
        self._handed_in_count = 0
        self._write_due = False
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.written_count = 0
        """Number of the given acks, in their order, that are durable."""

    @property
    def pending_count(self) -> int:
        """The number of messages that are acked but not yet deleted."""
        return len(self._waiting) + len(self._writing)

    def add(self, positions: Sequence[int], ack_count: int) -> None:
        """Write these acks soon. ``ack_count`` is their number: an ack may have no message.

        Acks without a message become durable together with the others.
        """
        self._waiting += positions
        self._given_count += ack_count
        if not self._write_due:
            self._write_due = True
            self._loop.call_later(DELETE_DELAY_SECONDS, self._write)

    async def flush(self) -> None:
        """Return when all acks given so far are durable.

        Raises: BrokerUnavailable if a write fails, or the channel has ended.
        """
        if self.written_count == self._given_count:
            return
        if self._ended:
            raise self._lost()
        flushed: asyncio.Future[None] = self._loop.create_future()
        self._flushes.append((self._given_count, flushed))
        self._write()
        await flushed

    def end(self) -> None:
        """Submit the waiting acks. They are not retried if this write fails."""
        self._ended = True
        self._hand_in()

    def discard(self) -> None:
        """Drop all acks, because the queue was deleted with all its messages."""
        self._ended = True
        self._waiting.clear()
        self.written_count = self._handed_in_count = self._given_count
        self._tell_flushes(None)

    async def ended(self) -> None:
        """Return when the last write has succeeded or failed."""
        try:
            # Outcomes arrive in the order of submission.
            await self._database.read(_nothing)
        except StorageUnavailable as error:
            _log.warning("acks may be lost with their channel", extra={"queue": self._name, "error": error.detail})
        self._tell_flushes(self._lost())

    def _write(self) -> None:
        self._write_due = False
        if not self._ended and self._handed_in_count == self.written_count:
            self._hand_in()

    def _hand_in(self) -> None:
        if self._given_count == self._handed_in_count:
            return
        positions, self._waiting = self._waiting, []
        before, given = self._handed_in_count, self._given_count

        def job(connection: sqlite3.Connection) -> int:
            return delete_messages(connection, self._queue_id, positions)

        def done(count: int) -> None:
            self._writing = []
            self._deleted(count)
            if self.written_count == before:  # otherwise earlier acks have failed and the channel has ended
                self.written_count = given
                self._tell_flushes(None)
            self._write()

        def failed(error: Exception) -> None:
            level = logging.DEBUG if isinstance(error, StorageUnavailable) else logging.ERROR  # the store has said why
            _log.log(level, "acks could not be written", extra={"queue": self._name, "error": str(error)})
            self._writing = []
            self._waiting = positions + self._waiting
            self._handed_in_count = before
            self._tell_flushes(error)
            if not self._ended:
                self._loop.call_later(RETRY_SECONDS, self._write)

        self._writing = positions
        self._handed_in_count = given
        try:
            self._database.submit(job, done, failed, writes=True)
        except StorageUnavailable as error:
            failed(error)

    def _tell_flushes(self, error: Exception | None) -> None:
        """Answer the flushes whose acks are written. With an ``error``, answer all flushes."""
        while self._flushes and (error is not None or self._flushes[0][0] <= self.written_count):
            flushed = self._flushes.popleft()[1]
            if flushed.done():
                continue
            if isinstance(error, StorageUnavailable):
                flushed.set_exception(BrokerUnavailable(error.detail, retry_after_seconds=error.retry_after_seconds))
            elif error is not None:
                flushed.set_exception(error)
            else:
                flushed.set_result(None)

    def _lost(self) -> BrokerUnavailable:
        return BrokerUnavailable(f"the channel on {self._name} ended before its acks were written")


def _nothing(_: sqlite3.Connection) -> None:
    pass
