"""The judge of an `Audit`: which promises were broken, each with the smallest history that shows it.

Pure. Every rule holds whatever popgate did between a request and its answer, and whatever lay between the clocks of
processes up to `CLOCK_ERROR_SECONDS`; so a violation is always one, and a test that passes has not proved more than
what was answered in time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from support.audit import (
    ALREADY_ACKED,
    DONE,
    LOST,
    PLAIN,
    SETTLED,
    Audit,
    History,
    Lease,
    Mark,
    Settlement,
    Traits,
    Verb,
)
from support.audit_causes import uncaused
from support.audit_dead import misplaced
from support.audit_order import out_of_order
from support.audit_spans import CLOCK_ERROR_SECONDS, live_spans

HISTORIES_SHOWN_MAX = 10
MARKS_AFTER_SECONDS = 5.0
"""What was done to the servers so shortly after may be the cause, too."""


class Kind(StrEnum):
    LOST = "lost"
    CAME_AGAIN = "came again after it was settled"
    OVERLAP = "two live leases at once"
    EARLY = "came again before its delay was over"
    EXPIRED = "came after its ttl"
    CAUSE = "came again for no reason that is admitted"
    DEAD = "wrong dead letters"
    ORDER = "came before an earlier one of its ordering key"
    COUNT = "wrong delivery count"
    REFUSED = "a live lease was refused"
    FALSE_SUCCESS = "a settlement succeeded that could not"
    COMPLAINT = "complaint"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise. `history` is a line an event, in time order, times in seconds since the audit began."""

    kind: Kind
    message_id: str
    what: str
    history: Sequence[str]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.message_id} {self.what}", *self.history])


def judge(audit: Audit, *, drained: bool) -> list[Violation]:
    """Every broken promise. `drained`: popgate says that nothing is left, so what was not settled is lost."""
    violations = [
        Violation(Kind.COMPLAINT, message_id, what, _history(audit, audit.histories.get(message_id)))
        for message_id, what in audit.complaints
    ]
    unanswered = _Unanswered(audit)
    dead = {letter.message_id for letter in audit.dead_letters or ()}
    ended = max((pop.sent for pop in audit.pops), default=audit.began)
    for history in audit.histories.values():
        if drained and history.message_id not in dead:
            for kind, what, leases in _lost(history, ended):
                violations.append(Violation(kind, history.message_id, what, _history(audit, history, leases)))
        for kind, what, leases in _broken(history, unanswered):
            violations.append(Violation(kind, history.message_id, what, _history(audit, history, leases)))
    for earlier, lease in out_of_order(audit):
        told = _history(audit, audit.histories[lease.message_id], [*earlier.leases[-1:], lease])
        violations.append(Violation(Kind.ORDER, lease.message_id, f"{earlier.message_id} was not settled", told))
    for message_id, what, leases in misplaced(audit) if drained else ():
        told = _history(audit, audit.histories.get(message_id), leases)
        violations.append(Violation(Kind.DEAD, message_id, what, told))
    return violations


def explain(violations: Sequence[Violation]) -> str:
    """A text for an assertion: how many of each kind, and the first histories."""
    counts = {kind: sum(violation.kind is kind for violation in violations) for kind in Kind}
    summary = ", ".join(f"{count} x {kind}" for kind, count in counts.items() if count)
    shown = "\n".join(str(violation) for violation in violations[:HISTORIES_SHOWN_MAX])
    return f"{len(violations)} violations ({summary})\n{shown}"


# ---------------------------------------------------------------- the rules

Finding = tuple[Kind, str, Sequence[Lease]]


class _Unanswered:
    """How many pops without an answer may have leased a message by some time."""

    def __init__(self, audit: Audit) -> None:
        self._sent = sorted(pop.sent for pop in audit.pops if pop.answered == float("inf"))

    def by(self, at: float) -> int:
        return bisect_right(self._sent, at)


def _broken(history: History, unanswered: _Unanswered) -> Iterator[Finding]:
    yield from _expired(history)
    yield from _came_again(history.leases)
    yield from _early_at_first(history)
    yield from _early(history.leases)
    yield from _overlapping(history.leases)
    yield from _wrong_counts(history.leases, unanswered)
    for before, lease in uncaused(history):
        yield Kind.CAUSE, "while the lease before may have been settled, and otherwise lasts", [before, lease]
    for lease in history.leases:
        yield from _dishonest(lease)


def _lost(history: History, at: float) -> Iterator[Finding]:
    publish = history.publish
    if publish is None or not publish.is_promised or publish.is_kept_until <= at:
        return
    if not any(lease.may_be_settled for lease in history.leases):
        yield Kind.LOST, "was published, never settled, and is not there any more", history.leases[-1:]


def _expired(history: History) -> Iterator[Finding]:
    """Who asked for the first time after a message's ttl is not given it."""
    publish = history.publish
    if publish is not None:
        for lease in history.leases:
            if (late := lease.sent - publish.is_gone_after - CLOCK_ERROR_SECONDS) > 0:
                yield Kind.EXPIRED, f"by {late:.3f} s", [lease]


def _early_at_first(history: History) -> Iterator[Finding]:
    publish = history.publish
    if publish is None or not publish.traits.delay_seconds:
        return
    visible_at = publish.sent + publish.traits.delay_seconds - CLOCK_ERROR_SECONDS
    for lease in history.leases:
        if lease.answered < visible_at:
            yield Kind.EARLY, f"{visible_at - lease.answered:.3f} s before its publish allows", [lease]


def _came_again(leases: Sequence[Lease]) -> Iterator[Finding]:
    """A settled lease was the message's last one: whoever popped after it was answered got what is gone."""
    for first in leases:
        settlement = next((one for one in first.settlements if one.status in SETTLED), None)
        if settlement is None:
            continue
        for second in leases:
            if second is not first and second.sent > first.answered:
                yield Kind.CAME_AGAIN, f"its {settlement.verb} was answered {settlement.status!r}", [first, second]
    for first, second in combinations(leases, 2):
        if first.is_settled and second.is_settled:
            yield Kind.FALSE_SUCCESS, "two leases of it were settled for good", [first, second]


def _early(leases: Sequence[Lease]) -> Iterator[Finding]:
    """Whoever popped after a lease that was then released with a delay got it after the release, so after the delay.

    A repeated release changes nothing: its delay began with the first one that may have taken effect.
    """
    for first in leases:
        releases = [one for one in first.settlements if one.verb is Verb.RELEASE and one.status not in LOST]
        if not any(one.status == DONE[Verb.RELEASE] for one in releases):
            continue
        visible_at = min(one.sent + one.seconds for one in releases) - CLOCK_ERROR_SECONDS
        for second in leases:
            if second.sent > first.answered and second.answered < visible_at:
                yield Kind.EARLY, f"by {visible_at - second.answered:.3f} s", [first, second]


def _overlapping(leases: Sequence[Lease]) -> Iterator[Finding]:
    for first, second in combinations(leases, 2):
        for ours in live_spans(first):
            for theirs in live_spans(second):
                seconds = min(ours.end, theirs.end) - max(ours.start, theirs.start)
                if seconds > 0:
                    yield Kind.OVERLAP, f"for {seconds:.3f} s at least", [first, second]


def _wrong_counts(leases: Sequence[Lease], unanswered: _Unanswered) -> Iterator[Finding]:
    for first, second in combinations(leases, 2):
        if first.delivery_count == second.delivery_count:
            yield Kind.COUNT, f"two hand-outs have the number {first.delivery_count}", [first, second]
            continue
        higher, lower = (first, second) if first.delivery_count > second.delivery_count else (second, first)
        if lower.sent > higher.answered:  # the higher number was certainly given before
            yield Kind.COUNT, f"fell from {higher.delivery_count} to {lower.delivery_count}", [higher, lower]
    for lease in leases:
        others = sum(other.sent <= lease.answered for other in leases if other is not lease)
        most = 1 + others + unanswered.by(lease.answered)
        if not 1 <= lease.delivery_count <= most:
            yield Kind.COUNT, f"is {lease.delivery_count}, and nobody can have got it more than {most} times", [lease]


def _dishonest(lease: Lease) -> Iterator[Finding]:
    for index, settlement in enumerate(lease.settlements):
        earlier = lease.settlements[:index]
        if settlement.status in LOST and _must_succeed(lease, settlement, earlier):
            yield Kind.REFUSED, f"{settlement.verb} was answered {settlement.status!r}", [lease]
        if settlement.status == ALREADY_ACKED and not any(one.verb is Verb.ACK for one in earlier):
            yield Kind.FALSE_SUCCESS, "the first ack of it was answered 'already_acked'", [lease]
        if settlement.status == DONE[settlement.verb] and any(
            one.status in SETTLED and one.answered < settlement.sent and one.verb is not settlement.verb
            for one in earlier
        ):
            what = f"{settlement.verb} of a settled lease was answered {settlement.status!r}"
            yield Kind.FALSE_SUCCESS, what, [lease]


def _must_succeed(lease: Lease, settlement: Settlement, earlier: Sequence[Settlement]) -> bool:
    """Whether the lease was certainly live all the time from the request to its answer.

    A repeated ack of a lease that was live when the first one was sent finds it live or acked by itself.
    """
    overlooked = Verb.ACK if settlement.verb is Verb.ACK else None
    if overlooked is None and any(one.verb is not Verb.EXTEND and one.status not in LOST for one in earlier):
        return False
    before = Lease(
        lease.message_id,
        lease.receipt_handle,
        lease.client,
        lease.sent,
        lease.answered,
        lease.seconds,
        lease.delivery_count,
        list(earlier),
    )
    spans = live_spans(before, but=overlooked)
    return any(span.start <= settlement.sent and settlement.answered <= span.end for span in spans)


# ---------------------------------------------------------------- the smallest history


def tell(audit: Audit, message_id: str) -> str:
    """Everything about one message."""
    history = audit.histories[message_id]
    return "\n    ".join([message_id, *_history(audit, history, history.leases)])


def _history(audit: Audit, history: History | None, leases: Iterable[Lease] = ()) -> list[str]:
    """The publish, the leases that matter, and what happened to the servers meanwhile."""
    lines: list[tuple[float, str]] = []
    began = audit.began
    if history is not None and (publish := history.publish) is not None:
        what = f"publish{_asked(publish.traits)}: {publish.status or 'no answer'}"
        lines.append((publish.sent, _line(began, publish.sent, publish.answered, what)))
    for lease in leases:
        what = (
            f"pop by {lease.client}: lease ...{lease.receipt_handle[-12:]}, delivery {lease.delivery_count}, "
            f"live at least until {lease.ends_at - began:.3f}"
        )
        lines.append((lease.sent, _line(began, lease.sent, lease.answered, what)))
        for settlement in lease.settlements:
            seconds = f" by {settlement.seconds:g} s" if settlement.verb is Verb.EXTEND else ""
            what = f"{settlement.verb}{seconds} of ...{lease.receipt_handle[-12:]}: {settlement.status or 'no answer'}"
            lines.append((settlement.sent, _line(began, settlement.sent, settlement.answered, what)))
    if lines:
        first, last = min(at for at, _ in lines), max(at for at, _ in lines) + MARKS_AFTER_SECONDS
        lines += [_mark_line(began, mark) for mark in audit.marks if first <= mark.at <= last]
    return [line for _, line in sorted(lines)]


def _asked(traits: Traits) -> str:
    asked = {name: value for name, value in traits._asdict().items() if value != getattr(PLAIN, name)}
    return f" ({', '.join(f'{name} {value}' for name, value in asked.items())})" if asked else ""


def _line(began: float, sent: float, answered: float, what: str) -> str:
    end = "   ....  " if answered == float("inf") else f"{answered - began:9.3f}"
    return f"{sent - began:9.3f} -{end}  {what}"


def _mark_line(began: float, mark: Mark) -> tuple[float, str]:
    return mark.at, f"{mark.at - began:9.3f}            *** {mark.what}"
