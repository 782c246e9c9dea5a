"""The data folder: new entries are on stable storage, and damage is refused with instructions."""

import os
from pathlib import Path

import pytest

from popgate.domain.errors import StartupError
from popgate.runtime.data_folder import bind_broker, bound_broker, kept_secret, make_folder
from popgate.runtime.stable_files import check_file


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the syncs, in order."""
    paths: list[Path] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", noting)
    return paths


def test_a_new_folder_is_synced_with_all_that_were_made_for_it(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_folder(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused the folder of another user")
def test_root_does_not_use_the_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StartupError, match="belongs to another user"):
        make_folder(tmp_path)


def test_a_link_in_place_of_a_draft_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / "secret.new").symlink_to(other)
    kept_secret(tmp_path)
    assert other.read_text() == "untouched"
    assert not (tmp_path / "secret").is_symlink()


def test_the_name_of_a_new_file_is_synced_with_its_folder(tmp_path: Path, synced: list[Path]) -> None:
    kept_secret(tmp_path)
    draft, check = tmp_path / "secret.new", tmp_path / "secret.check.new"
    assert synced == [draft, tmp_path, check, tmp_path]
    kept_secret(tmp_path)
    assert len(synced) == 4


@pytest.mark.parametrize("name", ["secret", "broker"])
def test_a_flipped_bit_in_a_kept_file_is_refused_wherever_it_is(tmp_path: Path, name: str) -> None:
    kept_secret(tmp_path)
    bind_broker(tmp_path, "popgate:data:0123456789abcdef")
    file = tmp_path / name
    content = file.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(StartupError, match=f"{file} has been changed or damaged: restore it"):
                kept_secret(tmp_path) if name == "secret" else bound_broker(tmp_path)
    file.write_bytes(content[:-1])
    with pytest.raises(StartupError, match="restore it from a backup"):
        kept_secret(tmp_path) if name == "secret" else bound_broker(tmp_path)


def test_a_secret_that_an_operator_has_changed_is_taken_once_its_checksum_is_deleted(tmp_path: Path) -> None:
    kept_secret(tmp_path)
    (tmp_path / "secret").write_text("another one that is long enough for it")
    with pytest.raises(StartupError, match=f"if the change is yours, delete {check_file(tmp_path / 'secret')}"):
        kept_secret(tmp_path)
    check_file(tmp_path / "secret").unlink()
    assert kept_secret(tmp_path) == b"another one that is long enough for it"
    (tmp_path / "secret").unlink()
    assert len(kept_secret(tmp_path)) == 64


def test_a_folder_of_an_older_popgate_keeps_its_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef" * 4)
    assert kept_secret(tmp_path) == b"0123456789abcdef" * 4
    assert check_file(tmp_path / "secret").exists()
