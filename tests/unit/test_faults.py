"""Failures inside popgate: counted, logged once a message, and remembered within limits."""

import pytest

from popgate.runtime import faults
from popgate.runtime.faults import FaultPart, Faults

ERROR = ValueError("says the test")


def test_a_message_that_fails_twice_is_unreadable_until_it_is_set_aside() -> None:
    known = Faults()
    assert not known.message_failed("q", "a", ERROR)
    assert not known.is_unreadable("q", "a")
    assert known.message_failed("q", "a", ERROR)
    assert known.is_unreadable("q", "a")
    assert not known.is_unreadable("another queue", "a")
    known.set_aside("q", "a")
    assert not known.is_unreadable("q", "a")
    assert not known.message_failed("q", "a", ERROR), "it is counted anew"


def test_each_message_is_logged_once_and_each_failure_counted(caplog: pytest.LogCaptureFixture) -> None:
    known = Faults()
    for _ in range(3):
        known.message_failed("q", "a", ERROR)
    known.message_failed("q", "b", ERROR)
    known.task_failed()
    logged = [(getattr(one, "queue", ""), getattr(one, "copy_id", "")) for one in caplog.records]
    assert logged == [("q", "a"), ("q", "b")]
    assert known.counts == {FaultPart.MESSAGE: 4, FaultPart.TASK: 1, FaultPart.JOURNAL: 0}


def test_of_too_many_messages_the_one_that_failed_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "REMEMBERED_MAX", 2)
    known = Faults()
    for copy_id in ("a", "b", "a", "c"):
        known.message_failed("q", copy_id, ERROR)
    assert known.is_unreadable("q", "a")
    assert not known.message_failed("q", "b", ERROR), "it was forgotten for c"
