"""Configures the logging of the process: one line per event on standard error, with the extras as key=value.

This module defines the format. Log messages are constant texts, and the values are in ``extra``. Message bodies and
credentials are never logged.
"""

import logging
import sys

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
