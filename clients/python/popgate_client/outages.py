"""Reports a series of failed calls: the first one at once, then one from time to time, and the end of the series."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from popgate_client.facts import FactLogger

REMINDER_SECONDS = 30.0
"""Seconds between two warnings of one series. The failures between them are logged at the level debug."""


class Outage:
    """A series of failures without a success between them; it may be used again after its end."""

    def __init__(self, logger: FactLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._began_at: float | None = None
        self._told_at = 0.0

    def failed(self, message: str, facts: Mapping[str, Any]) -> None:
        """Note a failure, and log it."""
        now = self._clock()
        is_first = self._began_at is None
        began_at = self._began_at = now if self._began_at is None else self._began_at
        is_due = is_first or now - self._told_at >= REMINDER_SECONDS
        if is_due:
            self._told_at = now
        told = dict(facts) if is_first else {**facts, "failing_for_seconds": round(now - began_at, 1)}
        self._logger.log(logging.WARNING if is_due else logging.DEBUG, message, extra=told)

    def succeeded(self) -> None:
        """Note a success, and log the end of the series if there is one."""
        if self._began_at is not None:
            seconds, self._began_at = self._clock() - self._began_at, None
            self._logger.info("popgate answers again", extra={"failed_for_seconds": round(seconds, 1)})
