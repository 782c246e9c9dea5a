"""Changes the level of the log while the process runs.

A change can have an end, so that the detailed log of a busy proxy is not forgotten. Parts that do something only at a
certain level are told of each change.
"""

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")


class LogLevels:
    """The level of the log of this process. ``configured`` is the level in the settings."""

    def __init__(self, configured: str) -> None:
        self._configured = self._level = configured
        self._ends_at: float | None = None
        self._end: asyncio.TimerHandle | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def level(self) -> str:
        return self._level

    @property
    def configured(self) -> str:
        return self._configured

    @property
    def seconds_left(self) -> float | None:
        """Return after how many seconds the configured level applies again, or None if the change has no end."""
        if self._ends_at is None:
            return None
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` now, and after each change of the level."""
        self._watchers.append(changed)
        changed()

    def change(self, level: str, seconds: float | None = None) -> None:
        """Log messages of ``level`` (one of ``LEVELS``) and above, for ``seconds`` or until the next change."""
        loop = asyncio.get_running_loop()
        if self._end is not None:
            self._end.cancel()
        self._end = self._ends_at = None
        if seconds is not None and level != self._configured:
            self._ends_at = loop.time() + seconds
            self._end = loop.call_later(seconds, self.change, self._configured)
        if level == self._level:
            return
        fields: dict[str, object] = {"to": level, "was": self._level}
        if seconds is not None:
            fields["seconds"] = seconds
        was_shown = _log.isEnabledFor(logging.INFO)
        if was_shown:
            _log.info(_CHANGED, extra=fields)
        self._level = level
        logging.getLogger().setLevel(level.upper())
        if not was_shown:
            _log.info(_CHANGED, extra=fields)
        for changed in self._watchers:
            changed()


_CHANGED = "the level of the log has changed"
