"""Commits many jobs together, in one transaction with one fsync.

Theory of operation. The waiting jobs that write form a group, which is committed in one transaction. If a job raises an
exception or the commit fails, the whole group is rolled back. Each job of the group then runs a second time, in its own
transaction. So a failing job does not affect the other jobs. Because a job may run twice, it may change only the
database, or state in memory that an ``on_rollback`` callback resets. Jobs that only read run after the commit, outside
of any transaction. They see all writes that were submitted before them. They never see a write that may still be rolled
back.

This module runs on the thread that owns the connection, except ``PendingJob.report``, which runs on the event loop. The
callers of the jobs wait on the event loop.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

from popgate.adapters.sqlite.failures import StorageUnavailable, storage_failure
from popgate.adapters.sqlite.store_clock import StoreClock
from popgate.runtime.histogram import Histogram

_log = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 60.0
TIMED_EVERY = 8
"""Of so many transactions, one is timed, and counts for all of them."""

UNDECIDED = StorageUnavailable("popgate failed while it wrote to its store: the outcome of this write is unknown")
"""The error that a job has until its real outcome is known."""

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]


class PendingJob(Generic[T]):
    """A job that was submitted, with its outcome. ``report`` and ``fail`` run on the event loop."""

    __slots__ = ("error", "job", "result", "writes")

    def __init__(self, job: Job[T], *, writes: bool) -> None:
        self.job = job
        self.writes = writes
        self.result: T | None = None
        self.error: Exception | None = UNDECIDED

    def report(self) -> None:
        """Tell the caller the outcome."""

    def fail(self, error: Exception) -> None:
        """Tell the caller that ``report`` has failed."""


class AwaitedJob(PendingJob[T]):
    """A job whose caller awaits ``outcome``. A caller that was cancelled does not get the outcome."""

    __slots__ = ("outcome",)

    def __init__(self, job: Job[T], outcome: asyncio.Future[T], *, writes: bool) -> None:
        super().__init__(job, writes=writes)
        self.outcome = outcome

    def report(self) -> None:
        outcome = self.outcome
        if outcome.done():
            return
        if self.error is None:
            outcome.set_result(self.result)  # type: ignore[arg-type]  # no error: the result is the job's
        else:
            outcome.set_exception(self.error)

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class CallbackJob(PendingJob[T]):
    """A job with callbacks. ``done`` is called with its result, or ``failed`` with its error."""

    __slots__ = ("done", "failed")

    def __init__(
        self, job: Job[T], done: Callable[[T], None], failed: Callable[[Exception], None], *, writes: bool
    ) -> None:
        super().__init__(job, writes=writes)
        self.done = done
        self.failed = failed

    def report(self) -> None:
        if self.error is None:
            self.done(self.result)  # type: ignore[arg-type]  # no error: the result is the job's
        else:
            self.failed(self.error)

    def fail(self, error: Exception) -> None:
        self.failed(error)


class Committer:
    """Runs groups of jobs on ``connection``.

    ``failure`` is the reason why the store could not write the latest transaction, or None. ``commit_count`` is the
    number of transactions that reached stable storage, and ``commit_seconds`` tells how long they took. After each
    rollback, the callbacks in ``on_rollback`` are called on this thread. Each callback must clear the cache that it was
    registered for.
    """

    def __init__(
        self, connection: sqlite3.Connection, clock: StoreClock, path: Path, on_rollback: Sequence[Callable[[], None]]
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._path = path
        self._on_rollback = on_rollback
        self._logged_at = -LOG_INTERVAL_SECONDS
        self.failure: StorageUnavailable | None = None
        self.commit_count = 0
        self.commit_seconds = Histogram()

    def write(self, group: Sequence[PendingJob[Any]]) -> None:
        """Run and commit the jobs of ``group``. Store the result or the error of each job in its ``PendingJob``."""
        began = 0.0 if self.commit_count % TIMED_EVERY else perf_counter()
        try:
            results, saved_at = self._transact(group)
        except Exception as error:
            if len(group) == 1:
                group[0].error = self._translated(error)
                return
            for pending in group:
                self.write([pending])
            return
        for pending, result in zip(group, results, strict=True):
            pending.result, pending.error = result, None
        if saved_at is not None:
            self._clock.saved(saved_at)
        self.commit_count += 1
        self.failure = None
        if began:
            self.commit_seconds.add(perf_counter() - began, TIMED_EVERY)

    def read(self, group: Sequence[PendingJob[Any]]) -> None:
        """Run the jobs of ``group``, which only read.

        Store the result or the error of each job in its ``PendingJob``.
        """
        for pending in group:
            try:
                pending.result = pending.job(self._connection)
                pending.error = None
            except Exception as error:
                pending.error = storage_failure(error, self._path) or error

    def probe(self) -> None:
        """Check with a write that changes nothing whether a failing store can write again. Update ``failure``."""
        self.write([PendingJob(_touch, writes=True)])

    def _transact(self, group: Sequence[PendingJob[Any]]) -> tuple[list[Any], float | None]:
        """Commit the jobs of ``group``. Return their results, and the saved time if the transaction saved the time.

        An exception must mean that nothing was committed, because the caller then runs the jobs a second time.
        """
        connection = self._connection
        if connection.in_transaction:  # an earlier transaction could not be rolled back
            connection.execute("ROLLBACK")
        try:
            connection.execute("BEGIN IMMEDIATE")
            results = [pending.job(connection) for pending in group]
            now = self._clock.now()
            save = self._clock.save_due(now)
            if save:
                connection.execute("UPDATE store SET high_water = ?", (now,))
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite rolls back by itself if the disk fails
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            for forget in self._on_rollback:
                forget()
            raise
        return results, now if save else None

    def _translated(self, error: Exception) -> Exception:
        failure = storage_failure(error, self._path)
        if failure is None:
            return error
        self.failure = failure
        now = self._clock.now()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:  # on a full disk small writes may fit where large ones don't
            self._logged_at = now
            _log.error("the store can't write", extra={"path": str(self._path), "reason": failure.detail})
        return failure


def _touch(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE store SET high_water = high_water")
