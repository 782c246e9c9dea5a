"""Writes the acks of one channel to the disk.

An ack is written by deleting the acked message. Acks are written in the order in which they arrive, and only one write
runs at a time. The next write contains all acks that arrive during the current write. If a write fails, for example
because the disk is full, it is retried until it succeeds or the channel ends.
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
"""Seconds from the first waiting ack to the deletion, so that the acks of this interval share one commit. No client
waits for the deletion, because the lease record already says that the message is settled."""


class AckWriter:
    """Deletes the acked messages of one queue from the database.

    After each commit, the writer calls ``deleted`` with the number of messages that the commit deleted.
    """

    def __init__(self, database: Database, queue_id: int, name: BrokerQueue, deleted: Callable[[int], None]) -> None:
        self._database = database
        self._queue_id = queue_id
        self._name = name
        self._deleted = deleted
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._waiting: list[int] = []
        """Positions of acked messages whose deletion has not been submitted to the database yet."""
        self._writing: list[int] = []
        self._given_count = 0
        self._handed_in_count = 0
        self._write_due = False
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.written_count = 0
        """Number of acks that are durable. They are the first ones that were added."""

    @property
    def pending_count(self) -> int:
        """The number of messages that are acked but not yet deleted."""
        return len(self._waiting) + len(self._writing)

    def add(self, positions: Sequence[int], ack_count: int) -> None:
        """Delete the messages at ``positions`` after a short delay.

        ``ack_count`` is the number of acks. It can exceed the number of positions, because an ack may refer to a
        message that the channel no longer tracks. Such an ack counts as durable once the messages of the same write are
        deleted.
        """
        self._waiting += positions
        self._given_count += ack_count
        if not self._write_due:
            self._write_due = True
            self._loop.call_later(DELETE_DELAY_SECONDS, self._write)

    async def flush(self) -> None:
        """Wait until all acks added so far are durable.

        Raises: BrokerUnavailable if a write fails, or if the channel ended before its acks were written.
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
        """Stop retrying, and submit the acks that still wait to the database."""
        self._ended = True
        self._hand_in()

    def discard(self) -> None:
        """Drop all acks, because the queue was deleted with all its messages."""
        self._ended = True
        self._waiting.clear()
        self.written_count = self._handed_in_count = self._given_count
        self._tell_flushes(None)

    async def ended(self) -> None:
        """Wait until the last write has succeeded or failed. Call ``end`` first."""
        try:
            # The database reports a read only after all earlier writes, so this read returns after the last write.
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
            if self.written_count == before:  # otherwise, an earlier write failed and the channel has ended
                self.written_count = given
                self._tell_flushes(None)
            self._write()

        def failed(error: Exception) -> None:
            level = logging.DEBUG if isinstance(error, StorageUnavailable) else logging.ERROR  # the store has logged it
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
        """End the ``flush`` calls whose acks are durable. If ``error`` is given, end all ``flush`` calls with it."""
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
