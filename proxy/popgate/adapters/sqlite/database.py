"""Owns the SQLite file of the embedded store, and the only thread that uses it.

This module owns the thread and its bounded queue of jobs, and returns the results of jobs to the event loop.
``group_commit`` commits several jobs together. ``opening`` checks the file. The stores and the embedded broker define
the tables and jobs.

    event loop                               thread
    write(job) --> bounded queue -----------> runs all waiting jobs: BEGIN, job, job, job, COMMIT (one fsync)
    awaits     <-- one call per group <------ results, after the commit

If a caller is cancelled while it waits, its job may still run. The job is always applied completely or not at all.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from popgate.adapters.sqlite.copying import StoreCopy
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.folder_lock import FolderLock
from popgate.adapters.sqlite.group_commit import AwaitedJob, CallbackJob, Committer, Job, PendingJob
from popgate.adapters.sqlite.opening import note_closed, open_connection
from popgate.adapters.sqlite.schema import SCHEMA_VERSION
from popgate.adapters.sqlite.store_clock import StoreClock
from popgate.domain.errors import RetryLater
from popgate.ports.clock import Clock
from popgate.ports.snapshots import Snapshots, Tell
from popgate.runtime.histogram import Histogram

_log = logging.getLogger(__name__)

WAITING_JOBS_MAX = 4096
"""Maximum number of waiting jobs. If this number is reached, the disk is too slow for the clients, and further callers
must retry later."""
GROUP_JOBS_MAX = 256
OVERLOAD_RETRY_SECONDS = 1.0
PROBE_INTERVAL_SECONDS = 1.0

T = TypeVar("T")


class Database:
    """A store in the SQLite file ``path``, which only this process can use while the store is open.

    ``open`` creates the folder of the file if necessary, and locks the folder against other processes.

    ``store_clock`` derives the time of the store from ``clock``. A ``Database`` can be opened only once. Only the event
    loop that opened it may use it.
    """

    def __init__(self, path: Path, clock: Clock, *, waiting_jobs_max: int = WAITING_JOBS_MAX) -> None:
        self.path = path
        self._clock = clock
        self._waiting_jobs_max = waiting_jobs_max
        self._waiting_count = 0
        self._jobs: SimpleQueue[PendingJob[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._is_open = False
        self._wanted_copy: StoreCopy | None = None
        self._on_rollback: list[Callable[[], None]] = []
        # The thread sets these fields before ``open`` returns.
        self._lock: FolderLock | None = None
        self._connection: sqlite3.Connection | None = None
        self._committer: Committer | None = None
        self._store_clock: StoreClock | None = None

    async def open(self) -> None:
        """Open the file. Raises: StartupError, whose single line names the path and the remedy."""
        assert self._thread is None, "a database is opened once"
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        # A daemon thread does not delay the exit of a process that did not call ``close``. Such an exit does not damage
        # the file.
        self._thread = threading.Thread(target=self._run, args=(opened,), name="popgate-sqlite", daemon=True)
        self._thread.start()
        await opened
        self._is_open = True

    async def close(self) -> None:
        """Run the jobs that are still queued, and close the file. Idempotent, and safe before ``open``.

        Before the file is closed, the time of the store is saved, and the write-ahead log is copied into the file.
        """
        if self._thread is None:
            return
        self._is_open = False
        self._jobs.put(None)
        await self._ended.wait()
        self._thread.join()

    def failure(self) -> str | None:
        """Return the reason why the store can't write at present, or None if it can write."""
        if not self._is_open or self._committer is None:
            return f"the store at {self.path} is not open"
        failure = self._committer.failure
        return None if failure is None else failure.detail

    @property
    def commit_count(self) -> int:
        """The number of transactions that have reached stable storage since ``open``."""
        return 0 if self._committer is None else self._committer.commit_count

    @property
    def commit_seconds(self) -> Histogram:
        """How long these transactions took, from samples."""
        assert self._committer is not None, "a store's transactions begin with open()"
        return self._committer.commit_seconds

    def now(self) -> float:
        """Return the time of the store in Unix seconds. It never decreases, not even after a restart.

        Must be called after ``open``.
        """
        assert self._store_clock is not None, "the store's time begins with open()"
        return self._store_clock.now()

    def on_rollback(self, forget: Callable[[], None]) -> None:
        """Register ``forget``, to be called on the database thread after each rollback of jobs.

        ``forget`` must clear all cached rows.
        """
        self._on_rollback.append(forget)

    @property
    def schema(self) -> int:
        return SCHEMA_VERSION

    async def copy_to(self, target: Path, tell: Tell) -> None:
        """Copy the store to the new file ``target``, as ``Snapshots`` describes. Only one copy may be made at a time.

        Raises: StorageUnavailable.
        """
        assert self._loop is not None, "a database is used after it was opened"
        copy = self._wanted_copy = StoreCopy(self.path, target, tell, self._loop)
        try:
            await self.read(lambda connection: None)  # wakes the thread
            await copy.outcome
        finally:
            copy.cancel()

    async def write(self, job: Job[T], unavailable: type[RetryLater] = StorageUnavailable) -> T:
        """Run ``job`` in a transaction. When the transaction is on stable storage, return the result of ``job``.

        ``job`` can share its transaction with other jobs. If this transaction is rolled back, ``job`` runs a second
        time. So ``job`` may change only the database. If ``job`` raises an exception, its writes are undone, and this
        method raises the same exception.

        Raises: ``unavailable`` if nothing could be written, or if it is unknown whether the write succeeded.
        """
        return await self._await(job, unavailable, writes=True)

    async def read(self, job: Job[T], unavailable: type[RetryLater] = StorageUnavailable) -> T:
        """Run ``job``, which must only read, and return its result. Raises: ``unavailable``.

        ``job`` sees every write that was submitted earlier.
        """
        return await self._await(job, unavailable, writes=False)

    def submit(
        self, job: Job[T], done: Callable[[T], None], failed: Callable[[Exception], None], *, writes: bool
    ) -> None:
        """Submit ``job`` and return at once. When ``job`` has ended, ``done`` or ``failed`` runs on the event loop.

        The callbacks of writes run in the order in which the writes were submitted. The callbacks of reads run in the
        order in which the reads were submitted. The callback of a read runs after the callbacks of all writes that were
        submitted before the read.

        Raises: StorageUnavailable if the store does not accept ``job`` because the store is closed or overloaded.
        """
        self._submit(CallbackJob(job, done, failed, writes=writes))

    def _submit(self, pending: PendingJob[Any]) -> None:
        if not self._is_open:
            raise StorageUnavailable(f"the store at {self.path} is not open")
        if self._waiting_count >= self._waiting_jobs_max:
            raise StorageUnavailable(
                f"overloaded: {self._waiting_count} jobs wait for {self.path}",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )
        self._waiting_count += 1
        self._jobs.put(pending)

    async def _await(self, job: Job[T], unavailable: type[RetryLater], *, writes: bool) -> T:
        assert self._loop is not None, "a database is used after it was opened"
        outcome: asyncio.Future[T] = self._loop.create_future()
        try:
            self._submit(AwaitedJob(job, outcome, writes=writes))
            return await outcome
        except StorageUnavailable as error:
            raise unavailable(error.detail, retry_after_seconds=error.retry_after_seconds) from error

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self, opened: asyncio.Future[None]) -> None:
        try:
            committer = self._begin()
        except Exception as error:
            self._call(_answer, opened, error)
        else:
            self._call(_answer, opened, None)
            self._serve(committer)
            self._end()
        finally:
            self._let_go()
            self._call(self._ended.set)

    def _begin(self) -> Committer:
        """Lock the folder and open the file. Raises: StartupError."""
        self._lock = FolderLock(self.path.parent)
        self._connection = open_connection(self.path)
        (high_water,) = self._connection.execute("SELECT high_water FROM store").fetchone()
        self._store_clock = StoreClock(self._clock, high_water)
        self._committer = Committer(self._connection, self._store_clock, self.path, self._on_rollback)
        return self._committer

    def _end(self) -> None:
        """Save the time of the store, checkpoint the write-ahead log, close the file, and record its checksum."""
        assert self._connection is not None, "it has begun"
        assert self._store_clock is not None, "it has begun"
        if self._save(self._connection, self._store_clock):
            self._connection.close()
            with suppress(OSError):  # without a checksum, the next start checks the file longer
                note_closed(self.path)

    def _let_go(self) -> None:
        """Close the connection and release the folder lock, even if ``_begin`` failed. Idempotent."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _serve(self, committer: Committer) -> None:
        """Run submitted jobs in groups, one group after another, until ``close`` is called."""
        closing = False
        while not closing:
            closing = self._serve_group(committer)
            while self._wanted_copy is not None:  # a job that runs during a copy may ask for the next one
                copy, self._wanted_copy = self._wanted_copy, None
                if closing:
                    copy.refuse()
                else:
                    closing = self._run_copy(committer, copy)

    def _run_copy(self, committer: Committer, copy: StoreCopy) -> bool:
        """Copy the store, and run the jobs that wait between the steps. Return whether ``close`` was called."""
        assert self._connection is not None, "it has begun"
        return copy.run(self._connection, lambda: not self._jobs.empty() and self._serve_group(committer))

    def _serve_group(self, committer: Committer) -> bool:
        """Wait for at least one job, and run the waiting jobs as a group. Return whether this was the last group.

        The group is a local variable, so that the message bodies of its jobs are freed before the next wait. If the
        latest write failed and no job arrives, check periodically whether the store can write again.
        """
        jobs = self._jobs
        try:
            pending = jobs.get(timeout=None if committer.failure is None else PROBE_INTERVAL_SECONDS)
        except Empty:
            committer.probe()
            return False
        writes: list[PendingJob[Any]] = []
        reads: list[PendingJob[Any]] = []
        while pending is not None:
            (writes if pending.writes else reads).append(pending)
            if jobs.empty() or len(writes) + len(reads) == GROUP_JOBS_MAX:  # only this thread takes jobs
                break
            pending = jobs.get_nowait()
        if writes:
            self._run_group(committer.write, writes)
        if reads:
            self._run_group(committer.read, reads)
        return pending is None

    def _run_group(self, run: Callable[[Sequence[PendingJob[Any]]], None], group: Sequence[PendingJob[Any]]) -> None:
        try:
            run(group)
        except Exception:  # each caller still gets its own outcome or UNDECIDED
            _log.exception("an internal error on the store's thread")
        self._call(self._tell, group)

    def _save(self, connection: sqlite3.Connection, clock: StoreClock) -> bool:
        """Save the time of the store, and copy the write-ahead log into the file. Return whether both succeeded."""
        try:
            connection.execute("UPDATE store SET high_water = ?", (clock.now(),))
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            # Confirmed writes are in the write-ahead log beside the file. The next start reads them from this log.
            _log.warning("the store was closed without saving its time", extra={"reason": str(error)})
            return False
        return True

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Schedule ``callback`` on the event loop.

        If the loop is closed, do nothing, because no caller waits any more.
        """
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    # -- on the event loop again -----------------------------------------------------------------------------------

    def _tell(self, group: Sequence[PendingJob[Any]]) -> None:
        self._waiting_count -= len(group)
        for pending in group:
            try:
                pending.report()
            except Exception as error:
                _log.exception("a callback of the store raised an exception")
                with suppress(Exception):
                    pending.fail(error)  # the caller may still be waiting


def _answer(opened: asyncio.Future[None], error: Exception | None) -> None:
    if opened.done():  # the opening was cancelled
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)


_conforms: type[Snapshots] = Database
