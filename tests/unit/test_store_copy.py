"""The copy of a store that is in use: writes go on and are in it, and it ends when it is not wanted or not possible."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from popgate.adapters.sqlite import copying
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.backup import hosted
from popgate.backup.hosted import COPY_FILE, BackupPhase, HostedBackup
from popgate.domain.errors import Conflict, RetryLater
from popgate.ports.snapshots import Tell
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock

ROWS, BODY = 2_000, b"x" * 4_000
WRITERS = 4


@pytest.fixture
async def database(tmp_path: Path) -> AsyncGenerator[Database]:
    """A store of about a thousand pages."""
    database = Database(tmp_path / "popgate.db", SystemClock())
    await database.open()

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE row (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        connection.executemany("INSERT INTO row (body) VALUES (?)", [(BODY,)] * ROWS)

    await database.write(fill)
    yield database
    await database.close()


async def until_copied(backup: HostedBackup) -> None:
    for _ in range(1_000):
        if backup.progress().phase is not BackupPhase.COPYING:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the copy does not end")


def ignored(copied: int, size: int) -> None:
    """Take no note of the progress."""


def at_each_step(write: Callable[[], Coroutine[None, None, None]]) -> Tell:
    """Return what a copy tells its progress to, on the store's thread: it submits a write at each step, before the
    copy runs the waiting ones. So the writes do not depend on how the machine shares its processors.
    """
    loop = asyncio.get_running_loop()
    writes = set[asyncio.Task[None]]()

    async def submit() -> None:
        writes.add(asyncio.create_task(write()))
        await asyncio.sleep(0)

    def tell(copied: int, size: int) -> None:
        asyncio.run_coroutine_threadsafe(submit(), loop).result()

    return tell


def add(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO row (body) VALUES (?)", (BODY,))
    connection.execute("DELETE FROM row WHERE id = (SELECT min(id) FROM row)")


def fail(connection: sqlite3.Connection) -> None:
    add(connection)
    raise RuntimeError("this job is refused")


def rows_of(file: Path) -> list[int]:
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [number for (number,) in connection.execute("SELECT id FROM row ORDER BY id")]


async def ids(database: Database) -> list[int]:
    return await database.read(
        lambda connection: [row for (row,) in connection.execute("SELECT id FROM row ORDER BY id")]
    )


async def test_writes_during_the_copy_do_not_wait_for_its_end_and_are_in_it(database: Database, tmp_path: Path) -> None:
    ended = 0

    async def write() -> None:
        nonlocal ended
        await database.write(add)
        ended += not copy.done()

    copy = asyncio.create_task(database.copy_to(tmp_path / "copy", at_each_step(write)))
    await copy
    assert ended > 5
    found = rows_of(tmp_path / "copy")
    assert len(found) == ROWS
    assert found == list(range(found[0], found[0] + ROWS)), "each transaction is in it completely or not at all"
    assert found[0] > ended // 2
    await database.write(add)
    assert (await ids(database))[-1] > found[-1]


async def test_a_rollback_begins_the_copy_again_and_too_many_end_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = 0

    async def write() -> None:
        nonlocal failed
        failed += 1
        with suppress(RuntimeError):
            await database.write(fail if failed <= copying.RESTARTS_MAX else add)

    monkeypatch.setattr(copying, "RESTARTS_MAX", 3)
    await database.copy_to(tmp_path / "copy", at_each_step(write))
    assert failed > copying.RESTARTS_MAX
    assert rows_of(tmp_path / "copy") == await ids(database)
    failed = -1
    with pytest.raises(StorageUnavailable, match="its transactions fail too often"):
        await database.copy_to(tmp_path / "other", at_each_step(write))


async def test_a_copy_ends_although_the_store_grows_faster_than_a_step(database: Database, tmp_path: Path) -> None:
    large = b"x" * copying.STEP_PAGES * 8192
    growing = 0

    async def grow() -> None:
        nonlocal growing
        if growing < WRITERS:
            growing += 1
            await database.write(lambda connection: connection.execute("INSERT INTO row (body) VALUES (?)", (large,)))
            growing -= 1

    async with asyncio.timeout(20):
        await database.copy_to(tmp_path / "copy", at_each_step(grow))
    assert len(rows_of(tmp_path / "copy")) > ROWS + WRITERS


async def test_a_copy_ends_if_it_is_cancelled_and_if_the_store_is_closed(database: Database, tmp_path: Path) -> None:
    begun, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell(copied: int, size: int) -> None:
        loop.call_soon_threadsafe(begun.set)

    copy = asyncio.create_task(database.copy_to(tmp_path / "copy", tell))
    await begun.wait()
    copy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copy
    begun.clear()
    await database.write(add)
    copy = asyncio.create_task(database.copy_to(tmp_path / "other", tell))
    await begun.wait()
    await database.close()
    with suppress(StorageUnavailable):  # it may have been complete already
        await copy
    with pytest.raises(StorageUnavailable):
        await database.copy_to(tmp_path / "third", ignored)


async def test_a_backup_ends_before_the_disk_is_full(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = Background()
    backup = HostedBackup(tmp_path, database, "embedded", "1.0", SystemClock(), background)
    free = hosted.FREE_BYTES_MIN + (100 << 20)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(hosted, "SPACE_CHECK_BYTES", 1)
    await backup.start()
    free = hosted.FREE_BYTES_MIN - 1
    await until_copied(backup)
    assert backup.progress().phase is BackupPhase.FAILED
    assert "MiB free, but a backup needs" in (backup.progress().failure or "")
    assert not (tmp_path / COPY_FILE).exists()
    with pytest.raises(RetryLater, match="free some space"):
        await backup.start()
    await background.stop()


async def test_only_one_client_at_a_time_has_a_backup_and_a_killed_one_loses_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("secret", "broker"):
        (tmp_path / name).write_text(name)
    (tmp_path / COPY_FILE).write_text("left by a killed proxy")
    background = Background()
    backup = HostedBackup(tmp_path, database, "embedded", "1.0", SystemClock(), background)
    assert not (tmp_path / COPY_FILE).exists()
    with pytest.raises(Conflict, match="no backup is ready"):
        backup.archive()
    await backup.start()
    with pytest.raises(Conflict, match="there is a backup already"):
        await backup.start()
    await until_copied(backup)
    parts = backup.archive()
    assert await anext(parts)
    monkeypatch.setattr(hosted, "UNUSED_SECONDS", 0)
    with pytest.raises(Conflict, match="there is a backup already"):
        await backup.start()
    await parts.aclose()
    assert (await backup.start()).phase is BackupPhase.COPYING
    await backup.delete()
    assert backup.progress().phase is BackupPhase.NONE
    assert not (tmp_path / COPY_FILE).exists()
    await background.stop()


async def test_a_proxy_whose_state_is_in_redis_has_no_backup(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="back up Redis"):
        await HostedBackup(tmp_path, None, "", "1.0", SystemClock(), Background()).start()
