"""The embedded store over a power cut, which it survives, and with damaged files, which it refuses at startup."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from popgate.adapters.doctor.catalog import folder_catalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.log_check import damage_in
from popgate.domain.errors import StartupError
from popgate.runtime.clocks import ManualClock
from popgate.runtime.stable_files import check_file
from unit.sqlite_store import opened

FILE, LOG = "popgate.db", "popgate.db-wal"
LOG_HEADER_BYTES, FRAME_BYTES = 32, 24 + 8192
COMMITS = 12
FLIPS, FLIPS_FULL = 40, 2_000
CUTS, CUTS_FULL = 40, 1_000


def writing(numbers: range, size: int = 300) -> Callable[[sqlite3.Connection], object]:
    rows = [(number, random.Random(number).randbytes(size)) for number in numbers]
    return lambda connection: connection.executemany("INSERT INTO number VALUES (?, ?)", rows)


async def crashed(folder: Path, commits: int = COMMITS) -> Path:
    """Return a killed store: ``commits`` transactions of 30 numbers each, all of them in its log."""
    target = folder / "crashed"
    target.mkdir()
    async with opened(folder / "alive") as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
        for commit in range(commits):
            await database.write(writing(range(commit * 30, commit * 30 + 30)))
        copy(folder / "alive", target)
    return target


def copy(source: Path, target: Path) -> None:
    for name in (FILE, LOG):
        shutil.copy2(source / name, target / name)


async def refusal(folder: Path) -> str:
    database = Database(folder / FILE, ManualClock())
    try:
        with pytest.raises(StartupError) as refused:
            await database.open()
    finally:
        await database.close()
    return refused.value.detail


async def numbers_in(folder: Path) -> list[int]:
    async with opened(folder) as database:
        rows = await database.read(lambda c: c.execute("SELECT value, filler FROM number ORDER BY value").fetchall())
        assert await database.read(lambda c: c.execute("PRAGMA integrity_check").fetchall()) == [("ok",)]
    assert all(filler == random.Random(value).randbytes(len(filler)) for value, filler in rows)
    return [value for value, _ in rows]


def flip(file: Path, place: int, bit: int) -> None:
    """Flip a bit without a program's write to the file."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[place] ^= 1 << bit
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def frame_count(log: Path) -> int:
    return (log.stat().st_size - LOG_HEADER_BYTES) // FRAME_BYTES


def last_transaction_at(log: Path) -> int:
    """Return where the last transaction begins: after the last commit frame but one."""
    content = log.read_bytes()
    starts = range(LOG_HEADER_BYTES, len(content), FRAME_BYTES)
    ends = [start + FRAME_BYTES for start in starts if content[start + 4 : start + 8] != bytes(4)]
    return ends[-2]


# ---------------------------------------------------------------- a bit has flipped


async def test_a_flipped_bit_in_a_closed_store_is_refused_wherever_it_is(
    tmp_path: Path, seed: int, full_run: bool
) -> None:
    chance = random.Random(seed)
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
        await database.write(writing(range(500)))
    file = tmp_path / FILE
    for _ in range(FLIPS_FULL if full_run else FLIPS):
        place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, place, bit)
        content = file.read_bytes()
        said = await refusal(tmp_path)
        assert f"{file} is damaged" in said, (place, bit)
        assert "restore a backup" in said
        assert file.read_bytes() == content, "it is left alone"
        flip(file, place, bit)
    assert await numbers_in(tmp_path) == list(range(500))


async def test_a_flipped_bit_in_what_the_log_had_synced_is_refused(tmp_path: Path, seed: int, full_run: bool) -> None:
    """SQLite alone would consider it the log's end, and lose what follows."""
    chance = random.Random(seed)
    folder = await crashed(tmp_path)
    log = folder / LOG
    first_bytes = last_transaction_at(log)
    for _ in range(FLIPS_FULL if full_run else FLIPS):
        place, bit = chance.randrange(first_bytes), chance.randrange(8)
        flip(log, place, bit)
        content = log.read_bytes()
        said = await refusal(folder)
        assert f"{log} is damaged" in said, (place, bit)
        assert log.read_bytes() == content, "it is left alone"
        flip(log, place, bit)
    assert await numbers_in(folder) == list(range(COMMITS * 30))


async def test_a_truncated_file_is_refused(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
        await database.write(writing(range(500)))
    file = tmp_path / FILE
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) - 8192, *(chance.randrange(512, len(whole)) for _ in range(10))):
        file.write_bytes(whole[:length])
        assert f"{file} is damaged" in await refusal(tmp_path), length


async def test_a_store_that_others_have_written_to_is_no_damaged_one(tmp_path: Path) -> None:
    """An older popgate, which keeps no checksum, or an operator's tool."""
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
    assert check_file(tmp_path / FILE).exists()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("INSERT INTO number VALUES (7, ?)", (random.Random(7).randbytes(20),))
    connection.commit()
    connection.close()
    assert await numbers_in(tmp_path) == [7]


async def test_a_store_that_was_opened_again_is_no_damaged_one_where_a_power_cut_has_left_its_former_time(
    tmp_path: Path,
) -> None:
    """SQLite syncs the content of its file, but not its modification time."""
    alive, cut = tmp_path / "alive", tmp_path / "cut"
    async with opened(alive) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
    closed_at = (alive / FILE).stat().st_mtime_ns
    async with opened(alive) as database:
        await database.write(writing(range(30)))
        await database.read(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        shutil.copytree(alive, cut)
    os.utime(cut / FILE, ns=(closed_at, closed_at))
    assert await numbers_in(cut) == list(range(30))


# ---------------------------------------------------------------- a power cut


async def test_what_was_answered_survives_a_power_cut(tmp_path: Path, seed: int, full_run: bool) -> None:
    """The log is cut between the last sync before the last answer and the latest write, its last page is torn, and
    only some of a checkpoint's pages have reached the file.
    """
    chance = random.Random(seed)
    alive, cut = tmp_path / "alive", tmp_path / "cut"
    checkpoints = 0
    async with opened(alive) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER PRIMARY KEY, filler BLOB)"))
        await database.read(lambda c: c.execute("PRAGMA wal_autocheckpoint = 40").fetchall())
        for turn in range(CUTS_FULL if full_run else CUTS):
            first = turn * 100
            await database.write(writing(range(first, first + 50), chance.randint(1, 2_000)))
            file, log = (alive / FILE).read_bytes(), (alive / LOG).read_bytes()
            await database.write(writing(range(first + 50, first + 100), chance.randint(1, 2_000)))  # without an answer
            checkpoints += (alive / FILE).read_bytes() != file
            shutil.rmtree(cut, ignore_errors=True)
            cut.mkdir()
            cut_power(alive, cut, file, log, chance)
            found = await numbers_in(cut)
            assert found in (list(range(first + 50)), list(range(first + 100))), turn
    assert checkpoints > 2, "some turns are about a checkpoint"


def cut_power(alive: Path, cut: Path, file: bytes, log: bytes, chance: random.Random) -> None:
    """Return what a disk may contain of a store that had ``file`` and ``log`` at its last sync."""
    new_file, new_log = (alive / FILE).read_bytes(), (alive / LOG).read_bytes()
    begun_anew = new_log[:LOG_HEADER_BYTES] != log[:LOG_HEADER_BYTES]
    if begun_anew:  # the file contained the whole log, synced, before the first frame replaced one
        kept, file, log = LOG_HEADER_BYTES, new_file, new_log
    else:
        kept = synced_bytes(log)
    length = chance.randint(kept, max(kept, written_bytes(new_log, kept)))
    torn = length - min(length - kept, chance.randrange(FRAME_BYTES))
    rubbish = chance.choice((bytes(length - torn), chance.randbytes(length - torn), log[torn:length]))
    (cut / LOG).write_bytes(new_log[:torn] + rubbish + log[length:])
    pages = [page_of(chance.choice((file, new_file)), at) for at in range(0, len(new_file), 8192)]
    (cut / FILE).write_bytes(b"".join(pages))


def page_of(file: bytes, at: int) -> bytes:
    return file[at : at + 8192].ljust(8192, b"\0")


def synced_bytes(log: bytes) -> int:
    """Return where the last transaction of ``log`` ends: all later frames are of an earlier use."""
    salts, end = log[16:24], LOG_HEADER_BYTES
    for start in range(LOG_HEADER_BYTES, len(log), FRAME_BYTES):
        if log[start + 8 : start + 16] != salts:
            break
        if log[start + 4 : start + 8] != bytes(4):
            end = start + FRAME_BYTES
    return end


def written_bytes(log: bytes, kept: int) -> int:
    """Return where the frames of this use of the log end."""
    end = kept
    while log[end + 8 : end + 16] == log[16:24]:
        end += FRAME_BYTES
    return end


async def test_a_log_that_ends_in_the_middle_of_its_last_transaction_is_no_damaged_one(tmp_path: Path) -> None:
    folder = await crashed(tmp_path)
    log = folder / LOG
    whole, last = log.read_bytes(), last_transaction_at(log)
    for length in {last, last + 1, last + 24, last + FRAME_BYTES, len(whole) - 1}:
        log.write_bytes(whole[:length])
        assert damage_in(log, bytes_max=1 << 30) is None
    log.write_bytes(whole[:last] + bytes(len(whole) - last))
    assert await numbers_in(folder) == list(range(COMMITS * 30 - 30))


@pytest.mark.parametrize("content", [b"", bytes(32), bytes(20_000), b"\x37\x7f"])
def test_a_log_that_was_never_synced_is_no_damaged_one(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / LOG
    log.write_bytes(content)
    assert damage_in(log, bytes_max=1 << 30) is None
    assert damage_in(tmp_path / "missing", bytes_max=1 << 30) is None


@pytest.mark.parametrize("content", [None, b""])
async def test_a_lost_database_is_not_taken_for_a_new_one(tmp_path: Path, content: bytes | None) -> None:
    folder = await crashed(tmp_path)
    file, log = folder / FILE, folder / LOG
    file.unlink() if content is None else file.write_bytes(content)
    before = log.read_bytes()
    assert "is missing or empty, although it was in use" in await refusal(folder)
    assert log.read_bytes() == before
    async with opened(tmp_path / "closed"):
        pass
    (tmp_path / "closed" / FILE).unlink()
    assert "is missing or empty" in await refusal(tmp_path / "closed")


async def test_the_catalog_is_read_without_a_change_of_the_folder(tmp_path: Path) -> None:
    folder = await crashed(tmp_path)
    (folder / "popgate.lock").touch()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert folder_catalog(folder / FILE) == []
    damaged = bytearray(before[LOG])
    damaged[LOG_HEADER_BYTES + 3 * FRAME_BYTES + 100] ^= 1
    (folder / LOG).write_bytes(damaged)
    with pytest.raises(OSError, match="is damaged: frame"):
        folder_catalog(folder / FILE)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {**before, LOG: bytes(damaged)}
