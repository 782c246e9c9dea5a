"""Writes recorded events to files, on a separate thread.

Theory of operation. The writer collects calls (``tables.Call``) until they contain enough events for a fast conversion
to an Arrow record batch. It collects batches until the file has enough events, is old enough, or its hour is over. A
file is first encoded in memory and then written as a whole. If the write fails, the writer repeats it later, and no
event of the file is lost. Events leave the buffer only when their file has been written, or when they can't be written
at all. ``journal`` fills the buffer, and limits the number of events in it. So if the disk hangs, the proxy first uses
more memory, up to this limit, and then loses events, but never a message.

    calls --CHUNK_EVENTS--> batches --rotation--> sealed files --place.put--> written files
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from popgate.adapters.journal_parquet.arrow import RecordBatch
from popgate.adapters.journal_parquet.places import Place, UnusablePlace, first_line
from popgate.adapters.journal_parquet.tables import Call, batch_of, parquet_of, readable
from popgate.ports.clock import Clock

_log = logging.getLogger(__name__)

CHUNK_EVENTS = 32768
"""Minimum number of collected events that are converted to Arrow before the file is finished. In small batches, the
conversion of an event takes three times as long."""
TICK_SECONDS = 0.1
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.5, 10.0
SECONDS_OF_HOUR = 3_600


class Rotation(NamedTuple):
    """Limits of a file.

    It is finished ``seconds`` after its first event, at ``events`` events, or at the end of its hour.
    """

    seconds: float
    events: int


class _Sealed(NamedTuple):
    """An encoded file that is ready to be written. ``oldest_at`` is the time of its first event, in Unix seconds."""

    path: str
    content: memoryview
    event_count: int
    oldest_at: float


class _Open:
    """A file that is being filled. It contains only events of one hour. The caller must add ``first``."""

    def __init__(self, first: Call, began: float) -> None:
        self.hour = int(first.at // SECONDS_OF_HOUR)
        self.first_seq = first.first_seq
        self.oldest_at = first.at
        self.began = began
        self.event_count = 0
        self.batches: list[RecordBatch] = []
        self.calls: list[Call] = []
        self.called_count = 0
        self.lost_count = 0
        """Number of events of this file that can't be written. ``event_count`` does not include them."""

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.called_count += call.event_count
        self.event_count += call.event_count

    def pack(self, proxy: str) -> None:
        """Convert the collected calls to an Arrow record batch."""
        if not self.calls:
            return
        calls, self.calls, self.called_count = self.calls, [], 0
        try:
            self.batches.append(batch_of(calls, proxy))
        except Exception:  # other applications may publish invalid texts or numbers
            self._pack_with_care([readable(call) for call in calls], proxy)

    def _pack_with_care(self, calls: Sequence[Call], proxy: str) -> None:
        """Convert ``calls``, one by one if necessary, so that only calls that can't be converted are lost."""
        try:
            self.batches.append(batch_of(calls, proxy))
        except Exception as error:
            if len(calls) > 1:
                for call in calls:
                    self._pack_with_care([call], proxy)
                return
            _log.error("events can't be written to the journal", exc_info=error, extra={"event": calls[0].kind})
            self.event_count -= calls[0].event_count
            self.lost_count += calls[0].event_count

    def sealed(self, proxy: str) -> _Sealed:
        self.pack(proxy)
        hour = datetime.fromtimestamp(self.hour * SECONDS_OF_HOUR, UTC)
        path = f"date={hour:%Y-%m-%d}/hour={hour:%H}/journal-{proxy}-{self.first_seq:012d}.parquet"
        return _Sealed(path, parquet_of(self.batches), self.event_count, self.oldest_at)


class Writer:
    """Writes the events in ``calls`` to files. Each element of ``calls`` is a tuple with the fields of ``Call``.

    After files were written, ``room`` is called on this thread, because the buffer may have space again. All public
    counters only increase. ``oldest_at`` is the time of the oldest event that was removed from ``calls`` but not
    written yet, or None.
    """

    def __init__(
        self,
        proxy: str,
        open_place: Callable[[], Place],
        rotation: Rotation,
        calls: deque[tuple[object, ...]],
        *,
        clock: Clock,
        room: Callable[[], None],
    ) -> None:
        self.left_events = 0
        """Number of events that have left the buffer, whether they were written or not."""
        self.written_events = 0
        self.lost_events = 0
        """Number of events that have left the buffer because they can't be written."""
        self.file_count = 0
        self.file_bytes = 0
        self.failed_writes = 0
        self.oldest_at: float | None = None
        self._proxy = proxy
        self._open_place = open_place
        self._rotation = rotation
        self._calls = calls
        self._clock = clock
        self._room = room
        self._open: dict[int, _Open] = {}
        """The open files, by hour. Shortly after the start of an hour, events of the previous hour can still arrive. At
        most two files stay open for longer than ``TICK_SECONDS``."""
        self._sealed: deque[_Sealed] = deque()
        self._failures = 0
        """Number of consecutive failed writes."""
        self._retry_at = 0.0
        self._ending = threading.Event()

    def end(self) -> None:
        """Request that the thread writes the remaining events and ends. Does not wait for the thread."""
        self._ending.set()

    def run(self, opened: Callable[[str], None], ended: Callable[[], None]) -> None:
        """Open the place, then write events until ``end`` is called. This is the main function of the thread.

        ``opened`` is called with the reason why the place can't be used, or with an empty text. If the place was
        opened, ``ended`` is called at the end.
        """
        try:
            place = self._open_place()
            place.open()
        except (OSError, UnusablePlace) as error:
            opened(first_line(error))
            return
        except Exception as error:
            _log.error("the journal failed", exc_info=error)
            opened(repr(error))
            return
        opened("")
        try:
            while not self._ending.wait(TICK_SECONDS):
                self._round(place)
            self._round(place, is_last=True)
        finally:
            ended()

    def _round(self, place: Place, *, is_last: bool = False) -> None:
        try:
            self._take()
            for file in list(self._open.values()):
                if is_last or self._is_due(file):
                    self._seal(file)
            self._put(place, is_last=is_last)
        except Exception as error:  # a bug in popgate: the journal has a gap, and continues
            _log.error("the journal failed", exc_info=error)
        self._note_oldest()

    def _take(self) -> None:
        """Add all calls that are in the buffer now to the open files."""
        for _ in range(len(self._calls)):
            call = Call._make(self._calls.popleft())
            file = self._open.get(int(call.at // SECONDS_OF_HOUR))
            if file is None:
                file = _Open(call, self._clock.monotonic())
                self._open[file.hour] = file
            file.add(call)
            if file.event_count >= self._rotation.events:
                self._seal(file)
            elif file.called_count >= CHUNK_EVENTS:
                file.pack(self._proxy)

    def _is_due(self, file: _Open) -> bool:
        is_old = self._clock.monotonic() >= file.began + self._rotation.seconds
        return is_old or int(self._clock.wall() // SECONDS_OF_HOUR) > file.hour

    def _seal(self, file: _Open) -> None:
        del self._open[file.hour]
        try:
            sealed = file.sealed(self._proxy)
        except Exception as error:  # a bug in popgate: the journal has a gap, and continues
            _log.error("a file of the journal is lost", exc_info=error, extra={"events": file.event_count})
            self._lose(file.event_count + file.lost_count)
            return
        self._lose(file.lost_count)
        if sealed.event_count:
            self._sealed.append(sealed)

    def _lose(self, count: int) -> None:
        self.lost_events += count
        self.left_events += count

    def _put(self, place: Place, *, is_last: bool) -> None:
        """Write the sealed files. During the pause after a failed write, do nothing unless ``is_last`` is True."""
        if not self._sealed or (self._failures and not is_last and self._clock.monotonic() < self._retry_at):
            return
        while self._sealed:
            file = self._sealed[0]
            try:
                place.put(file.path, file.content)
            except OSError as error:
                self._failed(place, error, is_last=is_last)
                return
            self._sealed.popleft()
            self.left_events += file.event_count
            self.written_events += file.event_count
            self.file_count += 1
            self.file_bytes += len(file.content)
        if self._failures:
            _log.warning("the journal can be written again", extra={"place": place.name, "failures": self._failures})
        self._failures = 0
        self._room()

    def _failed(self, place: Place, error: OSError, *, is_last: bool) -> None:
        if not self._failures or is_last:
            waiting = sum(file.event_count for file in self._sealed)
            extra = {"place": place.name, "error": first_line(error), "events": waiting}
            _log.warning(
                "the journal ends without these events" if is_last else "the journal can't be written", extra=extra
            )
        seconds = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._retry_at = self._clock.monotonic() + seconds
        self.failed_writes += 1  # set this last: an observer of this number then sees the time of the next attempt

    def _note_oldest(self) -> None:
        ages = [file.oldest_at for file in self._sealed]
        ages += [file.oldest_at for file in self._open.values()]
        self.oldest_at = min(ages, default=None)
