"""The audit of dependencies tells apart what has no known vulnerability, and what could not be checked."""

import json

from audit.verdict import Verdict, verdict_of

FOUND = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.1"], "description": ""}
REPORT = json.dumps(
    {
        "dependencies": [
            {"name": "sound", "version": "1.0", "vulns": []},
            {"name": "weak", "version": "2.0", "vulns": [FOUND]},
            {"name": "popgate", "skip_reason": "distribution marked as editable"},
            {"name": "unknown", "skip_reason": "Dependency not found on PyPI and could not be audited"},
        ],
        "fixes": [],
    }
)


def test_a_vulnerability_is_named_with_its_remedy() -> None:
    verdict = verdict_of(REPORT, {})
    assert verdict is not None
    assert verdict.vulnerable == ["weak 2.0: PYSEC-1, CVE-1; fixed in 2.1"]


def test_an_accepted_vulnerability_is_known_by_any_of_its_ids() -> None:
    verdict = verdict_of(REPORT, {"CVE-1": "popgate does not parse this format"})
    assert verdict is not None
    assert verdict.vulnerable == []
    assert "weak" in verdict.checked


def test_a_skipped_package_is_not_checked() -> None:
    verdict = verdict_of(REPORT, {})
    assert verdict is not None
    assert sorted(verdict.checked) == ["sound", "weak"]
    assert sorted(verdict.unchecked) == ["unknown"]


def test_without_a_report_nothing_is_known() -> None:
    assert verdict_of("", {}) is None
    assert verdict_of("[]", {}) is None


def test_a_second_database_fills_the_gaps_of_the_first() -> None:
    first = Verdict(vulnerable=["a"], checked=frozenset({"x"}), unchecked=frozenset({"y", "z"}))
    second = Verdict(vulnerable=["a", "b"], checked=frozenset({"y"}), unchecked=frozenset({"z"}))
    assert first.filled_by(second) == Verdict(
        vulnerable=["a", "b"], checked=frozenset({"x", "y"}), unchecked=frozenset({"z"})
    )
