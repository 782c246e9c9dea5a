"""Takes backups in a running proxy: copies the store beside itself, and hands out the copy as an archive.

Only one backup exists at a time. Its copy is a file of the data folder, which exists until the backup is deleted.

    none --start()--> copying --> ready --delete(), or IDLE_SECONDS_MAX without a reader--> none
                         |          |--start() after UNUSED_SECONDS--> copying
                         |--> failed --start()--> copying
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from popgate.backup.archive import end_parts, file_parts
from popgate.backup.manifest import STORE_FILE, BackedUpFile, Manifest
from popgate.domain.errors import Conflict, PopgateError, RetryLater
from popgate.ports.clock import Clock
from popgate.ports.snapshots import Snapshots
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

COPY_FILE = "popgate.db.backup"
"""Name of the store's copy in the data folder."""
FREE_BYTES_MIN = 64 * 1024 * 1024
"""Minimum free bytes on the disk of the data folder that a backup leaves to the proxy."""
IDLE_SECONDS_MAX = 600.0
"""Maximum seconds that a finished copy waits for a reader, or for the next one."""
UNUSED_SECONDS = 3.0
"""Seconds after which a backup that no client reads or asks for gives way to a new one: its client was killed."""
SPACE_CHECK_BYTES = 16 * 1024 * 1024
_FIXED_FILES = ("secret", "broker")
"""Files of the data folder beside the store. They do not change while the proxy runs."""


class BackupPhase(StrEnum):
    NONE = "none"
    COPYING = "copying"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupState:
    """The present backup. ``bytes`` is the size of the store, of which ``bytes_copied`` are copied. ``started_at`` and
    ``taken_at`` are Unix seconds. ``failure`` says why a backup failed."""

    phase: BackupPhase = BackupPhase.NONE
    bytes_copied: int = 0
    bytes: int = 0
    started_at: float | None = None
    taken_at: float | None = None
    failure: str | None = None


class HostedBackup:
    """Takes backups of the data folder ``folder``, whose store is ``store``; None if the state is elsewhere.

    ``broker`` returns the mark of the broker, and ``version`` is popgate's.
    """

    def __init__(
        self, folder: Path, store: Snapshots | None, broker: str, version: str, clock: Clock, background: Background
    ) -> None:
        self._copy = folder / COPY_FILE
        self._folder = folder
        self._store = store
        self._broker = broker
        self._version = version
        self._clock = clock
        self._background = background
        self._task: asyncio.Task[None] | None = None
        self._readers = 0
        self._used = asyncio.Event()
        self.state = BackupState()
        self._bytes = (0, 0)
        self._used_at = clock.monotonic()
        self._copy.unlink(missing_ok=True)  # a killed proxy has left it

    def progress(self) -> BackupState:
        """Return the present backup, or the last one if it failed. Its client asks for it often while it is taken."""
        self._used_at = self._clock.monotonic()
        if self.state.phase is not BackupPhase.COPYING:
            return self.state
        copied, size = self._bytes
        return BackupState(phase=BackupPhase.COPYING, bytes_copied=copied, bytes=size, started_at=self.state.started_at)

    async def start(self) -> BackupState:
        """Begin a backup, and return it. A backup that is not used any more is deleted first.

        Raises: Conflict if another client uses a backup, or if this proxy has no store; RetryLater if the disk has too
        little free space."""
        store = self._store
        if store is None:
            raise Conflict("the state of this proxy is in Redis, so its data folder needs no backup: back up Redis")
        is_used = self._readers or self._clock.monotonic() - self._used_at < UNUSED_SECONDS
        if is_used and self.state.phase in (BackupPhase.COPYING, BackupPhase.READY):
            raise Conflict(
                "there is a backup already, which another client may be reading; DELETE /v1/admin/backup deletes it"
            )
        await self.delete()
        self._check_space((self._folder / STORE_FILE).stat().st_size)
        self._bytes = (0, 0)
        self._used_at = self._clock.monotonic()
        self.state = BackupState(phase=BackupPhase.COPYING, started_at=self._clock.wall())
        self._task = self._background.spawn(self._run(store), name="take a backup")
        return self.state

    async def delete(self) -> None:
        """Delete the backup, or end it if it is being taken. Readers get an archive without its end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.state = BackupState()

    def archive(self) -> AsyncGenerator[bytes, None]:
        """Return the parts of the archive. Raises: Conflict if no backup is ready."""
        state = self.state
        if state.phase is not BackupPhase.READY or self._store is None:
            raise Conflict("no backup is ready: POST /v1/admin/backup starts one, GET /v1/admin/backup shows its phase")
        return self._parts(state, self._store.schema)

    async def _run(self, store: Snapshots) -> None:
        started_at = self.state.started_at
        try:
            os.close(os.open(self._copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            await store.copy_to(self._copy, self._tell)
            size = self._copy.stat().st_size
            taken_at = self._clock.wall()
            self.state = BackupState(
                phase=BackupPhase.READY, bytes_copied=size, bytes=size, started_at=started_at, taken_at=taken_at
            )
            _log.info("a backup is ready", extra={"bytes": size})
            await self._wait_for_readers()
            self.state = BackupState()
        except (PopgateError, OSError) as error:
            reason = error.detail if isinstance(error, PopgateError) else f"{self._copy}: {error.strerror or error}"
            self.state = BackupState(phase=BackupPhase.FAILED, started_at=started_at, failure=reason)
            _log.error("a backup failed", extra={"reason": reason})
        finally:
            self._copy.unlink(missing_ok=True)

    async def _wait_for_readers(self) -> None:
        """Return when nothing has read the backup for ``IDLE_SECONDS_MAX``."""
        while True:
            self._used.clear()
            try:
                async with asyncio.timeout(IDLE_SECONDS_MAX):
                    await self._used.wait()
            except TimeoutError:
                if not self._readers:
                    return

    def _tell(self, copied: int, size: int) -> None:
        """Note the progress, on the store's thread. Raises: RetryLater if the disk becomes full."""
        if copied // SPACE_CHECK_BYTES != self._bytes[0] // SPACE_CHECK_BYTES:
            self._check_space(size - copied)
        self._bytes = copied, size

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < needed + FREE_BYTES_MIN:
            raise RetryLater(
                f"the disk of {self._folder} has {free >> 20} MiB free, but a backup needs "
                f"{(needed + FREE_BYTES_MIN) >> 20} MiB there for a copy of the store: free some space",
                retry_after_seconds=60.0,
            )

    async def _parts(self, state: BackupState, schema: int) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the archive. Reading a part does not delay the event loop."""
        self._readers += 1
        try:
            with self._copy.open("rb") as copy:
                writing = self._written(state, schema, copy)
                while (part := await asyncio.to_thread(next, writing, None)) is not None:
                    self._used.set()
                    yield part
        finally:
            self._readers -= 1
            self._used_at = self._clock.monotonic()
            self._used.set()

    def _written(self, state: BackupState, schema: int, copy: BinaryIO) -> Generator[bytes]:
        assert state.started_at is not None, "it is ready"
        assert state.taken_at is not None, "it is ready"
        files: list[BackedUpFile] = []
        for name in _FIXED_FILES:
            path = self._folder / name
            with path.open("rb") as stream:
                files.append((yield from file_parts(name, stream, path.stat().st_size, state.taken_at)))
        files.append((yield from file_parts(STORE_FILE, copy, state.bytes, state.taken_at)))
        manifest = Manifest(
            popgate=self._version,
            schema=schema,
            broker=self._broker,
            started_at=state.started_at,
            taken_at=state.taken_at,
            files=files,
        )
        yield from end_parts(manifest.encoded(), state.taken_at)
