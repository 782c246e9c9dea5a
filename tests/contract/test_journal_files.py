"""The journal adapter: how it writes events, when it finishes a file, and what it does on a disk that is full,
hangs, or is missing.
"""

import asyncio
import errno
import importlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.journal_parquet.journal import ParquetJournal
from popgate.adapters.journal_parquet.places import LEFT_OVER_SECONDS, WRITING, LocalFolder, place_at
from popgate.adapters.journal_parquet.writer import CHUNK_EVENTS, TICK_SECONDS, Rotation
from popgate.domain.errors import StartupError
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.journal_files import Row, assert_without_gaps, finished_files, rows_of, utc
from support.journals import GROUP, NAME, PATIENCE_SECONDS, TOPIC, Subject, started, subjects

STEP_SECONDS = 20.0
START_OF_HOUR = 1_700_000_000.0 // 3_600 * 3_600


class FaultyPlace:
    """A folder whose disk is full, or hangs, while the test wants it."""

    def __init__(self, folder: Path) -> None:
        self.is_full = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_hanging = threading.Event()
        self._place = LocalFolder(folder)
        self.name = self._place.name

    def open(self) -> None:
        self._place.open()

    def put(self, path: str, content: memoryview) -> None:
        if not self.goes_on.is_set():
            self.is_hanging.set()
            self.goes_on.wait(PATIENCE_SECONDS)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._place.put(path, content)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=START_OF_HOUR + 1_000.0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait by polling, because the writer's thread sends no notification."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # see above
            await asyncio.sleep(0.01)


async def in_time(clock: ManualClock, condition: Callable[[], bool]) -> float:
    """Advance time, letting the writer look at it, until `condition` holds; return how much time passed."""
    passed = 0.0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            clock.advance(STEP_SECONDS)
            passed += STEP_SECONDS
            await asyncio.sleep(2 * TICK_SECONDS)
    return passed


def acked(journal: ParquetJournal, count: int, clock: ManualClock) -> None:
    journal.record(EventKind.ACKED, NAME, subjects(count), clock.wall())


# ---------------------------------------------------------------- what it makes of events


async def test_a_row_says_what_the_engine_knew_at_that_moment(tmp_path: Path, clock: ManualClock) -> None:
    at = clock.wall()
    message = Message(CopyId("c1"), "m1", b"12345", {}, "key", at - 9, visible_at=at - 4)
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        many = [Subject(CopyId("c1"), message, 7, 2, at - 2.5, "ann", 30.0)]
        journal.record(EventKind.DELIVERED, NAME, many, at)
        journal.record(EventKind.REJECTED, NAME, many, at, details=["bad"])
        many.clear()  # what is recorded stays recorded
        dead = [Subject(CopyId("c1"), message._replace(visible_at=None), 7, 2, at - 2.5, "ann", 30.0)]
        journal.record(EventKind.DEAD_LETTERED, NAME, dead, at, details=["bad"], new_copy_ids=[CopyId("c2")])
        published = Subject(CopyId("c3"), message._replace(message_id=""), 0, 0)
        journal.record(EventKind.PUBLISHED, NAME, [published], at, groups=[GroupName("z"), GroupName("a")])
        journal.record(EventKind.ACKED, NAME, subjects(1, client="bob"), at)
        journal.note(EventKind.QUEUE_CLAIMED, TOPIC, at, group=GROUP, queue_index=0, detail="12")
        journal.record(EventKind.ACKED, NAME, [], at)
    begun, delivered, rejected, dead_lettered, published_row, far, claimed = rows_of(tmp_path)
    assert {name for name, value in begun.items() if value is not None} == {"at", "event", "proxy", "journal_seq"}
    assert (begun["event"], begun["at"], begun["proxy"]) == ("journal_started", utc(at), "p1")
    whole = {
        "at": utc(at),
        "event": "delivered",
        "topic": "t",
        "group": "g",
        "queue": 7,
        "copy_id": "c1",
        "message_id": "m1",
        "ordering_key": "key",
        "delivery_count": 2,
        "client": "ann",
        "proxy": "p1",
        "published_at": utc(at - 9),
        "visible_at": utc(at - 4),
        "held_seconds": None,
        "invisibility_seconds": 30.0,
        "size_bytes": 5,
        "groups": None,
        "new_copy_id": None,
        "detail": None,
        "journal_seq": 2,
    }
    assert delivered == whole
    changed = {"event": "rejected", "held_seconds": 2.5, "invisibility_seconds": None, "detail": "bad"}
    assert rejected == {**whole, **changed, "journal_seq": 3}
    assert (dead_lettered["new_copy_id"], dead_lettered["detail"]) == ("c2", "bad")
    assert (dead_lettered["visible_at"], dead_lettered["held_seconds"]) == (utc(at - 9), None)
    assert (published_row["group"], published_row["groups"], published_row["message_id"]) == (None, "a,z", None)
    assert (published_row["delivery_count"], published_row["client"], published_row["queue"]) == (None, None, 0)
    assert (far["client"], far["held_seconds"], far["invisibility_seconds"], far["size_bytes"]) == ("bob",) + (
        None,
    ) * 3
    assert (claimed["queue"], claimed["detail"], claimed["copy_id"]) == (0, "12", None)


async def test_half_a_character_does_not_cost_the_journal_a_row(tmp_path: Path, clock: ManualClock) -> None:
    message = Message(CopyId("c1"), "m\ud800", b"", {}, None, 0.0)
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        journal.record(EventKind.DELIVERED, NAME, [Subject(CopyId("c1"), message)], clock.wall())
    (row,) = [row for row in rows_of(tmp_path) if row["event"] == "delivered"]
    assert (row["message_id"], row["published_at"], row["visible_at"]) == ("m?", None, None)


@pytest.mark.parametrize("seconds", [1.7e15, float("inf"), float("nan"), -5.0])
async def test_a_time_that_is_none_does_not_cost_the_journal_a_row(
    tmp_path: Path, clock: ManualClock, seconds: float
) -> None:
    """Foreign publishers write nanoseconds, and worse, into a message's timestamp."""
    message = Message(CopyId("c1"), "m1", b"", {}, None, seconds, visible_at=seconds)
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        acked(journal, 10, clock)
        journal.record(EventKind.DELIVERED, NAME, [Subject(CopyId("c1"), message)], clock.wall())
    rows = rows_of(tmp_path)
    assert len(rows) == 12
    assert (rows[-1]["message_id"], rows[-1]["published_at"], rows[-1]["visible_at"]) == ("m1", None, None)


async def test_what_can_not_be_written_costs_the_journal_nothing_but_itself(tmp_path: Path, clock: ManualClock) -> None:
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        acked(journal, 10, clock)
        journal.record(EventKind.DELIVERED, NAME, subjects(2, delivery_count=2**40), clock.wall())
        acked(journal, 10, clock)
        await in_time(clock, lambda: journal.figures().written_events == 21)
        assert (journal.figures().dropped_events, journal.figures().failed_writes) == (2, 0)
        await in_time(clock, lambda: journal.figures().written_events == 22)
    rows = rows_of(tmp_path)
    assert [row["journal_seq"] for row in rows] == [*range(1, 12), *range(14, 25)]
    assert (rows[-1]["event"], rows[-1]["detail"]) == ("journal_lost", "2")


async def test_more_than_one_chunk_keeps_its_order(tmp_path: Path, clock: ManualClock) -> None:
    count = 2 * CHUNK_EVENTS + 100
    async with started(partial(place_at, str(tmp_path)), clock, events=10 * CHUNK_EVENTS) as journal:
        for number in range(0, count, 50):
            many = [Subject(CopyId(f"{number + one}")) for one in range(50)]
            journal.record(EventKind.ACKED, NAME, many, clock.wall())
        await asyncio.sleep(0)
    (file,) = finished_files(tmp_path)
    rows = rows_of(tmp_path)
    assert [row["copy_id"] for row in rows[1:]] == [str(number) for number in range((count + 49) // 50 * 50)]
    assert_without_gaps(rows)
    assert file.parent.parent.parent == tmp_path


def test_a_file_is_on_stable_storage_before_it_has_its_name_and_the_name_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path)
    folder.open()
    folder.put("hour=1/before.parquet", memoryview(b"-"))  # the folders are made and synced
    synced: list[Path] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", noting)
    folder.put("hour=1/file.parquet", memoryview(b"-"))
    assert synced == [tmp_path / WRITING / "file.parquet", tmp_path / "hour=1"]


# ---------------------------------------------------------------- when a file is finished


async def test_a_file_is_finished_when_it_is_full(tmp_path: Path, clock: ManualClock) -> None:
    async with started(partial(place_at, str(tmp_path)), clock, events=10) as journal:
        for _ in range(3):
            acked(journal, 5, clock)
        await until(lambda: journal.figures().file_count == 1)
        assert journal.figures().written_events == 11
        assert journal.figures().buffered_events == 5
    assert [len(rows) for rows in _by_file(tmp_path)] == [11, 5]
    assert_without_gaps(rows_of(tmp_path))


async def test_a_file_is_finished_when_it_is_old(tmp_path: Path, clock: ManualClock) -> None:
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        acked(journal, 5, clock)
        await asyncio.sleep(2 * TICK_SECONDS)
        assert journal.figures().lag_seconds == 0.0
        assert 60.0 <= await in_time(clock, lambda: journal.figures().file_count == 1) <= 60.0 + STEP_SECONDS
        figures = journal.figures()
        assert (figures.written_events, figures.buffered_events, figures.lag_seconds) == (6, 0, 0.0)
        assert figures.file_bytes == finished_files(tmp_path)[0].stat().st_size


async def test_no_file_has_events_of_two_hours(tmp_path: Path, clock: ManualClock) -> None:
    clock.jump_wall(2_599.0)
    async with started(partial(place_at, str(tmp_path)), clock, seconds=86_400.0) as journal:
        acked(journal, 2, clock)
        before = clock.wall()
        clock.jump_wall(2.0)
        acked(journal, 3, clock)
        journal.record(EventKind.ACKED, NAME, subjects(1), before)  # it was on its way
        await until(lambda: journal.figures().written_events >= 4)
    rows = rows_of(tmp_path)
    assert {file.parent.name for file in finished_files(tmp_path)} == {f"hour={row['at']:%H}" for row in rows}
    assert sorted(Counter(row["at"].hour for row in rows).values()) == [3, 4]
    assert_without_gaps(rows)


def _by_file(folder: Path) -> list[list[Row]]:
    rows = rows_of(folder)
    bounds = sorted(int(file.stem.split("-")[2]) for file in finished_files(folder))
    ends = [*bounds[1:], len(rows) + 1]
    return [rows[number - 1 : end - 1] for number, end in zip(bounds, ends, strict=True)]


# ---------------------------------------------------------------- where it can't write


async def test_the_turn_of_an_hour_does_not_cost_a_file_an_event(tmp_path: Path, clock: ManualClock) -> None:
    """A publish is recorded when it is confirmed, with the time at which it began: around a full hour, events of
    both hours alternate.
    """
    async with started(partial(place_at, str(tmp_path)), clock) as journal:
        for _ in range(100):
            for at in (START_OF_HOUR + 3_599.0, START_OF_HOUR + 3_601.0):
                journal.record(EventKind.ACKED, NAME, subjects(1), at)
        clock.advance(3_000.0)
        await until(lambda: journal.figures().written_events >= 101)
        assert journal.figures().lag_seconds < 3_000.0
    assert len(finished_files(tmp_path)) == 2
    assert_without_gaps(rows_of(tmp_path))


async def test_a_full_disk_costs_no_event_as_long_as_the_buffer_has_room(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    place = FaultyPlace(tmp_path)
    place.is_full = True
    async with started(lambda: place, clock, events=10) as journal:
        for _ in range(20):
            acked(journal, 10, clock)
        await until(lambda: journal.figures().failed_writes > 0)
        clock.advance(60.0)
        await until(lambda: journal.figures().failed_writes > 1)
        figures = journal.figures()
        assert (figures.written_events, figures.dropped_events, figures.buffered_events) == (0, 0, 201)
        assert figures.lag_seconds == 60.0
        assert [*(tmp_path / WRITING).iterdir()] == finished_files(tmp_path) == []
        place.is_full = False
        clock.advance(60.0)
        await until(lambda: journal.figures().buffered_events == 0)
    assert_without_gaps(rows_of(tmp_path))
    assert len(rows_of(tmp_path)) == 201
    said = [record.message for record in caplog.records]
    assert said == ["the journal can't be written", "the journal can be written again"]


async def test_what_did_not_fit_is_counted_and_the_journal_itself_says_so(tmp_path: Path, clock: ManualClock) -> None:
    place = FaultyPlace(tmp_path)
    place.is_full = True
    async with started(lambda: place, clock, events=10, most=50) as journal:
        for _ in range(20):
            acked(journal, 10, clock)
        journal.note(EventKind.TOPIC_DELETED, TOPIC, clock.wall())
        await until(lambda: journal.figures().failed_writes > 0)
        figures = journal.figures()
        # journal_started and 4 times 10 fit; afterwards one at a time does
        assert (figures.dropped_events, figures.buffered_events) == (160, 43)
        place.is_full = False
        clock.advance(60.0)
        await until(lambda: journal.figures().written_events >= 41)
        acked(journal, 2, clock)
    rows = rows_of(tmp_path)
    (loss,) = [row for row in rows if row["event"] == "journal_lost"]
    assert loss["detail"] == "160"
    assert [row["journal_seq"] for row in rows] == [*range(1, 42), *range(202, 206)]
    assert loss["journal_seq"] == 202
    assert journal.figures().dropped_events == 160


async def test_a_loss_is_told_also_where_nothing_comes_after_it(tmp_path: Path, clock: ManualClock) -> None:
    place = FaultyPlace(tmp_path)
    place.is_full = True
    async with started(lambda: place, clock, events=10, most=50) as journal:
        for _ in range(6):
            acked(journal, 10, clock)
        await until(lambda: journal.figures().failed_writes > 0)
        place.is_full = False
        clock.advance(60.0)
        await in_time(clock, lambda: journal.figures().written_events == 42)
        assert (rows_of(tmp_path)[-1]["event"], rows_of(tmp_path)[-1]["detail"]) == ("journal_lost", "20")


async def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, clock: ManualClock) -> None:
    place = FaultyPlace(tmp_path)
    place.goes_on.clear()
    journal = ParquetJournal("p1", lambda: place, Rotation(60.0, 10), clock, name="here", events_max=5_000)
    await journal.start()
    acked(journal, 10, clock)
    assert await asyncio.to_thread(place.is_hanging.wait, PATIENCE_SECONDS)
    many = subjects(100)
    began = time.thread_time()
    for _ in range(1_000):
        journal.record(EventKind.ACKED, NAME, many, clock.wall())
    assert time.thread_time() - began < 1.0
    figures = journal.figures()
    assert figures.buffered_events <= 5_000
    assert figures.dropped_events == 100_000 + 11 - figures.buffered_events
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await journal.stop()
    place.goes_on.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await journal.stop()
    rows = rows_of(tmp_path)
    assert rows[-1]["event"] == "journal_lost"
    assert int(rows[-1]["detail"]) == figures.dropped_events == rows[-1]["journal_seq"] - len(rows)


async def test_a_disk_that_is_full_to_the_end_is_told_with_what_is_lost(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    place = FaultyPlace(tmp_path)
    place.is_full = True
    async with started(lambda: place, clock) as journal:
        acked(journal, 10, clock)
    assert finished_files(tmp_path) == []
    (told,) = caplog.records
    assert (told.message, vars(told)["events"]) == ("the journal ends without these events", 11)


# ---------------------------------------------------------------- where it is


async def test_a_place_that_is_none_is_refused_at_start(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").write_text("")
    wrong: Sequence[tuple[str, str]] = [
        (f"{tmp_path}/file/journal", "Not a directory"),
        ("nowhere://user:password@host/journal", "Protocol not known: nowhere"),
        (
            "s3://key:pass:word@host:port/journal",
            "Cannot parse URI: 's3://host:port/journal' due to syntax error at character 'p' (position 24)",
        ),
    ]
    for target, why in wrong:
        journal = ParquetJournal("p1", partial(place_at, target), Rotation(60.0, 10), clock, name="PLACE")
        with pytest.raises(StartupError) as refusal:
            await journal.start()
        told = f"the journal can't be written to PLACE ({why}); choose another place with --journal"
        assert refusal.value.detail == told
        await journal.stop()


async def test_only_what_a_kill_has_left_long_ago_is_cleared_away(tmp_path: Path, clock: ManualClock) -> None:
    writing = tmp_path / WRITING
    writing.mkdir()
    old, fresh = writing / "journal-old-000000000001.parquet", writing / "journal-new-000000000001.parquet"
    for left in (old, fresh):
        left.write_bytes(b"PAR1")
    before = time.time() - LEFT_OVER_SECONDS - 10
    os.utime(old, (before, before))
    async with started(partial(place_at, tmp_path.as_uri()), clock):
        pass
    assert [*writing.iterdir()] == [fresh]
    assert [row["event"] for row in rows_of(tmp_path)] == ["journal_started"]


async def test_links_below_the_journal_lead_to_no_other_file(tmp_path: Path, clock: ManualClock) -> None:
    journal, other = tmp_path / "journal", tmp_path / "secret"
    (journal / WRITING).mkdir(parents=True)
    other.write_text("untouched")
    place = LocalFolder(journal)
    for name in (f"probe-{os.getpid()}", "a.parquet"):
        (journal / WRITING / name).symlink_to(other)
    place.open()
    place.put("a.parquet", memoryview(b"PAR1"))
    assert (journal / "a.parquet").read_bytes() == b"PAR1"
    assert other.read_text() == "untouched"
    (journal / WRITING).rmdir()
    (journal / WRITING).symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        place.open()


async def test_files_that_the_journal_has_not_written_are_kept(tmp_path: Path) -> None:
    foreign = tmp_path / WRITING / "popgate.db"
    foreign.parent.mkdir()
    foreign.touch()
    os.utime(foreign, (1, 1))
    LocalFolder(tmp_path).open()
    assert foreign.exists()


async def test_a_store_that_fsspec_knows_gets_whole_files(clock: ManualClock) -> None:
    fsspec: Any = importlib.import_module("fsspec")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    memory, root = fsspec.filesystem("memory"), f"/journal-{secrets.token_hex(4)}"
    async with started(partial(place_at, f"memory:/{root}"), clock, events=10) as journal:
        for _ in range(3):
            acked(journal, 10, clock)
    found = sorted(memory.glob(f"{root}/date=*/hour=*/*.parquet"))
    tables = [parquet.read_table(memory.open(file)) for file in found]
    assert [one.num_rows for one in tables] == [11, 10, 10]
    assert memory.ls(f"{root}/{WRITING}") == []
    memory.rm(root, recursive=True)
