"""A token file that a tool changes in place: the client sends the new token, although the file looks unchanged.

The proxy is real, and its keys are made by `popgate keys`.
"""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from popgate_client import AsyncClient, Client, Unauthorized, token_in
from support.proxy import ProxyProcess, popgate_command

WRONG = "pg_wrongwrong_" + "a" * 43
"""As long as a key."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    command = popgate_command("keys", "add", "app", "--role", "worker", "--file", str(folder / "keys.toml"))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def url(folder: Path, key: str) -> Iterator[str]:
    with ProxyProcess(folder, "--keys-file", str(folder / "keys.toml")) as process:
        yield process.url


def replace_in_place(file: Path, token: str) -> None:
    """Write a token of the same length, and restore the time of the change, as `rsync --inplace --times` may do."""
    before = file.stat()
    file.write_text(token)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)


def test_a_change_in_place_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    read = token_in(file)
    assert read() == "first"
    time.sleep(0.05)  # a file system may count the times of changes in steps of 10 ms
    replace_in_place(file, "other")
    assert read() == "other"


@pytest.fixture
def stale(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token file whose status never changes, as on a file system that counts times in coarse steps."""
    file = tmp_path / "token"
    file.write_text(WRONG)
    assert len(WRONG) == len(key)
    stat, first = Path.stat, file.stat()

    def unchanged(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return first if path == file else stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", unchanged)
    return file


def test_after_a_refusal_the_file_is_read_again_even_if_it_looks_unchanged(stale: Path, url: str, key: str) -> None:
    with Client(url, token=token_in(stale)) as client:
        with pytest.raises(Unauthorized):
            client.info()
        stale.write_text(key)
        client.info()
        client.info()


async def test_the_asyncio_client_reads_it_again_too(stale: Path, url: str, key: str) -> None:
    async with AsyncClient(url, token=token_in(stale)) as client:
        with pytest.raises(Unauthorized):
            await client.info()
        await asyncio.to_thread(stale.write_text, key)
        await client.info()
