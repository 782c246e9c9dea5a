"""Finds the reports that the Spark pipeline has written into a folder. Reads the folder anew for each request.

Each job of the pipeline writes ``report.html`` into its own folder, and an audit also ``verdict.json``. The reports are
those of the folder itself and of the folders in it. Nothing else in the folder is read.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, cast

PAGE, VERDICT = "report.html", "verdict.json"
FOLDERS_MAX = 64
"""Maximum number of folders in which reports are looked for."""
PAGE_BYTES_MAX = 32 * 1024 * 1024
VERDICT_BYTES_MAX = 64 * 1024
KINDS_MAX = 32
"""Maximum number of kinds of faults that are read from a verdict."""
TEXT_LENGTH_MAX = 2_000
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of an audit. ``faults``: the number of certain faults by kind; ``not_certain``: of those that may come
    from gaps in the journal. ``missing``: events that the journal lacks. ``end``: until when it was audited."""

    headline: str
    text: str
    faults: dict[str, int]
    not_certain: dict[str, int]
    missing: int
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report. ``name``: that of its folder. ``written_at``: Unix seconds. ``verdict``: None if it is no audit."""

    name: str
    written_at: float
    size: int
    verdict: Verdict | None


class ReportFolder:
    """The reports in ``folder``. The calls read files, and must not run on the event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reports(self) -> list[Report]:
        """Return the reports, the latest one first. Raises: OSError if the folder can't be read."""
        found = [_report(name, place) for name, place in self._places().items()]
        return sorted((one for one in found if one is not None), key=lambda one: one.written_at, reverse=True)

    def page(self, name: str) -> bytes | None:
        """Return the HTML of a report, or None if there is no such report. Raises: OSError."""
        place = self._places().get(name)
        if place is None or _report(name, place) is None:
            return None
        return (place / PAGE).read_bytes()

    def _places(self) -> dict[str, Path]:
        """Return the folders that may have a report, by the names of their reports."""
        inner = sorted(one for one in self.folder.iterdir() if _NAME.match(one.name) and one.is_dir())
        own = self.folder.resolve().name
        return {own if _NAME.match(own) else "report": self.folder} | {one.name: one for one in inner[:FOLDERS_MAX]}


def _report(name: str, place: Path) -> Report | None:
    try:
        status = (place / PAGE).stat()
    except OSError:
        return None
    if not S_ISREG(status.st_mode) or status.st_size > PAGE_BYTES_MAX:
        return None
    return Report(name=name, written_at=status.st_mtime, size=status.st_size, verdict=_verdict(place / VERDICT))


def _verdict(file: Path) -> Verdict | None:
    """Return the verdict in a file, or None if there is none that the pipeline would write."""
    try:
        if file.stat().st_size > VERDICT_BYTES_MAX:
            return None
        found: object = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    missing = fields.get("journal_events_missing")
    return Verdict(
        headline=str(fields.get("verdict", ""))[:TEXT_LENGTH_MAX],
        text=str(fields.get("text", ""))[:TEXT_LENGTH_MAX],
        faults=_counts(fields.get("faults")),
        not_certain=_counts(fields.get("not_certain")),
        missing=missing if isinstance(missing, int) else 0,
        end=str(fields.get("end", ""))[:TEXT_LENGTH_MAX],
    )


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    items = list(cast("dict[str, Any]", found).items())[:KINDS_MAX]
    return {str(kind)[:TEXT_LENGTH_MAX]: count for kind, count in items if isinstance(count, int)}
