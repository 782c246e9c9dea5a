"""Copies the store to another file while it is in use, with SQLite's online backup.

Theory of operation. The store is open in exclusive mode, so only its own connection can read it. SQLite copies a few
pages at a time. Between two steps, the thread that owns the connection runs the jobs that wait, so a job waits for one
step, or for a few if the store grows fast. SQLite repeats each write of this connection in the copy, if it changes a
page that is already copied. So the copy ends as the committed state at its last step. SQLite begins again after a
rollback, which is rare: a job of the store only fails if it is refused, or if the disk fails.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from popgate.adapters.sqlite.failures import StorageUnavailable, storage_failure
from popgate.ports.snapshots import Tell

STEP_PAGES = 64
"""Pages that are copied between two groups of jobs: half a MiB, which takes about half a millisecond."""
GROWN_FACTOR = 2
RESTARTS_MAX = 50
"""Maximum number of times that SQLite may begin the copy again."""
BUSY_SECONDS = 0.01


class _Stopped(Exception):
    """The copy is no longer wanted."""


class _Pace:
    """Decides after each step whether waiting jobs may run, so that the copy ends even if the store grows fast.

    For each page that the store grows by, two pages are copied before further jobs run.
    """

    def __init__(self) -> None:
        self._copied = self._pages = self._due = self._restarts = 0

    def may_serve(self, copied: int, pages: int) -> bool:
        """Note the progress. Raises: StorageUnavailable if the copy has begun again too often."""
        if copied <= self._copied:
            self._restarts += 1
            if self._restarts > RESTARTS_MAX:
                raise StorageUnavailable(
                    "the store was not copied, because its transactions fail too often; see popgate's log"
                )
        grown = pages - self._pages if self._pages else 0
        self._due = max(0, self._due + GROWN_FACTOR * max(0, grown) - STEP_PAGES)
        self._copied, self._pages = copied, pages
        return self._due == 0


class StoreCopy:
    """One copy of the store to the file ``target``, whose outcome is ``outcome``, a future of ``loop``."""

    def __init__(self, path: Path, target: Path, tell: Tell, loop: asyncio.AbstractEventLoop) -> None:
        self._path = path
        self._target = target
        self._tell = tell
        self._loop = loop
        self._is_cancelled = self._is_closing = False
        self.outcome: asyncio.Future[None] = loop.create_future()

    def cancel(self) -> None:
        """End the copy after its present step. Nothing awaits the outcome any more. Idempotent."""
        self._is_cancelled = True
        self.outcome.cancel()

    def run(self, connection: sqlite3.Connection, serve: Callable[[], bool]) -> bool:
        """Copy the store, on the thread that owns ``connection``. Return whether ``serve`` returned True.

        ``serve`` runs waiting jobs, and returns whether the store must be closed. The copy then ends unfinished.
        """
        failure: Exception | None = None
        try:
            self._copy(connection, serve)
        except _Stopped:
            failure = StorageUnavailable("popgate is shutting down, so the store was not copied")
        except Exception as error:
            failure = storage_failure(error, self._target) or error
        self._report(failure)
        return self._is_closing

    def refuse(self) -> None:
        """Report that the store was closed before the copy began."""
        self._report(StorageUnavailable(f"the store at {self._path} is not open"))

    def _copy(self, connection: sqlite3.Connection, serve: Callable[[], bool]) -> None:
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        pace = _Pace()

        def between(status: int, remaining: int, pages: int) -> None:
            if status == sqlite3.SQLITE_DONE:
                return
            self._tell((pages - remaining) * page_bytes, pages * page_bytes)
            if pace.may_serve(pages - remaining, pages):
                self._is_closing = serve()
            if self._is_closing or self._is_cancelled:
                raise _Stopped

        with closing(sqlite3.connect(self._target, isolation_level=None)) as target:
            # The copy is not used before it is complete, so it needs neither a journal nor a sync.
            target.execute("PRAGMA journal_mode = OFF").fetchall()
            target.execute("PRAGMA synchronous = OFF")
            connection.backup(target, pages=STEP_PAGES, progress=between, sleep=BUSY_SECONDS)

    def _report(self, failure: Exception | None) -> None:
        def settle() -> None:
            if self.outcome.done():
                return
            if failure is None:
                self.outcome.set_result(None)
            else:
                self.outcome.set_exception(failure)

        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(settle)
