"""Logs refused requests, and passes all events to the audit log, if there is one.

A client can cause as many refusals as it likes. Therefore only a few of each caller or address, and altogether, are
logged in a period, and one line tells how many were left out.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from popgate.auth.audit_log import TEXT_LENGTH_MAX, AuditEvent, AuditEventKind
from popgate.auth.denial_limiter import DenialLimiter
from popgate.auth.keys import without_credentials
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
DENIALS_MAX = 5
"""Maximum number of refusals of one caller or address that are logged in a period."""
DENIALS_MAX_ALL = 20
"""Maximum number of refusals of all known callers that are logged in a period, and of all others."""


class AuditSink(Protocol):
    """Where events that concern access go."""

    def note(self, event: AuditEvent) -> None: ...


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


class DenialLog:
    """Logs refusals at the level info. ``audit`` also gets the events, and all others."""

    def __init__(
        self,
        audit: AuditSink | None = None,
        clock: Clock | None = None,
        call_later: Callable[[float, Callable[[], None]], None] = _call_later,
    ) -> None:
        self._audit = audit
        self._clock = clock or SystemClock()
        self._call_later = call_later
        self._limiter = DenialLimiter(DENIALS_MAX, DENIALS_MAX_ALL, PERIOD_SECONDS)
        self._is_reporting = False

    def note(self, event: AuditEvent) -> None:
        if self._audit is not None:
            self._audit.note(event)
        if event.event is not AuditEventKind.DENIED or not _log.isEnabledFor(logging.INFO):
            return
        source = without_credentials(event.principal or event.address or "-")[:TEXT_LENGTH_MAX]
        if self._limiter.admits(source, self._clock.monotonic(), is_known=event.principal is not None):
            _log.info("a request was denied", extra=_fields_of(event))
        elif not self._is_reporting:
            self._is_reporting = True
            self._call_later(PERIOD_SECONDS, self._report)

    def _report(self) -> None:
        """Log how many refusals were left out."""
        self._is_reporting = False
        suppressed = self._limiter.take_suppressed()
        fields = {"count": sum(count for _, count in suppressed), "sources": len(suppressed)}
        _log.info("further requests were denied, and not logged", extra=fields)


def _fields_of(event: AuditEvent) -> dict[str, object]:
    fields = {
        "principal": event.principal,
        "key": event.key,
        "action": event.action,
        "resource": event.resource,
        "operation": event.operation,
        "status": event.outcome,
        "reason": event.reason,
        "address": event.address,
    }
    return {
        name: without_credentials(value)[:TEXT_LENGTH_MAX] if isinstance(value, str) else value
        for name, value in fields.items()
        if value is not None
    }
