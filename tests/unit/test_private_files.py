"""Private files: who may read them, and how they are replaced."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from popgate.runtime import private_files
from popgate.runtime.private_files import PrivateFileError, exposure, locked_private, read_private, replace_private

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return made(tmp_path / "keys.toml")


def made(file: Path, content: bytes = b"content", mode: int = 0o600) -> Path:
    file.write_bytes(content)
    file.chmod(mode)
    return file


@contextmanager
def another_user(tmp_path: Path) -> Generator[None]:
    """Within the context, this process is not root."""
    folder = tmp_path
    while folder.stat().st_mode & 0o005 != 0o005:
        folder.chmod(0o755)
        folder = folder.parent
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def problem(file: Path, **options: bool) -> str:
    with pytest.raises(PrivateFileError) as raised:
        read_private(file, **options)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)
    return str(raised.value)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_this_user_that_no_other_user_can_read_is_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_private(file) == b"content"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o620, 0o602, 0o644, 0o610, 0o601])
def test_a_file_of_this_user_that_other_users_can_use_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"chmod 600 {file}" in problem(file)


@as_root
@pytest.mark.parametrize("mode", [0o640, 0o440])
def test_a_file_of_root_that_the_group_can_read_is_read_by_another_user(file: Path, mode: int, tmp_path: Path) -> None:
    os.chown(file, 0, os.getegid())
    file.chmod(mode)
    with another_user(tmp_path):
        assert read_private(file) == b"content"


@as_root
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o444])
def test_a_file_of_root_that_all_users_can_read_is_refused(file: Path, mode: int, tmp_path: Path) -> None:
    file.chmod(mode)
    with another_user(tmp_path):
        assert f"chmod 640 {file}" in problem(file)


@as_root
def test_a_file_that_this_user_can_not_read_is_refused_with_the_remedy(file: Path, tmp_path: Path) -> None:
    with another_user(tmp_path):
        assert f"chown {NOBODY} {file}" in problem(file)


@as_root
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, NOBODY, NOBODY)
    assert "chown 0" in problem(file)


@as_root
@pytest.mark.parametrize(
    ("owner", "mode", "remedy"),
    [
        (NOBODY, 0o700, None),
        (NOBODY, 0o750, "chmod 700"),
        (NOBODY, 0o701, "chmod 700"),
        (0, 0o2770, None),
        (0, 0o2775, "chmod 770"),
        (1, 0o700, f"chown {NOBODY}"),
    ],
)
def test_a_folder_is_private_if_no_other_user_can_use_it(
    tmp_path: Path, owner: int, mode: int, remedy: str | None
) -> None:
    """Kubernetes mounts a volume as a folder of root and of the pod's group."""
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, owner, -1)
    folder.chmod(mode)
    with another_user(tmp_path):
        said = exposure(folder, folder.stat())
    assert said is None if remedy is None else said is not None and f"{remedy} {folder}" in said


@as_root
def test_an_administrator_may_read_the_file_of_a_proxy_that_runs_as_another_user(file: Path) -> None:
    os.chown(file, NOBODY, NOBODY)
    assert read_private(file, as_administrator=True) == b"content"
    file.chmod(0o640)
    assert "chmod 600" in problem(file, as_administrator=True)
    os.chown(file, 0, NOBODY)
    assert read_private(file, as_administrator=True) == b"content"
    file.chmod(0o644)
    assert "chmod 600" in problem(file, as_administrator=True)


def test_a_link_is_followed_as_kubernetes_makes_them(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("data/keys.toml")
    (tmp_path / "data").symlink_to(tmp_path)
    assert read_private(link) == b"content"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in problem(tmp_path / "none")
    (tmp_path / "dangling").symlink_to("none")
    assert "does not exist" in problem(tmp_path / "dangling")


def test_what_is_no_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is not a file" in problem(tmp_path / "pipe")
    assert "is not a file" in problem(tmp_path)
    assert "is not a file" in problem(Path("/dev/null"))
    (tmp_path / "loop").symlink_to("loop")
    assert "can't be opened" in problem(tmp_path / "loop")


def test_a_file_that_is_too_large_is_refused(file: Path) -> None:
    file.write_bytes(bytes(private_files.BYTES_MAX))
    assert len(read_private(file)) == private_files.BYTES_MAX
    file.write_bytes(bytes(private_files.BYTES_MAX + 1))
    assert "is larger than 1048576 bytes" in problem(file)
    assert len(read_private(file, bytes_max=private_files.BYTES_MAX + 1)) == private_files.BYTES_MAX + 1


# ---------------------------------------------------------------- replacing


def test_a_new_file_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        replace_private(tmp_path / "new", b"a")
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_file_is_replaced_atomically_and_not_written_in_place(file: Path, tmp_path: Path) -> None:
    with file.open("rb") as old:
        replace_private(file, b"other")
        assert old.read() == b"content"
    assert file.read_bytes() == b"other"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_link_stays_a_link_and_its_target_is_replaced(file: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "link"
    link.symlink_to("../keys.toml")
    replace_private(link, b"other")
    assert link.is_symlink()
    assert file.read_bytes() == b"other"
    assert [path.name for path in link.parent.iterdir()] == ["link"]


@as_root
def test_root_keeps_the_owner_the_group_and_what_the_group_may_read(file: Path) -> None:
    os.chown(file, NOBODY, 12)
    replace_private(file, b"other")
    status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (NOBODY, 12, 0o600)
    os.chown(file, 0, 12)
    file.chmod(0o664)
    replace_private(file, b"other")
    status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, 12, 0o640)


def test_a_failed_write_leaves_the_old_file_and_no_draft(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(PrivateFileError, match="can't be written \\(No space left on device\\)"):
        replace_private(file, b"other")
    assert file.read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_file_that_could_not_be_read_again_is_not_written(file: Path) -> None:
    with pytest.raises(PrivateFileError, match="would be larger than 1048576 bytes"):
        replace_private(file, b"x" * (private_files.BYTES_MAX + 1))
    assert file.read_bytes() == b"content"
    replace_private(file, b"x" * (private_files.BYTES_MAX + 1), bytes_max=private_files.BYTES_MAX + 1)


def test_the_folder_of_a_new_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(PrivateFileError, match="can't be written"):
        replace_private(tmp_path / "none" / "file", b"")
    with pytest.raises(PrivateFileError, match="can't be opened"), locked_private(tmp_path / "none" / "file"):
        pass


# ---------------------------------------------------------------- the lock


def test_no_change_is_lost_while_several_threads_change_a_file(file: Path) -> None:
    file.write_bytes(b"0")

    def add() -> None:
        for _ in range(20):
            with locked_private(file):
                replace_private(file, b"%d" % (int(read_private(file)) + 1))

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == b"60"


def test_a_lock_that_another_process_keeps_is_an_error_and_ends_with_that_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOCK_SECONDS_MAX", 0.1)
    program = (
        "import sys, pathlib; from popgate.runtime.private_files import locked_private\n"
        "with locked_private(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(PrivateFileError, match="another process is changing"), locked_private(file):
            pass
        process.kill()
    with locked_private(file):
        pass


@as_root
def test_another_user_who_locks_the_folder_does_not_block_a_change(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOCK_SECONDS_MAX", 0.1)
    file.parent.chmod(0o755)
    program = (
        "import fcntl, os, sys; os.setuid(65534)\n"
        "fcntl.flock(os.open('.', os.O_RDONLY), fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=file.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with locked_private(file):
            replace_private(file, b"other")
        process.kill()
    assert file.read_bytes() == b"other"


def test_other_users_can_not_open_the_lock_and_it_leaves_no_file(file: Path) -> None:
    old = os.umask(0)
    try:
        with locked_private(file):
            (lock,) = (path for path in file.parent.iterdir() if path != file)
            assert lock.stat().st_mode & 0o7777 == 0o600
    finally:
        os.umask(old)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_lock_file_that_a_killed_process_left_is_used_again(file: Path) -> None:
    made(file.with_name(f".{file.name}.lock"))
    with locked_private(file):
        pass
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_lock_file_that_other_users_could_hold_is_refused(file: Path, tmp_path: Path) -> None:
    lock = file.with_name(f".{file.name}.lock")
    made(lock, mode=0o644)
    with pytest.raises(PrivateFileError, match=f"remove {lock}"), locked_private(file):
        pass
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrivateFileError, match="can't be opened"), locked_private(file):
        pass
    assert not (tmp_path / "elsewhere").exists()


@as_root
def test_a_lock_file_of_another_user_is_refused(file: Path) -> None:
    lock = made(file.with_name(f".{file.name}.lock"))
    os.chown(lock, NOBODY, NOBODY)
    with pytest.raises(PrivateFileError, match=f"remove {lock}"), locked_private(file):
        pass


@as_root
def test_the_lock_of_root_in_the_folder_of_another_user_belongs_to_that_user(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with locked_private(folder / "keys.toml"):
        (lock,) = folder.iterdir()
        assert lock.stat().st_uid == NOBODY


# ---------------------------------------------------------------- links of other users


@as_root
def test_root_writes_no_file_through_a_link_of_another_user(tmp_path: Path) -> None:
    for name in ("own", "foreign"):
        (tmp_path / name).mkdir()
    link, folder_link = tmp_path / "foreign" / "keys.toml", tmp_path / "foreign" / "folder"
    link.symlink_to(tmp_path / "own" / "created")
    folder_link.symlink_to(tmp_path / "own")
    for path in (link.parent, link, folder_link):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for file, culprit in ((link, link), (folder_link / "created", folder_link)):
        with pytest.raises(PrivateFileError, match=f"{culprit} is a link of another user"):
            replace_private(file, b"")
        with pytest.raises(PrivateFileError, match=f"{culprit} is a link of another user"), locked_private(file):
            pass
    assert list((tmp_path / "own").iterdir()) == []
    existing = made(tmp_path / "own" / "created")
    before = existing.read_bytes()
    with pytest.raises(PrivateFileError, match="does not follow"):
        replace_private(link, b"other")
    assert existing.read_bytes() == before


def test_a_file_is_created_through_own_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "folder").symlink_to("./data/../data")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "created")
    with locked_private(tmp_path / "link"):
        replace_private(tmp_path / "link", b"content")
    assert (tmp_path / "data" / "created").read_bytes() == b"content"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PrivateFileError, match="loop"), locked_private(tmp_path / "loop"):
        replace_private(tmp_path / "loop", b"content")
