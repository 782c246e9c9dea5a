"""Reports a proof: the verdict, its evidence, and the smallest excerpt of the history that shows a violation.

This module creates the text and the JSON form of a report. It prints nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from statistics import median
from typing import Any

from popgate.domain.lock_history import Violation
from popgate.domain.lock_operations import Action, Disturbance, Operation, OperationOutcome
from popgate.domain.locks import LockKind

SHOWN_PER_RULE = 1
JSON_PER_RULE = 20


class Verdict(StrEnum):
    PASS = "pass"
    VIOLATIONS = "violations"
    NOTHING = "nothing proven"
    """No client acquired the lock, or the run ended before the first round was checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one kind of operation on an uncontended lock. ``milliseconds_max`` is the maximum of all calls, and
    the other values are medians."""

    milliseconds: float
    milliseconds_max: float
    round_trips: float
    channels: float

    @classmethod
    def of(cls, calls: Sequence[tuple[float, int, int]]) -> "Cost":
        """Summarize ``calls``. Each entry contains the duration in seconds, the round trips and the opened channels of
        one call."""
        return cls(
            milliseconds=round(1000 * median(call[0] for call in calls), 2),
            milliseconds_max=round(1000 * max(call[0] for call in calls), 2),
            round_trips=median(call[1] for call in calls),
            channels=median(call[2] for call in calls),
        )


@dataclass(slots=True, kw_only=True)
class KindReport:
    """The results for one kind of lock. ``started`` is the monotonic time from which excerpts of the history count
    their times."""

    kind: LockKind
    slots: int
    started: float
    seconds: float = 0.0
    rounds: int = 0
    is_whole: bool = False
    """Whether the proof of this kind ran for its full time, or ended early because it found a violation."""
    operations: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    faults: Mapping[str, int] = field(default_factory=Counter[str])
    errors: Mapping[str, int] = field(default_factory=Counter[str])
    costs: Mapping[str, Cost] = field(default_factory=dict[str, Cost])
    wait_seconds_max: float = 0.0
    violations: Sequence[Violation] = ()

    def counted(self, action: Action, outcome: OperationOutcome) -> int:
        return self.operations.get(action, {}).get(outcome, 0)

    @property
    def grants(self) -> int:
        return self.counted(Action.ACQUIRE, OperationOutcome.DONE)

    @property
    def verdict(self) -> Verdict:
        if self.violations:
            return Verdict.VIOLATIONS
        return Verdict.PASS if self.grants and self.rounds else Verdict.NOTHING


@dataclass(slots=True, kw_only=True)
class Report:
    implementation: str
    seed: int
    kinds: list[KindReport] = field(default_factory=list[KindReport])
    was_interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        verdicts = {kind.verdict for kind in self.kinds}
        for verdict in (Verdict.VIOLATIONS, Verdict.NOTHING):
            if verdict in verdicts:
                return verdict
        return Verdict.PASS if verdicts else Verdict.NOTHING


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report for human readers."""
    for kind in report.kinds:
        yield from _kind_lines(kind)
    interrupted = ", interrupted: results so far" if report.was_interrupted else ""
    yield f"{report.verdict}{interrupted} ({report.implementation}, --seed {report.seed})"


def round_line(kind: KindReport) -> str:
    """Describe the results so far in one line, after a round."""
    found = f"{len(kind.violations)} violations" if kind.violations else "nothing found"
    faults = ", ".join(f"{count} {what}" for what, count in sorted(kind.faults.items()))
    return f"{kind.kind}, round {kind.rounds}, {kind.seconds:.0f} s: {kind.grants} grants, {faults}: {found}"


def _kind_lines(kind: KindReport) -> Iterator[str]:
    total = sum(sum(outcomes.values()) for outcomes in kind.operations.values())
    slots = f", {kind.slots} slots" if kind.kind is LockKind.SEMAPHORE else ""
    yield f"{kind.kind}{slots}: {total} operations in {kind.seconds:.0f} s"
    for action, outcomes in kind.operations.items():
        yield f"  {action:<11} " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    yield f"  {'disturbed':<11} " + (", ".join(f"{count} {what}" for what, count in sorted(kind.faults.items())) or "-")
    if kind.wait_seconds_max:
        yield f"  longest wait for a granted lock: {kind.wait_seconds_max:.2f} s"
    for action, cost in kind.costs.items():
        yield (
            f"  one {action} costs {cost.milliseconds:g} ms, {cost.round_trips:g} round trips, "
            f"{cost.channels:g} channels opened"
        )
    for error, count in sorted(kind.errors.items(), key=lambda item: -item[1])[:3]:
        yield f"  {count} times: {error}"
    yield from _violation_lines(kind)
    yield ""


def _violation_lines(kind: KindReport) -> Iterator[str]:
    shown: Counter[str] = Counter()
    counts = Counter(violation.rule for violation in kind.violations)
    for violation in kind.violations:
        shown[violation.rule] += 1
        if shown[violation.rule] > SHOWN_PER_RULE:
            continue
        more = f" ({counts[violation.rule]} of this rule)" if counts[violation.rule] > 1 else ""
        yield f"VIOLATION of {violation.rule}{more}: {violation.detail}"
        for one in sorted(violation.excerpt, key=_start):
            yield f"  {_one_line(one, kind.started)}"


def _one_line(one: Operation | Disturbance, started: float) -> str:
    if isinstance(one, Disturbance):
        return f"{one.at - started:9.3f} s           {one.client or 'everybody'}: {one.what}"
    end = "  no answer" if one.completed == inf else f"..{one.completed - started:7.3f} s"
    about = [f"slot {one.slot}" if one.slot else "", f"token {one.token}" if one.slot else ""]
    if one.action in (Action.SET_SLOTS, Action.COUNT_HELD, Action.COUNT_FREE):
        about.append(str(one.number))
    if one.action is Action.ACQUIRE:
        about.append(f"willing to wait {one.wait_seconds:g} s")
    said = ", ".join(part for part in about if part)
    return f"{one.invoked - started:9.3f}{end} {one.client}: {one.action} {one.outcome}" + (
        f" ({said})" if said else ""
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return the report in a form for programs. Times are in seconds since the start of the proof of the same kind of
    lock."""
    return {
        "verdict": report.verdict,
        "interrupted": report.was_interrupted,
        "implementation": report.implementation,
        "seed": report.seed,
        "kinds": [_kind_json(kind) for kind in report.kinds],
    }


def _kind_json(kind: KindReport) -> dict[str, Any]:
    counts = Counter(violation.rule for violation in kind.violations)
    shown: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    for violation in kind.violations:
        shown[violation.rule] += 1
        if shown[violation.rule] <= JSON_PER_RULE:
            excerpt = [_one_json(one, kind.started) for one in sorted(violation.excerpt, key=_start)]
            violations.append({"rule": violation.rule, "detail": violation.detail, "excerpt": excerpt})
    return {
        "kind": kind.kind,
        "slots": kind.slots,
        "verdict": kind.verdict,
        "complete": kind.is_whole,
        "seconds": round(kind.seconds, 1),
        "rounds": kind.rounds,
        "grants": kind.grants,
        "operations": kind.operations,
        "disturbed": kind.faults,
        "errors": kind.errors,
        "wait_seconds_max": round(kind.wait_seconds_max, 3),
        "costs": {
            action: {
                "milliseconds": cost.milliseconds,
                "milliseconds_max": cost.milliseconds_max,
                "round_trips": cost.round_trips,
                "channels": cost.channels,
            }
            for action, cost in kind.costs.items()
        },
        "violation_counts": counts,
        "violations": violations,
    }


def _one_json(one: Operation | Disturbance, started: float) -> dict[str, Any]:
    if isinstance(one, Disturbance):
        return {"client": one.client, "disturbance": one.what, "at": round(one.at - started, 4)}
    return {
        "client": one.client,
        "action": one.action,
        "outcome": one.outcome,
        "invoked": round(one.invoked - started, 4),
        "completed": None if one.completed == inf else round(one.completed - started, 4),
        "slot": one.slot,
        "token": one.token,
        "number": one.number,
        "wait_seconds": one.wait_seconds,
    }


def _start(one: Operation | Disturbance) -> float:
    return one.at if isinstance(one, Disturbance) else one.invoked
