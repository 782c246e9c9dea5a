"""The embedded store on a full disk and over a kill: answered writes survive, and it resumes by itself."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from popgate.adapters.sqlite.failures import StorageUnavailable
from popgate.adapters.sqlite.lease_records import STATES
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import RecordState
from unit.sqlite_store import WAIT_SECONDS, opened, run_python, running_python

# ---------------------------------------------------------------- a full disk


def text_job(size: int) -> Callable[[sqlite3.Connection], object]:
    return lambda connection: connection.execute("INSERT INTO filler VALUES (zeroblob(?))", (size,))


async def test_a_full_disk_is_said_harms_nothing_and_is_overcome(tmp_path: Path) -> None:
    async with opened(tmp_path) as database:
        await database.write(lambda c: c.execute("CREATE TABLE filler (body BLOB)"))
        await database.write(text_job(1000))
        pages = await database.read(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        await database.read(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall())
        tasks = [asyncio.create_task(database.write(text_job(size))) for size in (10, 1_000_000, 20)]
        small, large, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(small, BaseException)
        assert not isinstance(other, BaseException)
        assert isinstance(large, StorageUnavailable)
        assert str(tmp_path / "popgate.db") in large.detail
        assert "free some space" in large.detail
        assert large.retry_after_seconds > 0
        with pytest.raises(StateUnavailable, match="is full"):
            await database.write(text_job(1_000_000), StateUnavailable)
        assert "is full" in (database.failure() or "")
        await database.read(lambda c: c.execute("PRAGMA max_page_count = 1000000").fetchall())
        async with asyncio.timeout(WAIT_SECONDS):
            while database.failure() is not None:  # noqa: ASYNC110 - it recovers by itself, without a signal
                await asyncio.sleep(0.05)
        await database.write(text_job(1_000_000))
        rows = await database.read(lambda c: c.execute("SELECT length(body) FROM filler ORDER BY 1").fetchall())
        assert rows == [(10,), (20,), (1000,), (1_000_000,)]


def test_the_limit_of_a_real_file_system_is_survived_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    script = """
        import asyncio, os, resource, sys
        from pathlib import Path
        from popgate.adapters.sqlite.broker import SqliteBroker
        from popgate.adapters.sqlite.database import Database
        from popgate.domain.errors import BrokerUnavailable
        from popgate.domain.message import Message
        from popgate.domain.names import Subscription, own_layout
        from popgate.ports.broker import Outgoing
        from popgate.runtime.clocks import SystemClock

        def outgoing(number):
            message = Message(copy_id=f"{number:032}", message_id="m", body=os.urandom(20_000), headers={},
                              ordering_key=None, published_at=0.0)
            return Outgoing(message=message, topic="t")

        async def main():
            folder = Path(sys.argv[1])
            database = Database(folder / "popgate.db", SystemClock())
            await database.open()
            broker = SqliteBroker(database)
            await broker.start()
            layout = own_layout(Subscription("t", "g"), 1)
            await broker.declare_group(layout)
            size = (folder / "popgate.db-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1_000_000, resource.RLIM_INFINITY))
            published = 0
            try:
                for number in range(10_000):
                    await broker.publish([outgoing(number)])
                    published += 1
            except BrokerUnavailable as error:
                assert str(folder / "popgate.db") in error.detail, error.detail
                assert error.retry_after_seconds > 0
                assert broker.unavailable_reason() == error.detail
            assert 20 < published < 200, published
            (depth,) = await broker.depth(layout.queues)
            assert depth.ready == published, (depth, published)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            for number in range(published, 500):
                await broker.publish([outgoing(number)])
            assert broker.unavailable_reason() is None
            os._exit(0)  # no tidy end: what was answered is on the disk

        asyncio.run(main())
    """
    ended = run_python(script, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "the store can't write\n")  # logged once, not for every publish
    with sqlite3.connect(tmp_path / "popgate.db") as connection:
        rows = connection.execute("SELECT copy_id FROM message ORDER BY message_key").fetchall()
        (stored,) = connection.execute("SELECT stored FROM broker_queue WHERE topic = 't'").fetchone()
    connection.close()
    assert rows == [(f"{number:032}",) for number in range(500)]
    assert stored == 500


# ---------------------------------------------------------------- crashes


def test_every_publish_that_was_answered_survives_a_kill(tmp_path: Path, full_run: bool) -> None:
    script = """
        import asyncio, sys
        from itertools import count
        from pathlib import Path
        from popgate.adapters.sqlite.broker import SqliteBroker
        from popgate.adapters.sqlite.database import Database
        from popgate.domain.message import Message
        from popgate.domain.names import Subscription, own_layout
        from popgate.ports.broker import Outgoing
        from popgate.runtime.clocks import SystemClock

        async def publisher(broker, name):
            for number in count():
                messages = [
                    Message(copy_id=f"{name}-{number}-{part}", message_id="m", body=b"x" * 1000, headers={"n": number},
                            ordering_key=None, published_at=0.0)
                    for part in range(8)
                ]
                await broker.publish([Outgoing(message=message, topic="t", index=number % 4) for message in messages])
                sys.stdout.write("".join(f"{message.copy_id}\\n" for message in messages))
                sys.stdout.flush()

        async def main():
            database = Database(Path(sys.argv[1]) / "popgate.db", SystemClock())
            await database.open()
            broker = SqliteBroker(database)
            await broker.start()
            await broker.declare_group(own_layout(Subscription("t", "g"), 4))
            await asyncio.gather(*(publisher(broker, f"{sys.argv[2]}-{name}") for name in range(8)))

        asyncio.run(main())
    """
    reported: set[str] = set()
    for round_number in range(20 if full_run else 3):
        with running_python(script, tmp_path, round_number) as process:
            assert process.stdout is not None
            for _ in range(500 * (1 + round_number)):
                reported.add(process.stdout.readline().removesuffix("\n"))
            process.kill()
            reported.update(line.removesuffix("\n") for line in process.stdout if line.endswith("\n"))
    connection = sqlite3.connect(tmp_path / "popgate.db")
    stored = {copy_id for (copy_id,) in connection.execute("SELECT copy_id FROM message")}
    counts = connection.execute("SELECT sum(stored) FROM broker_queue").fetchone()
    connection.close()
    assert reported - stored == set()
    assert counts == (len(stored),)


def test_a_disk_that_is_full_at_any_write_refuses_that_one_and_loses_nothing(tmp_path: Path, full_run: bool) -> None:
    """Publishes, grants and acks, with room for a little more each time; then there is room again."""
    script = """
        import asyncio, os, resource, sys
        from pathlib import Path
        from popgate.adapters.sqlite.broker import SqliteBroker
        from popgate.adapters.sqlite.database import Database
        from popgate.adapters.sqlite.leases import SqliteLeaseStore
        from popgate.domain.errors import BrokerUnavailable, StateUnavailable
        from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
        from popgate.domain.message import Message
        from popgate.domain.names import Subscription, own_layout
        from popgate.ports.broker import Outgoing
        from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry
        from popgate.runtime.clocks import SystemClock

        LOG, ROUNDS = Path(sys.argv[1]) / "popgate.db-wal", int(sys.argv[2])

        def limit(size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        def outgoing(copy_id):
            message = Message(copy_id=copy_id, message_id="m", body=os.urandom(3_000), headers={},
                              ordering_key=None, published_at=0.0)
            return Outgoing(message=message, topic="t")

        async def main():
            database = Database(LOG.with_name("popgate.db"), SystemClock())
            await database.open()
            broker, store = SqliteBroker(database), SqliteLeaseStore(database)
            await broker.start()
            layout = own_layout(Subscription("t", "g"), 1)
            await broker.declare_group(layout)
            queue = layout.queues[0]
            epoch = await store.claim(queue)
            done, refused = [], set()
            for round_number in range(ROUNDS):
                limit(LOG.stat().st_size + round_number * 1_100 % 30_000)
                for number in range(3):
                    copy_id, lease = f"{round_number}-{number}", f"l{round_number}-{number}"
                    step = "published"
                    try:
                        await broker.publish([outgoing(copy_id)])
                        done.append(f"{step} {copy_id}")
                        step = "granted"
                        request = GrantRequest(subscription=layout.subscription, lease_id=lease,
                            entries=[GrantEntry(queue, epoch, copy_id, 0)], invisibility_seconds=900.0,
                            max_deliveries=None, mode_generation=1)
                        (granted,) = await store.grant(request)
                        assert granted.status is GrantStatus.GRANTED, granted
                        done.append(f"{step} {copy_id}")
                        step = "acked"
                        (settled,) = await store.settle([SettleEntry(queue, copy_id, lease, SettleAction.ACK)])
                        assert settled.status is SettleStatus.DONE, settled
                        done.append(f"{step} {copy_id}")
                    except (BrokerUnavailable, StateUnavailable) as error:
                        assert error.retry_after_seconds > 0
                        assert str(LOG.with_name("popgate.db")) in error.detail, error.detail
                        refused.add(step)
                limit(resource.RLIM_INFINITY)
                await broker.publish([outgoing(f"after-{round_number}")])
                done.append(f"published after-{round_number}")
            assert refused == {"published", "granted", "acked"}, refused
            sys.stdout.write("\\n".join(done))
            sys.stdout.flush()
            os._exit(0)  # no tidy end: what was answered is on the disk

        asyncio.run(main())
    """
    ended = run_python(script, tmp_path, 600 if full_run else 60)
    assert (ended.returncode, ended.stderr) == (0, "the store can't write\n")
    done = set(ended.stdout.split("\n"))
    connection = sqlite3.connect(tmp_path / "popgate.db")
    kept = {f"published {copy_id}" for (copy_id,) in connection.execute("SELECT copy_id FROM message")}
    for copy_id, state in connection.execute("SELECT copy_id, state FROM lease").fetchall():
        kept |= {f"granted {copy_id}", *([f"acked {copy_id}"] if STATES[state] is RecordState.ACKED else [])}
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    assert done <= kept, sorted(done - kept)[:5]
