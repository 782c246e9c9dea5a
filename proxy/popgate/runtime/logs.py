"""Configures the logging of the process: one line per event on standard error, as text or as JSON.

This module defines the formats. Log messages are constant texts, and the values are in ``extra``. Message bodies and
credentials are never logged. A line that is logged while a request is served contains the request's id, if it has one.

The event loop logs, so a program that does not read standard error must not stop it. A line that standard error can't
take is dropped and counted.
"""

import json
import logging
import os
import select
import stat
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, cast

from popgate.runtime.current_request import current_request_id

READER_SECONDS = 0.02
"""Maximum seconds to wait until standard error can take more, unless log lines have been dropped already."""
WARNINGS_MAX = 1_000
"""Maximum number of entries of which one ``OnceLogger`` warns."""
ENTRY_LENGTH_MAX, REASON_LENGTH_MAX = 200, 300
"""Maximum characters of a name and of a reason in such a warning."""
_DROPPED = "log lines were dropped, because standard error was not read"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_REQUEST_ID = "request_id"
_OWN = "popgate"
"""The first part of the names of popgate's loggers."""
_OF_TRACE_HEADERS = "opentelemetry.trace"
"""The logger that warns of each wrong ``traceparent`` and ``tracestate``, with its text. Clients and publishers could
flood the log."""
_INDENT = "  "
"""What begins the further lines of an event, so that none of them can look like an event of its own."""


class LogFormat(StrEnum):
    """The form of the log's lines. Both contain the same facts."""

    TEXT = "text"
    """The time, the level, the logger and the message, then ``key=value`` pairs. A traceback takes further lines."""
    JSON = "json"
    """One JSON object in each line, also for an event with a traceback."""


def _extras(record: logging.LogRecord, always: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra fields of a record, after the fields that all lines have, and the id of the request."""
    given = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    request_id = current_request_id()
    if request_id is not None:
        given.setdefault(_REQUEST_ID, request_id)
    return {**always, **given}


class KeyValueFormatter(logging.Formatter):
    """Appends each extra field of a log record as ``key=value``, after the number of the ``worker`` if it is given."""

    def __init__(self, form: str, worker: int | None = None) -> None:
        super().__init__(form)
        self._always = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        head, *rest = super().format(record).split("\n")
        extras = [f"{key}={_plain(value)!r}" for key, value in _extras(record, self._always).items()]
        return "\n".join([" ".join([_printable(head), *extras]), *(f"{_INDENT}{_printable(line)}" for line in rest)])


class JsonFormatter(logging.Formatter):
    """Writes a log record as one JSON object with the fields ``time``, ``level``, ``logger`` and ``message``, the extra
    fields, and ``exception`` with the traceback, if there is one.

    An extra field with one of these names gets an underscore behind its name.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._always = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        own = {*line, "exception"}
        for key, value in _extras(record, self._always).items():
            line[f"{key}_" if key in own else key] = _plain(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # ASCII only, so that no line separator of Unicode can begin a new line
        try:
            return json.dumps(line, default=str, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # NaN, which JSON lacks, or a key that is no text
            texts = {key: value if isinstance(value, str | int) else repr(value) for key, value in line.items()}
            return json.dumps(texts, separators=(",", ":"))


def _printable(line: str) -> str:
    """Return a line without characters that control a terminal: a traceback can contain a client's text."""
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


def _plain(value: object) -> object:
    """Return a value in a form that is shown without the name of its class: sets as sorted lists, enums as texts."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, cast("set[object]", value)))
    if isinstance(value, Mapping):
        return {str(key): one for key, one in cast("Mapping[object, object]", value).items()}
    return value


class StandardErrorHandler(logging.Handler):
    """Writes each record to ``descriptor``, but waits for a reader for at most ``READER_SECONDS`` at a time."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._dropped = 0
        self._is_torn = False
        """Whether a part of the last line was written, but not its end."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            notice = {"name": __name__, "levelname": "WARNING", "msg": _DROPPED, "count": self._dropped}
            if self._dropped and self._write(logging.makeLogRecord(notice)):
                self._dropped = 0
            self._dropped += not self._write(record)
        except Exception:  # a log line must not end what it is about
            self._dropped += 1

    def _write(self, record: logging.LogRecord) -> bool:
        """Write a line, and return whether all of it was written.

        A pipe or socket that is writable takes ``select.PIPE_BUF`` bytes without blocking. A terminal takes fewer, and
        a pipe can be full again if others write to it. Both raise BlockingIOError then, see ``_never_blocking``.
        """
        rest = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        if self._is_torn:
            rest = b"\n" + rest
        while rest:
            if not self._is_writable():
                return False
            rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
            self._is_torn = bool(rest)
        return True

    def _is_writable(self) -> bool:
        seconds = 0.0 if self._dropped else READER_SECONDS
        return any(events & select.POLLOUT for _, events in self._poll.poll(seconds * 1000))


def configure_logging(level: str, *, worker: int | None = None, form: LogFormat = LogFormat.TEXT) -> None:
    """Log messages of ``level`` and above to standard error. If ``worker`` is given, each line contains this number."""
    handler = _standard_error()
    handler.setFormatter(
        JsonFormatter(worker)
        if form is LogFormat.JSON
        else KeyValueFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", worker)
    )
    handler.addFilter(_is_of_popgate_or_a_warning)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in ("aio_pika", "aiormq", "asyncio", "httpcore", "httpx", "opentelemetry", "urllib3", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)  # saves the work of making their records
    logging.getLogger(_OF_TRACE_HEADERS).setLevel(logging.ERROR)


def _is_of_popgate_or_a_warning(record: logging.LogRecord) -> bool:
    """Return whether to log a record. At the level debug, libraries log headers, and texts that are not constant."""
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == _OWN


def _standard_error() -> logging.Handler:
    try:
        return StandardErrorHandler(_never_blocking(sys.stderr.fileno()))
    except (AttributeError, OSError, ValueError):  # it is closed, or a program has replaced it
        return logging.StreamHandler(sys.stderr)


def _never_blocking(descriptor: int) -> int:
    """Open a pipe or terminal once more without blocking, and return the new descriptor, or else ``descriptor``.

    O_NONBLOCK on ``descriptor`` itself would apply to all programs that share it. A file is not opened again, because
    the new descriptor would have a position of its own.
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
        return descriptor
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # it belongs to another user, or there is no /proc
        return descriptor


class OnceLogger:
    """Warns of each entry of a store that can't be used, but only once. ``message`` is the constant text."""

    def __init__(self, log: logging.Logger, message: str) -> None:
        self._log = log
        self._message = message
        self._known: set[tuple[str, str]] = set()

    def warn(self, entry: str, reason: str) -> None:
        """Warn that ``entry`` can't be used because of ``reason``, unless that was said before."""
        known = (entry[:ENTRY_LENGTH_MAX], reason[:REASON_LENGTH_MAX])
        if known in self._known or len(self._known) >= WARNINGS_MAX:
            return
        self._known.add(known)
        self._log.warning(self._message, extra={"entry": known[0], "reason": known[1]})
