"""Applies every rule to the observed facts."""

from typing import NamedTuple

from popgate.doctor.broker_rules import broker_findings
from popgate.doctor.facts import Facts
from popgate.doctor.findings import Examination, Finding, Severity
from popgate.doctor.permission_rules import permission_findings
from popgate.doctor.queue_rules import queue_findings
from popgate.doctor.redis_rules import redis_findings

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


def examine(facts: Facts) -> Examination:
    """Apply every rule to ``facts``, and return the findings, the most severe ones first.

    The same facts always lead to the same findings in the same order.
    """
    found: list[Finding] = [*permission_findings(facts), *broker_findings(facts), *queue_findings(facts)]
    if facts.redis is not None:
        found += redis_findings(facts.redis)
    return Examination(
        version=facts.version,
        findings=tuple(sorted(found, key=lambda finding: _ORDER[finding.severity])),
        unseen=facts.unseen,
    )


class Checkup(NamedTuple):
    """What was examined, under the name that operators know it by, and what was found there."""

    place: str
    found: Examination
