"""Defines the manifest: the last file of a backup, which lists the others. A folder without it is no backup."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MANIFEST_FILE = "manifest.json"
STORE_FILE = "popgate.db"
FORMAT = 1
"""Version of the manifest. A version of popgate reads manifests up to its own version."""
MANIFEST_BYTES_MAX = 64 * 1024
TIME_MAX = 253_402_300_799.0
"""Maximum Unix time in a manifest: the end of the year 9999, after which Python has no dates."""
NAMES = frozenset({STORE_FILE, "secret", "broker"})
"""Names of the files that a backup may contain. The checksum files of the data folder are made again."""


class ManifestError(ValueError):
    """The manifest is not valid. The text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUpFile:
    """A file of a backup, with its size and the SHA-256 of its content in hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes a backup.

    ``popgate`` is the version that took the backup, and ``schema`` the version of the store's tables. ``broker`` is the
    mark of the broker, or "embedded". The store's copy is its committed state at ``taken_at``. All times are Unix
    seconds.
    """

    popgate: str
    schema: int
    broker: str
    started_at: float
    taken_at: float
    files: Sequence[BackedUpFile]

    def encoded(self) -> bytes:
        """Return the manifest as the content of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2).encode() + b"\n"

    def file(self, name: str) -> BackedUpFile:
        """Return the file with this name. ``decoded`` has checked that the store is listed."""
        return next(one for one in self.files if one.name == name)


def decoded(content: bytes) -> Manifest:
    """Return the manifest with this content. Raises: ManifestError."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError("it is not JSON") from error
    if not isinstance(value, Mapping):
        raise ManifestError("it is not a JSON object")
    version: Any = value.get("format")  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  # JSON
    if not isinstance(version, int):
        raise ManifestError("it has no format")
    if version > FORMAT:
        newer = value.get("popgate")  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]  # JSON
        raise ManifestError(f"popgate {newer} wrote it, which is newer than this one: restore it with that version")
    try:
        manifest = _manifest(dict(value))  # pyright: ignore[reportUnknownArgumentType]  # JSON
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ManifestError(f"it lacks a value, or has a wrong one ({error})") from error
    names = [one.name for one in manifest.files]
    if len(set(names)) != len(names) or not set(names) <= NAMES or STORE_FILE not in names:
        raise ManifestError("it does not list the files of a data folder")
    return manifest


def _manifest(value: dict[str, Any]) -> Manifest:
    return Manifest(
        popgate=str(value["popgate"]),
        schema=int(value["schema"]),
        broker=str(value["broker"]),
        started_at=_time(value["started_at"]),
        taken_at=_time(value["taken_at"]),
        files=tuple(
            BackedUpFile(name=str(one["name"]), bytes=int(one["bytes"]), sha256=str(one["sha256"]))
            for one in value["files"]
        ),
    )


def _time(value: Any) -> float:
    """Return Unix seconds that every reader of JSON and every calendar accepts. Raises: ValueError, TypeError."""
    seconds = float(value)
    if not 0.0 <= seconds <= TIME_MAX:
        raise ValueError(f"{seconds} is not a time")
    return seconds
