"""The watched key file: when it is read again, and what happens to keys while it is wrong."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from popgate.auth import watched_keys
from popgate.auth.key_file import FILE_BYTES_MAX
from popgate.auth.keys import NewKey, new_key
from popgate.auth.watched_keys import KeyChanges, WatchedKeys
from popgate.domain.errors import StartupError
from popgate.runtime.clocks import ManualClock, SystemClock
from popgate.runtime.private_files import replace_private
from support.processes import wait_until

START = 1_700_000_000.0


def content(*keys: NewKey, expires: str | None = None) -> bytes:
    lines = ["[principals.app]", 'role = "consumer"']
    for key in keys:
        lines += [f"[principals.app.keys.{key.id}]", f'sha256 = "{key.digest.hex()}"', "created = 2023-11-14T00:00:00Z"]
        lines += [] if expires is None else [f"expires = {expires}"]
    return "\n".join([*lines, ""]).encode()


class Watch:
    """Watched keys whose file and looks the test controls."""

    def __init__(self, file: Path, *keys: NewKey, expires: str | None = None) -> None:
        self.file = file
        self.changes: list[KeyChanges] = []
        self.clock = ManualClock(wall=START)
        self.replace(content(*keys, expires=expires))
        self.keys = WatchedKeys(file, clock=self.clock, changed=self.changes.append)
        self.keys.load()

    def replace(self, new: bytes) -> None:
        replace_private(self.file, new)

    def knows(self, key: NewKey) -> bool:
        return self.keys.caller_by_key(key.text) is not None

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            asyncio.run(self.keys.look())


@pytest.fixture
def old() -> NewKey:
    return new_key()


@pytest.fixture
def new() -> NewKey:
    return new_key()


@pytest.fixture
def watch(tmp_path: Path, old: NewKey) -> Watch:
    return Watch(tmp_path / "keys.toml", old)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["reason"] for record in caplog.records if record.levelno == logging.WARNING]


# ---------------------------------------------------------------- the start


def test_the_start_fails_with_all_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for missing in (file, tmp_path / "\udcff"):  # a name that is not UTF-8
        with pytest.raises(StartupError, match="does not exist"):
            WatchedKeys(missing).load()
    replace_private(file, b'[principals.a]\nrole = "x"\n[principals.b]\nfoo = 1')
    with pytest.raises(StartupError) as raised:
        WatchedKeys(file).load()
    assert [line.count(str(file)) for line in raised.value.detail.splitlines()] == [0, 1, 1]
    file.chmod(0o644)
    with pytest.raises(StartupError, match="chmod 600"):
        WatchedKeys(file).load()


# ---------------------------------------------------------------- changes


def test_a_changed_file_is_read_at_the_second_look(watch: Watch, old: NewKey, new: NewKey) -> None:
    version = watch.keys.version
    watch.replace(content(new))
    watch.look(1)
    assert watch.knows(old)
    watch.look(1)
    assert (watch.knows(old), watch.knows(new)) == (False, True)
    assert watch.keys.version == version + 1
    assert watch.changes == [KeyChanges(added=(new.id,), removed=(old.id,))]


def test_a_file_that_has_not_changed_is_not_read(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []

    def reading(file: Path, **_: object) -> bytes:
        reads.append(file)
        return b""

    monkeypatch.setattr(watched_keys, "read_private", reading)
    watch.look(5)
    assert reads == []


def test_a_file_with_the_same_content_is_no_change(watch: Watch, old: NewKey) -> None:
    version = watch.keys.version
    watch.replace(content(old))
    watch.look()
    watch.replace(b"# a comment\n" + content(old))
    watch.look()
    assert (watch.keys.version, watch.changes, watch.knows(old)) == (version, [], True)


@pytest.mark.parametrize("change", ['role = "publisher"', 'role = "consumer"\ncertificates = ["mallory.example.org"]'])
def test_changed_permissions_and_certificates_grow_the_version_and_are_reported(
    watch: Watch, old: NewKey, change: str
) -> None:
    version = watch.keys.version
    watch.replace(content(old).replace(b'role = "consumer"', change.encode()))
    watch.look()
    assert (watch.keys.version, watch.changes) == (version + 1, [KeyChanges(changed=("app",))])


def test_principals_that_come_and_go_are_reported(watch: Watch, old: NewKey) -> None:
    known = content(old)
    watch.replace(known + b'[principals.new]\nrole = "administrator"\ncertificates = ["mallory.example.org"]\n')
    watch.look()
    watch.replace(known)
    watch.look()
    assert watch.changes == [KeyChanges(changed=("new",)), KeyChanges(changed=("new",))]


def test_another_hash_of_the_same_id_is_a_removed_and_an_added_key(watch: Watch, old: NewKey, new: NewKey) -> None:
    watch.replace(content(NewKey(old.id, new.text)))
    watch.look()
    assert watch.changes == [KeyChanges(added=(old.id,), removed=(old.id,))]
    assert not watch.knows(old)


def test_a_change_without_a_difference_in_its_time_is_noticed(tmp_path: Path, old: NewKey, new: NewKey) -> None:
    file = tmp_path / "keys.toml"
    replace_private(file, content(old))
    keys = WatchedKeys(file, clock=SystemClock())
    keys.load()
    mark = keys._mark  # pyright: ignore[reportPrivateUsage]  # as if the file system had coarse times
    file.write_bytes(content(new))
    keys._mark_of_file = lambda: mark  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    asyncio.run(keys.look())
    assert keys.caller_by_key(new.text) is not None


def test_a_link_that_is_switched_is_a_change_as_in_kubernetes(tmp_path: Path, old: NewKey, new: NewKey) -> None:
    for name, key in (("..one", old), ("..two", new)):
        (tmp_path / name).mkdir()
        replace_private(tmp_path / name / "keys.toml", content(key))
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
    keys = WatchedKeys(tmp_path / "keys.toml", clock=ManualClock())
    keys.load()
    (tmp_path / "..data_new").symlink_to("..two")
    (tmp_path / "..data_new").rename(tmp_path / "..data")
    for _ in range(2):
        asyncio.run(keys.look())
    assert keys.caller_by_key(old.text) is None
    assert keys.caller_by_key(new.text) is not None


# ---------------------------------------------------------------- a wrong file


def _remove(file: Path) -> None:
    file.unlink()


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _readable(file: Path) -> None:
    file.chmod(0o644)


def _writes(wrong: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(wrong)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_remove, "does not exist"),
        (_folder, "is not a file"),
        (_pipe, "is not a file"),
        (_loop, "can't be opened"),
        (_readable, "chmod 600"),
        (_writes(b""), "at least one principal"),
        (_writes(b"\xff\x00"), "is not UTF-8"),
        (_writes(b"[principals.app"), "is not TOML"),
        (_writes(b"[" * 100_000), "TOML"),
        (_writes(b"#" * (FILE_BYTES_MAX + 1)), "is larger than"),
        (_writes(b'[principals.app]\nrole = "x"'), "role must be one of"),
    ],
)
def test_a_wrong_file_keeps_the_known_keys_and_is_told_once(
    watch: Watch,
    old: NewKey,
    new: NewKey,
    harm: Callable[[Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    version = watch.keys.version
    harm(watch.file)
    watch.look(5)
    assert (watch.knows(old), watch.keys.is_stale, watch.keys.version) == (True, True, version)
    (said,) = warnings(caplog)
    assert reason in said
    assert str(watch.file) in said
    if watch.file.is_dir():
        watch.file.rmdir()
    elif not watch.file.is_file():
        watch.file.unlink(missing_ok=True)
    watch.file.write_bytes(content(new))
    watch.file.chmod(0o600)
    watch.look()
    assert (watch.knows(old), watch.knows(new), watch.keys.is_stale) == (False, True, False)


def test_a_file_that_is_right_again_is_no_longer_stale(watch: Watch, old: NewKey) -> None:
    version = watch.keys.version
    for _ in range(2):
        watch.replace(b"wrong")
        watch.look()
        assert watch.keys.is_stale
        watch.replace(content(old))
        watch.look()
        assert not watch.keys.is_stale
    assert (watch.keys.version, watch.changes) == (version, [])


def test_a_file_that_could_not_be_opened_is_tried_again_without_a_change(
    watch: Watch, old: NewKey, new: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    watch.replace(content(new))
    with monkeypatch.context() as patch:
        patch.setattr("popgate.runtime.private_files.os.open", failing)
        watch.look()
    assert (watch.knows(old), watch.keys.is_stale) == (True, True)
    watch.look(1)
    assert (watch.knows(new), watch.keys.is_stale) == (True, False)


def test_a_file_that_is_being_written_in_place_is_read_when_it_is_complete(
    watch: Watch, old: NewKey, new: NewKey
) -> None:
    complete = content(old, new)
    half = complete[: complete.index(b"[principals.app.keys")]  # which is a right file, without keys
    watch.file.write_bytes(half)
    watch.look(1)
    watch.file.write_bytes(complete)
    watch.look(1)
    assert (watch.knows(old), watch.knows(new)) == (True, False)
    watch.look(1)
    assert watch.changes == [KeyChanges(added=(new.id,))]


def test_a_file_that_never_stops_changing_is_read_all_the_same(watch: Watch, old: NewKey, new: NewKey) -> None:
    for count in range(watched_keys.SETTLE_LOOKS_MAX + 1):
        watch.file.write_bytes(content(new) + b"#" * count)
        watch.look(1)
    assert (watch.knows(old), watch.knows(new)) == (False, True)


# ---------------------------------------------------------------- expiry


def test_an_expired_key_is_reported_once(tmp_path: Path, old: NewKey) -> None:
    watch = Watch(tmp_path / "keys.toml", old, expires="2023-11-14T22:14:20Z")  # a minute after the start
    watch.look()
    assert watch.changes == []
    watch.clock.advance(60)
    watch.look()
    assert watch.changes == [KeyChanges(expired=(old.id,))]
    assert not watch.knows(old)


def test_a_key_that_had_expired_at_the_start_is_not_reported(tmp_path: Path, old: NewKey) -> None:
    watch = Watch(tmp_path / "keys.toml", old, expires="2023-11-14T22:00:00Z")
    watch.look()
    assert (watch.changes, watch.knows(old)) == ([], False)


# ---------------------------------------------------------------- the loop


async def test_a_change_counts_within_a_second(tmp_path: Path, old: NewKey, new: NewKey) -> None:
    file = tmp_path / "keys.toml"
    replace_private(file, content(old))
    arrived = asyncio.Event()
    keys = WatchedKeys(file, changed=lambda _: arrived.set())
    keys.load()
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(keys.run(), name="watch")
        for key in (new, old):
            arrived.clear()
            before = time.monotonic()
            replace_private(file, content(key))
            async with asyncio.timeout(10):
                await arrived.wait()
            assert keys.caller_by_key(key.text) is not None
            assert time.monotonic() - before < 5  # far more than it takes, because the machine may be busy
        loop.cancel()


async def test_a_file_system_that_hangs_does_not_hold_the_event_loop(watch: Watch) -> None:
    hanging, released = threading.Event(), threading.Event()

    def stat() -> tuple[int, ...]:
        hanging.set()
        released.wait(10)
        return ()

    watch.keys._mark_of_file = stat  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    look = asyncio.create_task(watch.keys.look())
    await asyncio.to_thread(wait_until, hanging.is_set, timeout_seconds=10, what="the look")
    await asyncio.sleep(0)
    assert not look.done()
    released.set()
    await look


# ---------------------------------------------------------------- the thread


async def test_a_revoked_key_does_not_wait_for_the_threads_of_other_work(
    tmp_path: Path, old: NewKey, new: NewKey
) -> None:
    """asyncio's threads look up host names, and a name server that does not answer keeps all of them waiting."""
    watch, release = Watch(tmp_path / "keys.toml", old), threading.Event()
    loop = asyncio.get_running_loop()
    lookups = [loop.run_in_executor(None, release.wait) for _ in range(64)]
    watching = asyncio.create_task(watch.keys.run())
    try:
        watch.replace(content(new))
        async with asyncio.timeout(5):
            while watch.knows(old) or not watch.knows(new):  # noqa: ASYNC110 - the file changes without an event
                await asyncio.sleep(0.05)
    finally:
        watching.cancel()
        release.set()
        await asyncio.gather(*lookups)
