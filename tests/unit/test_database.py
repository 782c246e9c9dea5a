"""The embedded store's thread: group commit, closing, and the store's time."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantStatus
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.leases import GrantEntry, GrantRequest
from popgate.runtime.clocks import ManualClock
from unit.sqlite_store import WAIT_SECONDS, opened, run_python


@pytest.fixture
async def database(tmp_path: Path) -> AsyncGenerator[Database]:
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER UNIQUE)"))
        yield database


def insert(value: int) -> Callable[[sqlite3.Connection], int]:
    def job(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO number VALUES (?)", (value,))
        return value

    return job


def numbers(connection: sqlite3.Connection) -> list[int]:
    return [value for (value,) in connection.execute("SELECT value FROM number ORDER BY value")]


class Gate:
    """A job that blocks the thread until it is opened, so that others queue behind it."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, _: sqlite3.Connection) -> None:
        self._entered.set()
        assert self._open.wait(WAIT_SECONDS)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, WAIT_SECONDS)

    def open(self) -> None:
        self._open.set()


async def held_up(database: Database) -> tuple[Gate, asyncio.Task[None]]:
    gate = Gate()
    waiting = asyncio.create_task(database.read(gate))
    await gate.entered()
    return gate, waiting


# ---------------------------------------------------------------- group commit


async def test_jobs_that_wait_share_one_commit(database: Database) -> None:
    gate, waiting = await held_up(database)
    before = database.commit_count
    writes = [asyncio.create_task(database.write(insert(value))) for value in range(200)]
    await asyncio.sleep(0)
    gate.open()
    assert await asyncio.gather(*writes) == list(range(200))
    await waiting
    assert database.commit_count - before == 1
    assert await database.read(numbers) == list(range(200))


async def test_a_bad_job_harms_no_other_and_leaves_nothing_behind(database: Database) -> None:
    def bad(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO number VALUES (1000)")
        raise ValueError("a bad job")

    gate, waiting = await held_up(database)
    jobs = [database.write(insert(1)), database.write(bad), database.write(insert(1)), database.write(insert(2))]
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.sleep(0)
    gate.open()
    first, second, third, fourth = await asyncio.gather(*tasks, return_exceptions=True)
    await waiting
    assert (first, fourth) == (1, 2)
    assert isinstance(second, ValueError)
    assert isinstance(third, sqlite3.IntegrityError)
    assert await database.read(numbers) == [1, 2]
    assert database.failure() is None


async def test_a_transaction_that_could_not_be_rolled_back_harms_no_later_one(database: Database) -> None:
    denied: list[str] = []

    def deny_one_rollback(action: int, what: str | None, *_: object) -> int:
        if (action, what) != (sqlite3.SQLITE_TRANSACTION, "ROLLBACK") or denied:
            return sqlite3.SQLITE_OK
        denied.append("ROLLBACK")
        return sqlite3.SQLITE_DENY

    def bad(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO store_test VALUES ('undone')")
        connection.set_authorizer(deny_one_rollback)
        raise ValueError("says the test")

    await database.write(lambda c: c.execute("CREATE TABLE store_test (word TEXT)"))
    with pytest.raises(ValueError, match="says the test"):
        await database.write(bad)
    assert denied == ["ROLLBACK"]
    await database.write(lambda c: c.execute("INSERT INTO store_test VALUES ('kept')"))
    assert await database.read(lambda c: c.execute("SELECT word FROM store_test").fetchall()) == [("kept",)]


async def test_a_read_sees_earlier_writes_and_none_that_is_rolled_back(database: Database) -> None:
    def bad(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO number VALUES (1000)")
        raise ValueError("a bad job")

    gate, waiting = await held_up(database)
    writing = asyncio.create_task(database.write(insert(1)))
    failing = asyncio.create_task(database.write(bad))
    reading = asyncio.create_task(database.read(numbers))
    await asyncio.sleep(0)
    gate.open()
    await waiting
    assert await writing == 1
    with pytest.raises(ValueError, match="a bad job"):
        await failing
    assert await reading == [1]


async def test_outcomes_are_told_in_the_order_of_handing_in(database: Database) -> None:
    order: list[int] = []
    told = asyncio.Event()

    def done(value: int) -> None:
        order.append(value)
        if value == 99:
            told.set()

    for value in range(100):
        database.submit(insert(value), done, lambda _: told.set(), writes=True)
    await told.wait()
    assert order == list(range(100))


async def test_a_read_that_fails_is_its_callers_affair(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await database.read(lambda c: c.execute("SELECT * FROM missing"))
    assert await database.read(numbers) == []


async def test_a_cancelled_caller_leaves_everything_whole(database: Database) -> None:
    gate, waiting = await held_up(database)
    tasks = [asyncio.create_task(database.write(insert(value))) for value in range(10)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    gate.open()
    await asyncio.gather(*tasks, return_exceptions=True)
    await waiting
    assert await database.read(numbers) == list(range(10))  # its jobs were run nevertheless


async def test_beyond_its_maximum_of_waiting_jobs_the_store_refuses_more(tmp_path: Path) -> None:
    async with opened(tmp_path, waiting_jobs_max=4) as database:
        gate, waiting = await held_up(database)
        tasks = [asyncio.create_task(database.read(lambda _: 1)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(StateUnavailable, match="overloaded") as refused:
            await database.write(lambda _: None, StateUnavailable)
        assert refused.value.retry_after_seconds > 0
        gate.open()
        assert await asyncio.gather(*tasks) == [1, 1, 1]
        await waiting
        assert await database.read(lambda _: 2) == 2


async def test_what_jobs_remember_of_a_rolled_back_group_is_forgotten(database: Database) -> None:
    """The lease store keeps live records in memory: a grant that was rolled back must not hold the copy."""
    store = SqliteLeaseStore(database)
    queue = BrokerQueue("q")
    await store.claim(queue)
    request = GrantRequest(
        subscription=Subscription(TopicName("t"), GroupName("g")),
        lease_id=LeaseId("lease"),
        entries=[GrantEntry(queue, 1, CopyId("copy"), 0)],
        invisibility_seconds=30.0,
        max_deliveries=None,
        mode_generation=1,
    )

    def bad(_: sqlite3.Connection) -> None:
        raise ValueError("a bad job")

    gate, waiting = await held_up(database)
    granting = asyncio.create_task(store.grant(request))
    failing = asyncio.create_task(database.write(bad))
    await asyncio.sleep(0)
    gate.open()
    (answer,) = await granting
    with pytest.raises(ValueError, match="a bad job"):
        await failing
    await waiting
    assert answer.status is GrantStatus.GRANTED
    assert answer.record is not None
    assert answer.record.delivery_count == 1


# ---------------------------------------------------------------- closing


async def test_closing_finishes_what_waits_and_may_be_repeated(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    database = Database(tmp_path / "popgate.db", ManualClock())
    await database.close()
    await database.open()
    await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER UNIQUE)"))
    tasks = [asyncio.create_task(database.write(insert(value))) for value in range(50)]
    await asyncio.sleep(0)
    await asyncio.gather(database.close(), database.close())
    assert await asyncio.gather(*tasks) == list(range(50))
    await database.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "popgate-sqlite"]
    assert "not open" in (database.failure() or "")
    with pytest.raises(StorageUnavailable, match="not open"):
        await database.read(numbers)
    async with opened(tmp_path) as again:
        assert await again.read(numbers) == list(range(50))


async def test_a_closed_store_is_one_file_without_a_log(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER UNIQUE)"))
        assert (tmp_path / "popgate.db-wal").exists()
    assert not (tmp_path / "popgate.db-wal").exists()
    assert (tmp_path / "popgate.db").stat().st_size > 0


def test_a_process_that_never_closes_still_ends(tmp_path: Path) -> None:
    script = """
        import asyncio, sys
        from pathlib import Path
        from popgate.adapters.sqlite.database import Database
        from popgate.runtime.clocks import SystemClock

        async def main():
            database = Database(Path(sys.argv[1]) / "popgate.db", SystemClock())
            await database.open()
            await database.write(lambda c: c.execute("CREATE TABLE number (value INTEGER)"))

        asyncio.run(main())
    """
    assert run_python(script, tmp_path).returncode == 0


async def test_a_start_that_is_cancelled_can_be_closed(tmp_path: Path) -> None:
    database = Database(tmp_path / "popgate.db", ManualClock())
    opening = asyncio.create_task(database.open())
    await asyncio.sleep(0)
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    await database.close()
    async with opened(tmp_path):
        pass


# ---------------------------------------------------------------- the store's time


async def test_jumps_of_the_wall_clock_do_not_move_the_stores_time(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as database:
        start = database.now()
        assert start == clock.wall()
        clock.jump_wall(86_400.0)
        assert database.now() == start
        clock.jump_wall(-200_000.0)
        clock.advance(5.0)
        assert database.now() == pytest.approx(start + 5.0)


async def test_the_stores_time_never_goes_back_over_restarts(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as database:
        clock.advance(100.0)
        before = database.now()
    clock.jump_wall(-50_000.0)
    async with opened(tmp_path, clock) as database:
        assert database.now() >= before
    clock.jump_wall(500_000.0)
    async with opened(tmp_path, clock) as database:
        assert database.now() == clock.wall()


async def test_after_a_crash_the_stores_time_is_at_most_a_second_behind(tmp_path: Path) -> None:
    clock = ManualClock()
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    async with opened(tmp_path, clock) as database:
        for _ in range(10):
            clock.advance(0.7)
            await database.write(lambda _: None)
        before = database.now()
        for name in ("popgate.db", "popgate.db-wal"):  # as a crash would leave it
            (crashed / name).write_bytes((tmp_path / name).read_bytes())
    clock.jump_wall(-50_000.0)
    async with opened(crashed, clock) as database:
        assert before - 1.0 <= database.now() <= before
