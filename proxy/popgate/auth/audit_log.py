"""Writes the audit log: a line of JSON for each change of an administrator, each refusal and each change of the keys
file.

Theory of operation. ``note`` only puts a record into a bounded queue. One thread writes the records in batches, so that
a slow disk never delays a request. Records are lost rather than memory: if the queue is full, or the file can't be
written, the records are counted, and a later line tells the number.

    note --> queue --> thread --> file or standard error
       '--full--> counted           '--fails--> counted, one warning a minute

Refusals, and changes that fail because of a wrong request, are limited for each caller or address, and altogether,
because a client can cause as many as it likes. Lines with the event ``suppressed`` tell how many were left out. A
record never contains a body or a credential.
"""

import asyncio
import errno
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from popgate.auth.denial_limiter import DenialLimiter
from popgate.auth.keys import without_credentials
from popgate.domain.errors import StartupError
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock

_log = logging.getLogger(__name__)

STANDARD_ERROR = "-"
QUEUE_MAX = 10_000
"""Maximum number of records that wait to be written."""
BATCH_MAX = 256
"""Maximum number of records that are written at once."""
TEXT_LENGTH_MAX = 512
"""Maximum length of a text in a record. Longer ones are cut."""
IDS_MAX = 1_000
"""Maximum number of ids of keys, or of names of principals, in one list of a record."""
TICK_SECONDS = 1.0
"""Seconds between two reports of suppressed refusals."""
STOP_SECONDS = 1.0
"""Maximum seconds for which ``stop`` waits until all records are written."""
WARNING_SECONDS = 60.0
"""Minimum seconds between two warnings that records can't be written."""

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_OTHERS_CAN = 0o026
"""Permissions of a file that the log warns about. A group may read the log: logrotate is often told to permit this."""


class AuditEventKind(StrEnum):
    ADMIN = "admin"
    """An administrator's change, with its outcome."""
    DENIED = "denied"
    """A request without a valid credential, or without permission."""
    KEYS = "keys"
    """Keys were added or removed, or have expired, or principals were changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """What happened. ``key`` is the id of a credential, and ``outcome`` is the HTTP status. None: not known."""

    event: AuditEventKind
    principal: str | None = None
    key: str | None = None
    action: str | None = None
    resource: str | None = None
    operation: str | None = None
    outcome: int | None = None
    reason: str | None = None
    is_unchanged: bool = False
    """Whether the request asked for what was so already."""
    address: str | None = None
    added: Sequence[str] = ()
    """The ids of keys that an event of the kind KEYS is about; also ``removed`` and ``expired``."""
    removed: Sequence[str] = ()
    expired: Sequence[str] = ()
    changed: Sequence[str] = ()
    """The names of principals whose permissions, limits or certificates have changed."""

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was changed, because the caller may not change it or has sent a wrong request."""
        is_client_error = self.outcome is not None and _CLIENT_ERROR <= self.outcome < _SERVER_ERROR
        is_idle = self.event is AuditEventKind.ADMIN and (is_client_error or self.is_unchanged)
        return self.event is AuditEventKind.DENIED or is_idle


class AuditLog:
    """Appends records to a file, or to standard error if ``destination`` is ``-``.

    The file is created if it is missing. If it is renamed or removed, as logrotate does, a new one is created.
    """

    def __init__(self, destination: str, *, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._sink = _Sink(None if destination == STANDARD_ERROR else Path(destination))
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._denials = DenialLimiter()
        self._thread: threading.Thread | None = None
        self._refused = self._told = 0
        """Numbers of records that did not fit into the queue, and of those that a line has told."""
        self._lost = 0
        """Number of records that could not be written, and that no line has told yet."""
        self._warned_at = float("-inf")

    @property
    def dropped(self) -> int:
        """The number of records that are lost and that no line has told yet."""
        return self._refused - self._told + self._lost

    def note(self, event: AuditEvent) -> None:
        """Record an event. Never blocks and never fails. Call it from one thread only."""
        source = without_credentials(event.principal or event.address or "-")[:TEXT_LENGTH_MAX]
        if event.is_refusal:
            is_known = event.principal is not None
            if not self._denials.admits(source, self._clock.monotonic(), is_known=is_known):
                return
        if self._queue.qsize() >= QUEUE_MAX:
            self._refused += 1
            return
        self._queue.put(self._line(_fields_of(event)))

    def start(self) -> None:
        """Open the file and start to write. A second call does nothing. Raises: StartupError."""
        if self._thread is not None:
            return
        try:
            self._sink.open()
        except OSError as error:
            raise StartupError(
                f"the audit log {self._sink.path or '-'} can't be opened ({error.strerror}); choose another file with "
                "--audit-log"
            ) from error
        self._thread = threading.Thread(target=self._write_all, name="popgate-audit", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write the records that wait, for at most ``STOP_SECONDS``, and close the file.

        Idempotent, and safe before ``start``. Later records are lost.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(thread.join, STOP_SECONDS)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        tick_at = time.monotonic() + TICK_SECONDS
        is_last = False
        while not is_last:
            batch, is_last = self._next_batch(tick_at)
            if is_last or time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_SECONDS
                batch += [
                    self._line({"event": "suppressed", "source": source, "count": count})
                    for source, count in self._denials.take_suppressed()
                ]
            self._write(batch)
        self._sink.close()

    def _next_batch(self, until: float) -> tuple[list[bytes], bool]:
        """Wait for lines until the monotonic time ``until``. Return them, and whether no more follow."""
        batch: list[bytes] = []
        with suppress(Empty):
            line = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            while line is not None:
                batch.append(line)
                if len(batch) >= BATCH_MAX:
                    return batch, False
                line = self._queue.get_nowait()
            return batch, True
        return batch, False

    def _write(self, batch: list[bytes]) -> None:
        refused = self._refused
        dropped = refused - self._told + self._lost
        lines = [*batch, *([self._line({"event": "dropped", "count": dropped})] if dropped else [])]
        if not lines:
            return
        written = self._sink.write(lines)
        if written == len(lines):
            self._told, self._lost = refused, 0
            return
        self._lost += len(batch) - min(written, len(batch))
        now = time.monotonic()
        if now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            _log.error("the audit log can't be written; records are lost", extra={"reason": self._sink.problem})

    def _line(self, fields: dict[str, Any]) -> bytes:
        at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        # ASCII only, so no control character or line separator can begin a new line
        return json.dumps({"time": at.replace("+00:00", "Z"), **fields}, separators=(",", ":")).encode() + b"\n"


def _fields_of(event: AuditEvent) -> dict[str, Any]:
    texts = {
        "principal": event.principal,
        "key": event.key,
        "action": event.action,
        "resource": event.resource,
        "operation": event.operation,
        "outcome": event.outcome,
        "reason": event.reason,
        "address": event.address,
    }
    fields: dict[str, Any] = {"event": event.event.value}
    for name, value in texts.items():
        if value is not None:
            fields[name] = without_credentials(value)[:TEXT_LENGTH_MAX] if isinstance(value, str) else value
    lists = {"added": event.added, "removed": event.removed, "expired": event.expired, "changed": event.changed}
    for name, ids in lists.items():
        if ids:
            shown = map(without_credentials, ids[:IDS_MAX])
            fields[name] = [*shown, *(["..."] if len(ids) > IDS_MAX else [])]
    return fields


class _Sink:
    """The file that the lines are appended to. ``path`` None is standard error. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem = ""
        """Why the last write failed."""
        self._descriptor = -1
        self._link_flag = 0
        """O_NOFOLLOW if the file was not a link when it was opened. A link that replaces it later is not the user's
        choice: a program that can write to the folder could choose the file that is written."""
        self._is_torn = False
        """Whether the file ends with an incomplete line."""

    def open(self) -> None:
        """Open the file, which is created if it is missing, and log what is unsafe about it. Raises: OSError."""
        if self.path is None:
            if sys.__stderr__ is None:  # another file may have descriptor 2
                raise OSError(errno.EBADF, "standard error is closed")
            self._descriptor = sys.__stderr__.fileno()
            return
        # O_NONBLOCK: opening a named pipe would wait for a reader
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        self._descriptor = os.open(self.path, flags | self._link_flag, 0o600)
        is_link, status = self.path.is_symlink(), os.fstat(self._descriptor)
        if not is_link:
            self._link_flag = os.O_NOFOLLOW
        if not stat.S_ISREG(status.st_mode):
            return  # a pipe or a device, such as /dev/stdout, is the user's choice
        if is_link:
            self._warn("the audit log is a link: it is written to the file to which the link leads")
        if status.st_mode & _OTHERS_CAN:
            self._warn("other users can read or change the audit log: run chmod 600")

    def _warn(self, text: str) -> None:
        _log.warning(text, extra={"file": str(self.path)})

    def close(self) -> None:
        if self.path is not None and self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def write(self, lines: Sequence[bytes]) -> int:
        """Append the lines, and return how many were written completely. Never fails."""
        try:
            self._follow()
            if self.path is not None:
                return self._append(b"".join(lines))
            for number, line in enumerate(lines):  # other lines may come between, but not into a line
                if not self._append(line):
                    return number
        except OSError as error:
            self.problem = error.strerror or str(error)
            return 0
        return len(lines)

    def _follow(self) -> None:
        """Open the file again if another one is at its path now. Raises: OSError."""
        if self.path is None:
            return
        if self._descriptor >= 0:
            own = os.fstat(self._descriptor)
            with suppress(FileNotFoundError):
                there = self.path.stat()
                if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                    return
        self.close()
        self._is_torn = False
        self.open()

    def _append(self, content: bytes) -> int:
        """Write all of ``content``, and return the number of lines that were written completely."""
        if self._is_torn:
            content = b"\n" + content
        rest, lines = content, content.count(b"\n")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.problem = error.strerror or str(error)
        done = content[: len(content) - len(rest)]
        if done:
            missing = content[len(done) :].count(b"\n")
            was_torn, self._is_torn = self._is_torn, not done.endswith(b"\n")
            return lines - missing - was_torn
        return 0
