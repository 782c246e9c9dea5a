"""The reports in a folder: which files count, and what is read from a verdict."""

import json
import os
from pathlib import Path

import pytest

from popgate.journal import reports
from popgate.journal.reports import ReportFolder

TOLD = {
    "verdict": "FAULTS: 2 lost",
    "text": "10 deliveries.",
    "faults": {"lost": 2},
    "not_certain": {"stuck": 1},
    "journal_events_missing": 3,
    "end": "2026-11-27T10:00:00+00:00",
}


def write(folder: Path, at: float, verdict: object = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "report.html").write_text(f"<p>{folder.name}</p>")
    os.utime(folder / "report.html", (at, at))
    if verdict is not None:
        (folder / "verdict.json").write_text(verdict if isinstance(verdict, str) else json.dumps(verdict))


def test_reports_of_the_folder_and_of_those_in_it_are_found_the_latest_first(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    write(folder, 1_000.0)
    write(folder / "audit", 3_000.0, TOLD)
    write(folder / "latency", 2_000.0)
    (folder / "state").mkdir()
    (folder / ".hidden").mkdir()
    write(folder / ".hidden", 9_000.0)
    (folder / "link").symlink_to("/etc")
    found = ReportFolder(folder)
    listed = found.reports()
    assert [(one.name, one.written_at) for one in listed] == [
        ("audit", 3_000.0),
        ("latency", 2_000.0),
        ("reports", 1_000.0),
    ]
    verdict = listed[0].verdict
    assert verdict is not None
    assert (verdict.headline, verdict.faults, verdict.not_certain, verdict.missing) == (
        "FAULTS: 2 lost",
        {"lost": 2},
        {"stuck": 1},
        3,
    )
    assert listed[1].verdict is None
    assert found.page("latency") == b"<p>latency</p>"
    assert found.page("reports") == b"<p>reports</p>"
    for name in ("state", "link", ".hidden", "..", "nothing", "audit/../latency"):
        assert found.page(name) is None


@pytest.mark.parametrize("verdict", ["", "[]", "{", '"text"', "null", "[" * 50_000])
def test_a_verdict_that_the_pipeline_would_not_write_is_left_out(tmp_path: Path, verdict: str) -> None:
    write(tmp_path / "audit", 1.0, verdict)
    (one,) = ReportFolder(tmp_path).reports()
    assert one.verdict is None


def test_strange_fields_of_a_verdict_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path / "audit", 1.0, {"faults": [1], "not_certain": {"a": "b", "c": 4}, "journal_events_missing": "x"})
    (one,) = ReportFolder(tmp_path).reports()
    assert one.verdict is not None
    assert (one.verdict.faults, one.verdict.not_certain, one.verdict.missing) == ({}, {"c": 4}, 0)


def test_reports_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PAGE_BYTES_MAX", 5)
    write(tmp_path / "audit", 1.0)
    found = ReportFolder(tmp_path)
    assert (found.reports(), found.page("audit")) == ([], None)
