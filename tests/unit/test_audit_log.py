"""The audit log: its lines, its limits, and what happens when it can't be written."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from popgate.auth import audit_log
from popgate.auth.audit_log import AuditEvent, AuditEventKind, AuditLog
from popgate.auth.denial_limiter import DENIALS_PER_SECOND, DENIALS_PER_SECOND_ALL, SOURCES_MAX, DenialLimiter
from popgate.auth.keys import new_key
from popgate.domain.errors import StartupError
from popgate.runtime.clocks import ManualClock
from support.processes import wait_until

ADMIN = AuditEvent(
    event=AuditEventKind.ADMIN,
    principal="alice",
    key="k3v7mq2xaz",
    action="admin",
    resource="topic orders group billing",
    operation="group_purge",
    outcome=200,
    address="10.0.0.7",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
async def log(file: Path) -> AsyncIterator[AuditLog]:
    log = AuditLog(str(file), clock=ManualClock(wall=1_700_000_000.25))
    log.start()
    yield log
    await log.stop()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def appear(file: Path, count: int) -> list[dict[str, Any]]:
    """Wait until the file has at least `count` lines, and return them."""

    def there() -> bool:
        return file.exists() and file.read_bytes().count(b"\n") >= count

    await asyncio.to_thread(wait_until, there, timeout_seconds=10, what=f"{count} lines")
    return rows(file)


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


def move_away(file: Path) -> Path:
    return file.rename(file.with_suffix(".1"))


def content_of(file: Path) -> bytes:
    return file.read_bytes()


def hanging(released: threading.Event) -> Callable[[object, Sequence[bytes]], int]:
    """Return a method that writes nothing, and returns when the test ends its wait."""

    def write(_: object, lines: Sequence[bytes]) -> int:
        released.wait(10)
        return len(lines)

    return write


def denied(principal: str | None = None, address: str | None = None) -> AuditEvent:
    return AuditEvent(event=AuditEventKind.DENIED, principal=principal, address=address, outcome=403)


# ---------------------------------------------------------------- lines


async def test_a_record_is_one_line_of_json_with_the_time_in_utc(log: AuditLog, file: Path) -> None:
    log.note(ADMIN)
    (row,) = await appear(file, 1)
    assert row == {
        "time": "2023-11-14T22:13:20.250Z",
        "event": "admin",
        "principal": "alice",
        "key": "k3v7mq2xaz",
        "action": "admin",
        "resource": "topic orders group billing",
        "operation": "group_purge",
        "outcome": 200,
        "address": "10.0.0.7",
    }
    assert datetime.fromisoformat(row["time"]).timestamp() == 1_700_000_000.25


async def test_what_is_not_known_is_left_out(log: AuditLog, file: Path) -> None:
    log.note(AuditEvent(event=AuditEventKind.KEYS, added=("a", "b"), removed=("c",)))
    log.note(AuditEvent(event=AuditEventKind.KEYS, changed=("app",)))
    assert await appear(file, 2) == [
        {"time": "2023-11-14T22:13:20.250Z", "event": "keys", "added": ["a", "b"], "removed": ["c"]},
        {"time": "2023-11-14T22:13:20.250Z", "event": "keys", "changed": ["app"]},
    ]


async def test_no_text_can_begin_a_line_or_end_one(log: AuditLog, file: Path) -> None:
    texts = ['a"\n{"event":"admin"}\r\n', "\x00\x1b[2J\x7f\x85\u2028\u2029", "\ud800\U0001f600", "é"]
    for text in texts:
        log.note(AuditEvent(event=AuditEventKind.ADMIN, principal=text, resource=text, address=text))
    assert [row["principal"] for row in await appear(file, len(texts))] == texts
    content = content_of(file)
    assert content.isascii()
    assert content.count(b"\n") == len(texts)
    assert not [sign for sign in content if sign < 32 and sign != 10]


async def test_long_texts_are_cut_and_keys_are_removed(log: AuditLog, file: Path) -> None:
    key = new_key().text
    log.note(AuditEvent(event=AuditEventKind.ADMIN, principal="a" * 10_000, resource=f"topic {key}", address=key))
    (row,) = await appear(file, 1)
    assert len(row["principal"]) == audit_log.TEXT_LENGTH_MAX
    assert (row["resource"], row["address"]) == ("topic pg_...", "pg_...")


async def test_a_token_of_a_provider_is_removed(log: AuditLog, file: Path) -> None:
    log.note(AuditEvent(event=AuditEventKind.DENIED, resource=f"topic eyJ{'h' * 60}.eyJ{'p' * 140}.{'s' * 86} group g"))
    assert [row["resource"] for row in await appear(file, 1)] == ["topic eyJ... group g"]


async def test_a_key_at_the_place_where_a_text_is_cut_is_removed_whole(log: AuditLog, file: Path) -> None:
    key = new_key().text
    for length in range(audit_log.TEXT_LENGTH_MAX - len(key), audit_log.TEXT_LENGTH_MAX, 7):
        log.note(AuditEvent(event=AuditEventKind.ADMIN, principal="a" * length + key, resource="b" * length + key))
    await log.stop()
    assert not [row for row in rows(file) if key.split("_", 2)[2][:4] in f"{row}"]


async def test_long_lists_of_keys_are_cut(log: AuditLog, file: Path) -> None:
    log.note(AuditEvent(event=AuditEventKind.KEYS, added=[str(n) for n in range(5_000)]))
    (row,) = await appear(file, 1)
    assert (len(row["added"]), row["added"][-1]) == (audit_log.IDS_MAX + 1, "...")


# ---------------------------------------------------------------- the file


async def test_the_file_is_made_for_its_owner_only_and_appended_to(log: AuditLog, file: Path) -> None:
    log.note(ADMIN)
    await log.stop()
    assert mode_of(file) == 0o600
    again = AuditLog(str(file))
    again.start()
    again.note(ADMIN)
    await again.stop()
    assert len(rows(file)) == 2


async def test_a_file_that_logrotate_renames_is_made_again(log: AuditLog, file: Path) -> None:
    log.note(ADMIN)
    await appear(file, 1)
    move_away(file)
    log.note(ADMIN)
    log.note(ADMIN)
    assert len(await appear(file, 2)) == 2
    assert len(rows(file.with_suffix(".1"))) == 1


async def test_a_file_that_is_cut_by_logrotate_is_written_on(log: AuditLog, file: Path) -> None:
    log.note(ADMIN)
    await appear(file, 1)
    os.truncate(file, 0)
    log.note(ADMIN)
    assert len(await appear(file, 1)) == 1
    assert content_of(file).startswith(b"{")


def test_a_file_that_can_not_be_opened_stops_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "none" / "audit.log", tmp_path / "pipe"):
        with pytest.raises(StartupError, match="choose another file with --audit-log"):
            AuditLog(str(wrong)).start()


def test_a_dash_is_standard_error() -> None:
    program = (
        "import asyncio\nfrom popgate.auth.audit_log import *\nlog = AuditLog('-'); log.start()\n"
        "for n in range(1000): log.note(AuditEvent(event=AuditEventKind.ADMIN, principal=str(n)))\n"
        "asyncio.run(log.stop())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert [json.loads(line)["principal"] for line in done.stderr.splitlines()] == [str(n) for n in range(1000)]


# ---------------------------------------------------------------- start and stop


async def test_start_and_stop_are_idempotent_in_any_order(file: Path) -> None:
    log = AuditLog(str(file))
    await log.stop()
    log.note(ADMIN)
    log.start()
    log.start()
    await log.stop()
    await log.stop()
    assert len(rows(file)) == 1
    assert "popgate-audit" not in [thread.name for thread in threading.enumerate()]


async def test_stop_writes_all_that_waits(file: Path) -> None:
    log = AuditLog(str(file))
    log.start()
    for _ in range(5_000):
        log.note(ADMIN)
    await log.stop()
    assert len(rows(file)) == 5_000


async def test_stop_does_not_wait_for_a_disk_that_hangs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(audit_log, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(audit_log._Sink, "write", hanging(released))  # pyright: ignore[reportPrivateUsage]
    log = AuditLog(str(file))
    log.start()
    log.note(ADMIN)
    await log.stop()
    released.set()


# ---------------------------------------------------------------- lost records


async def test_a_full_queue_never_blocks_and_the_lost_records_are_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "QUEUE_MAX", 10)
    log = AuditLog(str(file))
    for _ in range(25):
        log.note(ADMIN)
    assert log.dropped == 15
    log.start()
    await log.stop()
    assert [row["event"] for row in rows(file)] == ["admin"] * 10 + ["dropped"]
    assert rows(file)[-1]["count"] == 15
    assert log.dropped == 0


async def test_a_full_disk_loses_records_which_are_counted_and_told_once_a_minute(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(str(file))
    log.start()
    write, room = os.write, 500

    def full(descriptor: int, content: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        written = write(descriptor, content[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(10):
            log.note(ADMIN)
        await asyncio.to_thread(wait_until, lambda: log.dropped > 0, timeout_seconds=10, what="the loss")
        lost = log.dropped
        log.note(ADMIN)
        await asyncio.to_thread(wait_until, lambda: log.dropped > lost, timeout_seconds=10, what="another loss")
        lost = log.dropped
    await log.stop()
    (warning,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(warning)["reason"] == "No space left on device"
    lines = content_of(file).splitlines()
    complete = [json.loads(line) for line in lines if line.endswith(b"}")]
    assert len(lines) == len(complete) + 1  # one is torn
    assert [row["event"] for row in complete][-1] == "dropped"
    assert complete[-1]["count"] == lost
    assert len(complete) - 1 + lost == 11


async def test_a_file_that_becomes_unwritable_is_written_again_later(log: AuditLog, file: Path) -> None:
    log.note(ADMIN)
    await appear(file, 1)
    move_away(file)
    os.mkdir(file)  # noqa: PTH102
    log.note(ADMIN)
    await asyncio.to_thread(wait_until, lambda: log.dropped > 0, timeout_seconds=10, what="the loss")
    os.rmdir(file)  # noqa: PTH106
    log.note(ADMIN)
    events = [row["event"] for row in await appear(file, 2)]
    assert events in (["admin", "dropped"], ["dropped", "admin"])


# ---------------------------------------------------------------- refusals


async def test_refusals_are_limited_and_the_suppressed_ones_are_counted(log: AuditLog, file: Path) -> None:
    for _ in range(100):
        log.note(denied(address="10.0.0.1"))
        log.note(denied(principal="bob", address="10.0.0.1"))
        log.note(ADMIN)
    await log.stop()
    found = rows(file)
    assert sum(row["event"] == "admin" for row in found) == 100
    for name, source in (("principal", "bob"), ("address", "10.0.0.1")):
        own = [row for row in found if row["event"] == "denied" and row.get("principal", row["address"]) == source]
        assert len(own) == DENIALS_PER_SECOND, name
    assert {(row["source"], row["count"]) for row in found if row["event"] == "suppressed"} == {
        ("bob", 100 - DENIALS_PER_SECOND),
        ("10.0.0.1", 100 - DENIALS_PER_SECOND),
    }


async def test_changes_that_fail_because_of_a_wrong_request_are_limited(log: AuditLog, file: Path) -> None:
    for _ in range(100):
        log.note(replace(ADMIN, outcome=400))
        log.note(replace(ADMIN, principal="bob", outcome=503))
    await log.stop()
    outcomes = [row.get("outcome") for row in rows(file) if row["event"] == "admin"]
    assert (outcomes.count(400), outcomes.count(503)) == (DENIALS_PER_SECOND, 100)


async def test_suppressed_refusals_are_told_although_no_other_follows(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "TICK_SECONDS", 0.05)
    log = AuditLog(str(file))
    log.start()
    for _ in range(DENIALS_PER_SECOND + 1):
        log.note(denied(address="a"))
    found = await appear(file, DENIALS_PER_SECOND + 1)
    assert (found[-1]["event"], found[-1]["count"]) == ("suppressed", 1)
    await log.stop()


def test_a_source_has_its_refusals_again_after_a_second() -> None:
    limiter = DenialLimiter()
    assert [limiter.admits("a", 10.0, is_known=False) for _ in range(7)] == [True] * 5 + [False] * 2
    assert limiter.admits("b", 10.9, is_known=False)
    assert not limiter.admits("a", 10.9, is_known=False)
    assert limiter.admits("a", 11.0, is_known=False)
    assert limiter.take_suppressed() == [("a", 3)]
    assert limiter.take_suppressed() == []


def test_many_sources_neither_grow_the_memory_nor_flood_the_log() -> None:
    limiter = DenialLimiter()
    assert sum(limiter.admits(str(n), 10.0, is_known=False) for n in range(10_000)) == DENIALS_PER_SECOND_ALL
    told = dict(limiter.take_suppressed())
    assert len(told) == SOURCES_MAX + 1
    assert sum(told.values()) == 10_000 - DENIALS_PER_SECOND_ALL
    assert told["others"] == 10_000 - DENIALS_PER_SECOND_ALL - SOURCES_MAX


# ---------------------------------------------------------------- cost


async def test_a_note_takes_little_time_while_the_disk_is_slow(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(audit_log._Sink, "write", hanging(released))  # pyright: ignore[reportPrivateUsage]
    log = AuditLog(str(file))
    log.start()
    before = time.monotonic()
    for _ in range(1_000):
        log.note(ADMIN)
    assert time.monotonic() - before < 2
    released.set()
    await log.stop()


def test_strangers_do_not_keep_the_refusals_of_a_known_caller_out() -> None:
    limiter = DenialLimiter()
    for number in range(1_000):
        limiter.admits(f"127.0.0.{number}", 10.0, is_known=False)
    assert limiter.admits("insider", 10.0, is_known=True)


async def test_a_file_that_others_can_use_or_a_link_is_a_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public, private, link, missing = (tmp_path / name for name in ("public", "private", "link", "missing"))
    public.touch()
    public.chmod(0o644)
    private.touch()
    private.chmod(0o640)
    link.symlink_to(private)
    for file in (public, private, link, missing, Path("/dev/null")):
        log = AuditLog(str(file))
        log.start()
        log.note(ADMIN)
        await log.stop()
    assert [(record.getMessage(), getattr(record, "file", None)) for record in caplog.records] == [
        ("other users can read or change the audit log: run chmod 600", str(public)),
        ("the audit log is a link: it is written to the file to which the link leads", str(link)),
    ]
    assert len(rows(public)) == len(rows(missing)) == 1
    assert len(rows(private)) == 2


async def test_a_link_that_replaces_the_file_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, victim = tmp_path / "audit.log", tmp_path / "victim"
    victim.write_text("secret")
    log = AuditLog(str(file))
    log.start()
    file.unlink()
    file.symlink_to(victim)
    log.note(ADMIN)
    await log.stop()
    assert victim.read_text() == "secret"
    assert log.dropped == 1
    assert "the audit log can't be written" in caplog.text


async def test_a_link_at_the_start_is_followed_again_and_each_new_file_is_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, target = tmp_path / "link", tmp_path / "audit.log"
    link.symlink_to(target)
    log = AuditLog(str(link))
    log.start()
    target.unlink()
    target.touch(0o644)
    target.chmod(0o644)
    log.note(ADMIN)
    await log.stop()
    assert len(rows(target)) == 1
    assert "other users can read or change the audit log" in caplog.text


def test_standard_error_that_is_closed_is_an_error_and_nothing_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    with pytest.raises(StartupError, match=r"audit log - .*standard error is closed"):
        AuditLog("-").start()
