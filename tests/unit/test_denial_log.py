"""Refusals are in the log, but a client that causes many of them can't fill it."""

import logging
from collections.abc import Callable

import pytest

from popgate.auth.audit_log import AuditEvent, AuditEventKind
from popgate.auth.denial_log import DENIALS_MAX, DENIALS_MAX_ALL, PERIOD_SECONDS, DenialLog
from popgate.runtime.clocks import ManualClock

LOGGER = "popgate.auth.denial_log"


class Scene:
    """A log of denials, the audit log behind it, and what it has scheduled."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.audited: list[AuditEvent] = []
        self.due: list[Callable[[], None]] = []
        self.log = DenialLog(self, self.clock, lambda _seconds, call: self.due.append(call))

    def note(self, event: AuditEvent) -> None:
        """Receive an event as the audit log."""
        self.audited.append(event)

    def deny(self, *, principal: str | None = None, address: str = "10.0.0.7") -> None:
        self.log.note(
            AuditEvent(
                event=AuditEventKind.DENIED,
                principal=principal,
                action="publish",
                operation="publish",
                resource="topic orders",
                outcome=403,
                address=address,
            )
        )

    def elapse(self) -> None:
        self.clock.advance(PERIOD_SECONDS)
        due, self.due = self.due, []
        for call in due:
            call()


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    caplog.set_level(logging.INFO, LOGGER)
    return Scene()


def test_a_denial_says_who_wanted_what(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.deny(principal="shop")
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, "a request was denied")
    shown = {name: record.__dict__.get(name) for name in ("principal", "operation", "resource", "status", "address")}
    assert shown == {
        "principal": "shop",
        "operation": "publish",
        "resource": "topic orders",
        "status": 403,
        "address": "10.0.0.7",
    }
    assert len(scene.audited) == 1


def test_a_change_is_for_the_audit_log_only(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.log.note(AuditEvent(event=AuditEventKind.ADMIN, principal="shop", outcome=200))
    assert len(scene.audited) == 1
    assert not caplog.records


def test_a_flood_of_denials_leaves_few_lines(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1_000):
        scene.deny()
    assert len(caplog.records) == DENIALS_MAX
    scene.elapse()
    last = caplog.records[-1]
    assert last.getMessage() == "further requests were denied, and not logged"
    assert (last.__dict__["count"], last.__dict__["sources"]) == (1_000 - DENIALS_MAX, 1)
    assert len(scene.audited) == 1_000
    scene.deny()
    assert caplog.records[-1].getMessage() == "a request was denied"
    assert not scene.due


def test_many_strangers_leave_few_lines_and_room_for_a_known_caller(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1_000):
        scene.deny(address=f"10.0.{number // 256}.{number % 256}")
    assert len(caplog.records) == DENIALS_MAX_ALL
    scene.deny(principal="shop")
    assert len(caplog.records) == DENIALS_MAX_ALL + 1


def test_above_the_level_info_no_denial_is_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    scene.deny()
    assert not caplog.records
    assert len(scene.audited) == 1
