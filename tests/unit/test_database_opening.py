"""Which files and folders the embedded store opens, and its errors for those it refuses."""

import os
import sqlite3
from pathlib import Path

import pytest

from popgate.adapters.sqlite import opening
from popgate.adapters.sqlite.bulk import parameters
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.folder_lock import FolderLock
from popgate.adapters.sqlite.lease_records import STATES, read_records
from popgate.adapters.sqlite.messages import fetch_after, message_key
from popgate.adapters.sqlite.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION, UPGRADES
from popgate.domain.errors import StartupError, StateUnavailable
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.message import Message
from popgate.domain.names import CopyId, LeaseId
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import opened, running_python

# ---------------------------------------------------------------- what may be opened


async def refusal(folder: Path) -> str:
    database = Database(folder / "popgate.db", ManualClock())
    with pytest.raises(StartupError) as refused:
        await database.open()
    await database.close()
    assert "\n" not in refused.value.detail
    assert str(folder) in refused.value.detail
    return refused.value.detail


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is somebody's file\n" * 100, b"SQLite format 3\x00" * 9]
)
async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "popgate.db"
    file.write_bytes(content)
    assert "damaged or not a database" in await refusal(tmp_path)
    assert file.read_bytes() == content


async def test_damage_after_an_unclean_end_is_found_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER UNIQUE)"))
        await database.write(
            lambda c: c.executemany("INSERT INTO number VALUES (?)", [(number,) for number in range(10_000)])
        )
    file = tmp_path / "popgate.db"
    content = bytearray(file.read_bytes())
    content[-16_384:] = b"\xa5" * 16_384
    file.write_bytes(content)
    log = tmp_path / "popgate.db-wal"
    log.write_bytes(b"\0" * 32)  # left by a crash
    assert "is damaged" in await refusal(tmp_path)
    assert file.read_bytes() == bytes(content)


async def test_damage_that_is_met_later_is_said_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "QUICK_CHECK_BYTES_MAX", 0)  # as with a file too large to be checked completely
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER)"))
        await database.write(
            lambda c: c.executemany("INSERT INTO number VALUES (?)", [(number,) for number in range(100_000)])
        )
    file = tmp_path / "popgate.db"
    content = bytearray(file.read_bytes())
    content[-300_000:] = b"\xa5" * 300_000
    file.write_bytes(content)
    async with opened(tmp_path) as database:
        with pytest.raises(StateUnavailable, match="is damaged") as error:
            await database.read(lambda c: c.execute("SELECT sum(value) FROM number").fetchone(), StateUnavailable)
        assert str(file) in error.value.detail


async def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        await database.read(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}"))
    assert "newer popgate" in await refusal(tmp_path)
    connection = sqlite3.connect(tmp_path / "popgate.db")
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
    connection.close()


async def test_a_file_of_version_1_is_brought_up_and_keeps_its_messages(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "popgate.db")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute("INSERT INTO broker_queue (queue_id, name, stored) VALUES (1, 'q', 1)")
    row = (message_key(1, 1), "c", "m", None, 12.5, None, b"body")
    connection.execute(
        "INSERT INTO message (message_key, copy_id, message_id, ordering_key, published_at, headers, body) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        row,
    )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    async with opened(tmp_path) as database:
        (found,) = (await database.read(lambda c: fetch_after(c, 1, 1, 10))).messages
        version = await database.read(lambda c: c.execute("PRAGMA user_version").fetchone())
    assert found == (1, Message(CopyId("c"), "m", b"body", {}, None, 12.5))
    assert version == (SCHEMA_VERSION,)
    async with opened(tmp_path / "new") as database:
        new = await database.read(lambda c: c.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall())
    async with opened(tmp_path) as database:
        old = await database.read(lambda c: c.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall())
    assert old == new


async def test_a_file_of_version_2_is_brought_up_and_knows_since_when_its_leases_are_out(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "popgate.db")
    for statement in (*SCHEMA, *UPGRADES[2], f"PRAGMA application_id = {APPLICATION_ID}", "PRAGMA user_version = 2"):
        connection.execute(statement)
    leased, acked = STATES.index(RecordState.LEASED), STATES.index(RecordState.ACKED)
    for copy_id, state, count in (("first", leased, 1), ("third", leased, 3), ("acked", acked, 1)):
        row = (1, copy_id, state, "lease", 90.0, count, 10.0, 60.0, 1, None, None, "")
        connection.execute(f"INSERT INTO lease VALUES ({parameters(len(row))})", row)
    connection.commit()
    connection.close()
    async with opened(tmp_path) as database:
        names = [CopyId("first"), CopyId("third"), CopyId("acked")]
        records = await database.read(lambda c: read_records(c, 1, names))
    record = LeaseRecord(RecordState.LEASED, LeaseId("lease"), 90.0, 1, 10.0, 60.0, 1, leased_at=10.0)
    assert [records[name] for name in names] == [
        record,  # it is leased for the first time
        record._replace(delivery_count=3, leased_at=60.0),  # or earlier, which is unknown
        record._replace(state=RecordState.ACKED, leased_at=0.0),
    ]


async def test_an_upgrade_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "popgate.db"
    connection = sqlite3.connect(file)
    for statement in (*SCHEMA, f"PRAGMA application_id = {APPLICATION_ID}", "PRAGMA user_version = 1"):
        connection.execute(statement)
    connection.execute("CREATE TABLE dedup (somebody_elses INTEGER)")
    connection.commit()
    before = connection.execute("SELECT sql FROM sqlite_schema").fetchall()
    connection.close()
    database = Database(file, ManualClock())
    with pytest.raises(sqlite3.OperationalError, match="dedup"):
        await database.open()
    await database.close()
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT sql FROM sqlite_schema").fetchall() == before
    connection.close()


async def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "popgate.db")
    connection.execute("CREATE TABLE theirs (value INTEGER)")
    connection.commit()
    connection.close()
    assert "another program" in await refusal(tmp_path)


async def test_a_file_that_another_program_has_locked_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    connection = sqlite3.connect(tmp_path / "popgate.db")
    connection.execute("BEGIN EXCLUSIVE")
    assert "locked by another program" in await refusal(tmp_path)
    connection.close()


async def test_a_folder_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "--data-dir" in await refusal(tmp_path / "file")
    (tmp_path / "popgate.db").mkdir()
    assert "can't" in await refusal(tmp_path)


async def test_a_second_process_on_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    script = """
        import sys, time
        from pathlib import Path
        from popgate.adapters.sqlite.folder_lock import FolderLock

        lock = FolderLock(Path(sys.argv[1]))
        print("locked", flush=True)
        time.sleep(60)
    """
    with running_python(script, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert f"another popgate (pid {process.pid})" in await refusal(tmp_path)
    async with opened(tmp_path):  # the lock ended with the process
        assert f"pid {os.getpid()}" in await refusal(tmp_path)
    FolderLock(tmp_path).release()


async def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / "popgate.lock").symlink_to(other)
    assert "--data-dir" in await refusal(tmp_path)
    assert other.read_text() == "untouched"


async def test_a_commit_is_on_stable_storage(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        assert await database.read(lambda c: c.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
        assert await database.read(lambda c: c.execute("PRAGMA synchronous").fetchone()) == (2,)
        assert await database.read(lambda c: c.execute("PRAGMA locking_mode").fetchone()) == ("exclusive",)


async def test_the_store_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "by popgate"
    async with opened(folder) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER)"))
        for name in ("popgate.db", "popgate.db-wal", "popgate.lock"):
            assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
