"""The manifest of a backup is untrusted input: it may come from another machine, or be damaged."""

import json
from io import StringIO
from pathlib import Path

import pytest

from popgate.backup.manifest import BackedUpFile, Manifest, ManifestError, decoded
from popgate.cli.endings import CommandFailed
from popgate.cli.progress import Progress
from popgate.cli.restoring import restore
from popgate.runtime.restoring import RESTORING_FILE
from popgate.runtime.stable_files import draft_of

MANIFEST = Manifest(
    popgate="0.1.0",
    schema=6,
    broker="embedded",
    started_at=1.0,
    taken_at=2.0,
    files=(BackedUpFile(name="popgate.db", bytes=1, sha256="00"),),
)


def altered(**fields: object) -> bytes:
    """Return the content of the manifest with other values. JSON of Python writes NaN and Infinity, too."""
    return json.dumps({**json.loads(MANIFEST.encoded()), **fields}).encode()


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert decoded(MANIFEST.encoded()) == MANIFEST


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 60_000,
        altered(taken_at=float("nan")),
        altered(taken_at=float("inf")),
        altered(taken_at=1e300),
        altered(started_at=-1),
        altered(taken_at=10**400),
        altered(schema=float("inf")),
        altered(files=[{"name": "../secret", "bytes": 1, "sha256": "00"}]),
        altered(files=[]),
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused_in_one_sentence(content: bytes) -> None:
    with pytest.raises(ManifestError):
        decoded(content)


def test_a_restore_that_was_killed_before_it_marked_the_folder_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "manifest.json").write_bytes(MANIFEST.encoded())
    folder = tmp_path / "data"
    folder.mkdir()
    draft_of(folder / RESTORING_FILE).touch()
    with pytest.raises(CommandFailed, match="is missing"):  # the folder counts as empty, so the backup is read
        restore(tmp_path / "backup", folder, Progress(StringIO(), shown=False))
