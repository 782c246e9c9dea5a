"""Configures the logging of the process: one line per event on standard error, with the extras as key=value.

This module defines the format. Log messages are constant texts, and the values are in ``extra``. Message bodies and
credentials are never logged.
"""

import logging
import sys

WARNINGS_MAX = 1_000
"""Maximum number of entries of which one ``OnceLogger`` warns."""
ENTRY_LENGTH_MAX, REASON_LENGTH_MAX = 200, 300
"""Maximum characters of a name and of a reason in such a warning."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """Appends each extra field of a log record as ``key=value``, after the number of the ``worker`` if it is given."""

    def __init__(self, form: str, worker: int | None = None) -> None:
        super().__init__(form)
        self._always = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        given = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        extras = [f"{key}={value!r}" for key, value in (self._always | given).items()]
        if not extras:
            return line
        head, *rest = line.split("\n", 1)
        return "\n".join([f"{head} {' '.join(extras)}", *rest])


def configure_logging(level: str, *, worker: int | None = None) -> None:
    """Log messages of ``level`` and above to standard error. If ``worker`` is given, each line contains this number."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in ("aio_pika", "aiormq", "asyncio", "httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)


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
