"""Implements the journal port on Parquet files: the part that runs on the event loop.

The event loop only copies the fields of events into a buffer (``rows``). A thread converts and writes them
(``writer``). If the buffer is full, further events are dropped and counted. The event loop never waits for space in the
buffer. As soon as the buffer has space, an event in the journal reports how many events were dropped.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from popgate.adapters.journal_parquet.places import Place
from popgate.adapters.journal_parquet.rows import QUEUE_INDEX, WIDTH, SharedRows
from popgate.adapters.journal_parquet.writer import Rotation, Writer
from popgate.domain.errors import StartupError
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.journal.figures import JournalFigures
from popgate.ports.clock import Clock
from popgate.ports.journal import EventKind, Journal, JournalSubject

_log = logging.getLogger(__name__)

START_SECONDS = 20.0
"""Maximum number of seconds that ``start`` waits until the place is open."""
BUFFERED_FILES_MAX = 2
BUFFERED_EVENTS_MIN = 100_000
"""Minimum capacity of the buffer, in events. The buffer has the capacity of ``BUFFERED_FILES_MAX`` full files: one that
is being written, and one that is being filled. If files are small, it has this minimum capacity. An event takes at most
about 400 bytes of memory, without its names."""


def buffered_events_max(rotation: Rotation) -> int:
    return max(BUFFERED_EVENTS_MIN, BUFFERED_FILES_MAX * rotation.events)


class ParquetJournal:
    """Writes the events of one proxy to files. ``name`` is the name of the place in error messages."""

    def __init__(
        self,
        proxy: str,
        open_place: Callable[[], Place],
        rotation: Rotation,
        clock: Clock,
        *,
        name: str,
        events_max: int | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._events_max = events_max or buffered_events_max(rotation)
        self._calls: deque[tuple[object, ...]] = deque()
        self._rows = SharedRows()
        self._next_seq = 1
        self._buffered_ever = 0
        self._dropped = 0
        self._lost = 0
        """Number of lost events that no JOURNAL_LOST event has reported yet."""
        self._unwritable = 0
        """Number of events lost in the writer that are already included in ``_lost`` or in a report."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._is_over = False
        self._writer = Writer(proxy, open_place, rotation, self._calls, clock=clock, room=self._has_room)

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread, which opens the place. Raises: StartupError if the place can't be used."""
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[str] = self._loop.create_future()

        def tell(why_not: str) -> None:
            if not opened.done():
                opened.set_result(why_not)

        def is_open(why_not: str) -> None:
            self._in_loop(tell, why_not)

        def has_ended() -> None:
            self._in_loop(self._ended.set)

        # A daemon thread does not keep the process alive if the disk hangs.
        thread = threading.Thread(target=self._writer.run, args=(is_open, has_ended), name="journal", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                why_not = await opened
        except TimeoutError:
            why_not = f"there is no answer within {START_SECONDS:.0f} seconds"
        if why_not:
            self._ended.set()
            raise StartupError(
                f"the journal can't be written to {self._name} ({why_not}); choose another place with --journal"
            )
        self._append_one(EventKind.JOURNAL_STARTED, self._clock.wall())

    async def stop(self) -> None:
        """Write the remaining events, and end the thread. Idempotent.

        If this call is cancelled, events that are not written yet may be lost.
        """
        if self._loop is None:
            return
        if not self._is_over:
            if self._lost:
                self._tell_loss()
            self._is_over = True
            self._writer.end()
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            _log.warning("the tail of the journal is lost", extra={"place": self._name, "events": self._buffered()})
            raise

    def figures(self) -> JournalFigures:
        """Return the present numbers of events, files and failures, and the lag."""
        writer = self._writer
        oldest_at = writer.oldest_at
        if oldest_at is None and self._calls:
            try:
                oldest_at = float(str(self._calls[0][4]))
            except IndexError:
                oldest_at = None  # the writer has just removed it
        return JournalFigures(
            written_events=writer.written_events,
            dropped_events=self._dropped + writer.lost_events,
            buffered_events=self._buffered(),
            file_count=writer.file_count,
            file_bytes=writer.file_bytes,
            failed_writes=writer.failed_writes,
            lag_seconds=0.0 if oldest_at is None else max(0.0, self._clock.wall() - oldest_at),
        )

    # -- the port ---------------------------------------------------------------------------------------------------

    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[JournalSubject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        """Record one event for each subject, as ``Journal.record`` describes."""
        count = len(subjects)
        if not count or not self._admits(count):
            return
        try:
            values, first_value = self._rows.of(kind, subscription, subjects)
        except Exception:
            self._lose(count)
            raise
        topic, group = subscription
        seq = self._next_seq
        self._next_seq = seq + count
        self._buffered_ever += count
        self._calls.append(
            (
                seq,
                kind,
                topic,
                group,
                at,
                count,
                values,
                first_value,
                details,
                new_copy_ids,
                groups,
            )
        )

    def note(
        self,
        kind: EventKind,
        topic: TopicName,
        at: float,
        *,
        group: GroupName | None = None,
        queue_index: int | None = None,
        detail: str = "",
    ) -> None:
        """Record one event, as ``Journal.note`` describes."""
        if self._admits(1):
            self._append_one(kind, at, topic=topic, group=group, queue_index=queue_index, detail=detail)

    def _admits(self, count: int) -> bool:
        """Return whether ``count`` events may be added to the buffer. If not, count the events as lost.

        They may not be added if the buffer is full or the journal was stopped.
        """
        if self._buffered_ever - self._writer.left_events + count > self._events_max or self._is_over:
            self._lose(count)
            return False
        if self._lost:
            self._tell_loss()
        return True

    def _lose(self, count: int) -> None:
        """Count ``count`` events as lost. The loss is reported before the next event is recorded, or earlier."""
        self._next_seq += count
        self._dropped += count
        self._lost += count

    def _append_one(
        self,
        kind: EventKind,
        at: float,
        *,
        topic: TopicName | None = None,
        group: GroupName | None = None,
        queue_index: int | None = None,
        detail: str = "",
    ) -> None:
        values: list[Any] = [None] * WIDTH
        values[QUEUE_INDEX] = queue_index
        details = (detail,) if detail else ()
        self._calls.append((self._next_seq, kind, topic, group, at, 1, values, 0, details, (), ()))
        self._next_seq += 1
        self._buffered_ever += 1

    # -- what was lost ------------------------------------------------------------------------------------------------

    def _buffered(self) -> int:
        return self._buffered_ever - self._writer.left_events

    def _tell_loss(self) -> None:
        """Record a JOURNAL_LOST event for the lost events. It is recorded even if the buffer is full."""
        lost, self._lost = self._lost, 0
        _log.warning("events of the journal are lost", extra={"place": self._name, "events": lost})
        self._append_one(EventKind.JOURNAL_LOST, self._clock.wall(), detail=str(lost))

    def _has_room(self) -> None:
        """Have the event loop report losses, because the buffer may have space again. Runs on the writer's thread."""
        if self._lost or self._writer.lost_events > self._unwritable:
            self._in_loop(self._tell_loss_late)

    def _tell_loss_late(self) -> None:
        """Report losses, including those in the writer, without waiting for the next event.

        The next event may be recorded much later.
        """
        unwritable = self._writer.lost_events - self._unwritable
        self._unwritable += unwritable
        self._lost += unwritable
        if self._lost and not self._is_over and self._buffered() < self._events_max:
            self._tell_loss()

    def _in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None, "it was started"
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits any more
            self._loop.call_soon_threadsafe(call, *arguments)


_conforms: type[Journal] = ParquetJournal
