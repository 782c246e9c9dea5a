"""Decides what the answers of pip-audit mean: which packages have known vulnerabilities, and which were not checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known about the packages of one audit.

    ``vulnerable`` has one line for each known vulnerability. ``checked`` and ``unchecked`` are names of packages.
    """

    vulnerable: Sequence[str] = ()
    checked: frozenset[str] = frozenset()
    unchecked: frozenset[str] = frozenset()

    def filled_by(self, other: "Verdict") -> "Verdict":
        """Return what two databases know together: a package is unchecked if neither of them knows it."""
        checked = self.checked | other.checked
        return Verdict(
            vulnerable=sorted({*self.vulnerable, *other.vulnerable}),
            checked=checked,
            unchecked=(self.unchecked | other.unchecked) - checked,
        )


def verdict_of(report: str, accepted: Mapping[str, str]) -> Verdict | None:
    """Return the verdict of pip-audit's JSON, or None if it is no report: then the database did not answer.

    A skipped package was not checked. pip-audit does not count this as a failure, and says so in the report only.
    popgate itself, which is installed in an editable way, is left out.
    ``accepted`` contains the reasons to accept a vulnerability, by its id.
    """
    try:
        dependencies = [one for one in json.loads(report)["dependencies"] if not _is_editable(one)]
    except (ValueError, KeyError, TypeError):
        return None
    vulnerable: list[str] = []
    for one in dependencies:
        for vulnerability in one.get("vulns", ()):
            ids = [vulnerability["id"], *vulnerability.get("aliases", ())]
            if not accepted.keys() & set(ids):
                fixed = ", ".join(vulnerability.get("fix_versions", ())) or "no version yet"
                vulnerable.append(f"{one['name']} {one['version']}: {', '.join(ids)}; fixed in {fixed}")
    return Verdict(
        vulnerable=sorted(set(vulnerable)),
        checked=frozenset(one["name"] for one in dependencies if "skip_reason" not in one),
        unchecked=frozenset(one["name"] for one in dependencies if "skip_reason" in one),
    )


def _is_editable(dependency: Mapping[str, str]) -> bool:
    return "editable" in dependency.get("skip_reason", "")
