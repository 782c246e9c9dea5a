"""`make audit`: looks for known vulnerabilities in the packages of the images and of this environment, with pip-audit.

Also compares the lock files with pyproject.toml. Exits with 1 for a known vulnerability, and for a lock file that does
not fit. If no database of vulnerabilities can be reached, this says so and exits with 0, unless --must-check is given.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from audit.verdict import Verdict, verdict_of
from support.lock_files import LOCKS, PROJECT, lock_problems

ACCEPTED: Mapping[str, str] = MappingProxyType({})
"""Why a vulnerability does not concern popgate, by its id, until a version without it can be used."""
ANSWER_SECONDS = 15
"""Maximum seconds in which a database must answer one request."""
UNREACHABLE = re.compile(r"\b(Connection|HTTP|Proxy|SSL|Service)Error\b|Timeout\b")
"""Matches what pip-audit writes if a database can't be reached, or does not give a proper answer."""
SECONDS_MAX = 180.0
"""Maximum seconds for one audit in one database."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--must-check", action="store_true", help="fail if a package can't be checked")
    parser.add_argument("--osv-url", metavar="URL", help="a database with the interface of OSV, to ask instead of PyPI")
    arguments = parser.parse_args()

    problems = list(lock_problems())
    for problem in problems:
        print(f"audit: {problem} (make lock)", file=sys.stderr)
    services = [["osv", "--osv-url", arguments.osv_url]] if arguments.osv_url else [["pypi"], ["osv"]]
    failed = bool(problems)
    for place, where in _places().items():
        verdict = _audit(where, services)
        for line in verdict.vulnerable:
            print(f"audit: {place}: {line}", file=sys.stderr)
        if verdict.checked:
            print(f"audit: {place}: {len(verdict.checked)} packages checked, {len(verdict.vulnerable)} vulnerabilities")
        if verdict.unchecked or not verdict.checked:
            print(f"audit: {place}: NOT CHECKED: {_unchecked(verdict)}", file=sys.stderr)
            failed = failed or arguments.must_check
        failed = failed or bool(verdict.vulnerable)
    return 1 if failed else 0


def _places() -> Mapping[str, Sequence[str]]:
    """Return pip-audit's arguments for each set of packages to look at."""
    locks = {
        f"deploy/{file}": ["--requirement", str(PROJECT / "deploy" / file), "--require-hashes", "--disable-pip"]
        for file in LOCKS
    }
    return {**locks, "this environment": ["--local", "--skip-editable"]}


def _audit(where: Sequence[str], services: Sequence[Sequence[str]]) -> Verdict:
    """Ask one database after the other until each package is checked."""
    known = Verdict()
    for service in services:
        found = _asked(where, service)
        if found is not None:
            known = known.filled_by(found)
            if not known.unchecked:
                break
    return known


def _asked(where: Sequence[str], service: Sequence[str]) -> Verdict | None:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    command += ["--timeout", str(ANSWER_SECONDS), "--vulnerability-service", *service, *where]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=PROJECT)
    except subprocess.TimeoutExpired:
        return None
    verdict = verdict_of(done.stdout, ACCEPTED)
    if verdict is None and not UNREACHABLE.search(done.stderr):
        sys.exit(f"audit: pip-audit failed:\n{done.stderr}")
    return verdict


def _unchecked(verdict: Verdict) -> str:
    if not verdict.checked:
        return "no database of known vulnerabilities answers here"
    return "unknown to the databases: " + ", ".join(sorted(verdict.unchecked))


if __name__ == "__main__":
    sys.exit(main())
