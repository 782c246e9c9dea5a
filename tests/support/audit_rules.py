"""The judge of an `Audit`: which promises were broken, each with the smallest history that shows it.

Pure. Every rule allows for anything popgate may have done between a request and its answer, and for clocks that differ
by up to `CLOCK_ERROR_SECONDS`. So every reported violation is real, but a passing test proves only what was answered in
time.

The audit job of the Spark client has rules of its own (`popgate_spark.jobs.faults`), because it judges another record:
the journal that popgate itself writes, over millions of messages. These rules know only the answers that clients got,
so they hold even if the journal is wrong. Neither imports the other, so that a mistake is not made in both.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from support.audit import (
    ACKED,
    ALREADY_ACKED,
    DONE,
    LOST,
    SETTLED,
    Audit,
    History,
    Lease,
    Verb,
)
from support.audit_causes import uncaused
from support.audit_dead import misplaced, moved_twice
from support.audit_model import wrong_counts
from support.audit_once import published_twice, unlike_repeats
from support.audit_order import out_of_order
from support.audit_spans import CLOCK_ERROR_SECONDS, live_spans, must_succeed
from support.audit_taken import Takers, refused_untaken
from support.audit_told import history_lines

HISTORIES_SHOWN_MAX = 10


class Kind(StrEnum):
    """The kinds of violation; docs/chaos.md describes the rules."""

    FATE = "not exactly one of acked, dead, expired and present"
    OVERLAP = "two live leases at once"
    CAME_AGAIN = "came again after it was settled"
    TAKEN = "expired, though neither another lease nor a settlement has ended it"
    COUNT = "wrong delivery count"
    ORDER = "came before an earlier one of its ordering key"
    ATTEMPT = "other receipt handles for the same attempt_id"
    DEDUP = "two messages of one dedup_id"
    MOVES = "moved more than once"
    REFUSED = "a live lease was refused"
    DRAIN = "not drained in time"
    STATE = "wrong counts in GET S"
    EARLY = "came again before its delay was over"
    EXPIRED = "came after its ttl"
    CAUSE = "came again for no reason that is admitted"
    DEAD = "wrong dead letters"
    FALSE_SUCCESS = "a settlement succeeded that could not"
    COMPLAINT = "complaint"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise. `history` has one line an event, in time order, with times in seconds since the audit began."""

    kind: Kind
    message_id: str
    what: str
    history: Sequence[str]

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.message_id} {self.what}", *self.history])


def judge(audit: Audit, *, drained: bool) -> list[Violation]:
    """Return every broken promise. If `drained`, popgate reported nothing left, so any unsettled message is lost."""

    def violation(kind: Kind, message_id: str, what: str, leases: Sequence[Lease] = ()) -> Violation:
        told = history_lines(audit, audit.histories.get(message_id), leases)
        return Violation(kind, message_id, what, told)

    return [violation(*finding) for finding in _findings(audit, drained=drained)]


def _findings(audit: Audit, *, drained: bool) -> "Iterator[_Finding]":
    for message_id, what in audit.complaints:
        yield Kind.COMPLAINT, message_id, what, []
    unanswered, takers = _Unanswered(audit), Takers(audit)
    dead = {letter.message_id for letter in audit.dead_letters or ()} | audit.redriven.keys()
    ended = max((pop.sent for pop in audit.pops), default=audit.began)
    for message_id, history in audit.histories.items():
        if drained:
            publish = history.publish
            is_excused = publish is not None and audit.may_be_dropped(publish)
            for what, leases in _wrong_fate(history, ended, is_dead=message_id in dead, is_excused=is_excused):
                yield Kind.FATE, message_id, what, leases
        for kind, what, leases in _broken(history, unanswered):
            yield kind, message_id, what, leases
        for what, leases in refused_untaken(history, takers):
            yield Kind.TAKEN, message_id, what, leases
        for what, leases in published_twice(audit, history):
            yield Kind.DEDUP, message_id, what, leases
    for earlier, lease in out_of_order(audit):
        what = f"{earlier.message_id} was not settled"
        yield Kind.ORDER, lease.message_id, what, [*earlier.leases[-1:], lease]
    for message_id, what, leases in unlike_repeats(audit):
        yield Kind.ATTEMPT, message_id, what, leases
    for message_id, what, leases in misplaced(audit) if drained else ():
        yield Kind.DEAD, message_id, what, leases
    for message_id, what, leases in moved_twice(audit):
        yield Kind.MOVES, message_id, what, leases
    for what in wrong_counts(audit):
        yield Kind.STATE, "", what, []
    if audit.healed_at < float("inf") and audit.drained_at - audit.healed_at > audit.drain_seconds_max:
        yield Kind.DRAIN, "", f"something was left {audit.drain_seconds_max:g} s after all was back", []


def explain(violations: Sequence[Violation]) -> str:
    """Return a text for an assertion: the number of each kind, and the first histories."""
    counts = {kind: sum(violation.kind is kind for violation in violations) for kind in Kind}
    summary = ", ".join(f"{count} x {kind}" for kind, count in counts.items() if count)
    shown = "\n".join(str(violation) for violation in violations[:HISTORIES_SHOWN_MAX])
    return f"{len(violations)} violations ({summary})\n{shown}"


# ---------------------------------------------------------------- the rules

_Finding = tuple[Kind, str, str, Sequence[Lease]]
"""The message's id, a description, and the leases that show it."""
_Broken = tuple[Kind, str, Sequence[Lease]]


class _Unanswered:
    """Counts the pops without an answer that may have leased a message by a given time."""

    def __init__(self, audit: Audit) -> None:
        self._sent = sorted(pop.sent for pop in audit.pops if pop.answered == float("inf"))

    def by(self, at: float) -> int:
        return bisect_right(self._sent, at)


def _broken(history: History, unanswered: _Unanswered) -> Iterator[_Broken]:
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


def _wrong_fate(
    history: History, at: float, *, is_dead: bool, is_excused: bool
) -> Iterator[tuple[str, Sequence[Lease]]]:
    """Return promised messages without exactly one fate; popgate reports that none are present.

    ``is_excused``: the broker may have dropped it.
    """
    acked = [lease for lease in history.leases if any(one.status in ACKED for one in lease.settlements)]
    if acked and is_dead:
        yield "was acked, and is a dead letter, or was one that was redriven", acked
    publish = history.publish
    if publish is None or not publish.is_promised or is_excused:
        return
    may_have_ended = is_dead or publish.is_kept_until <= at or any(lease.may_be_settled for lease in history.leases)
    if not may_have_ended:
        yield "was published, never settled, and is not there any more", history.leases[-1:]


def _expired(history: History) -> Iterator[_Broken]:
    """Return leases of messages that a pop, first sent after their ttl was over, should not have got."""
    publish = history.publish
    if publish is not None:
        for lease in history.leases:
            if (late := lease.sent - publish.is_gone_after - CLOCK_ERROR_SECONDS) > 0:
                yield Kind.EXPIRED, f"by {late:.3f} s", [lease]


def _early_at_first(history: History) -> Iterator[_Broken]:
    publish = history.publish
    if publish is None or not publish.traits.delay_seconds:
        return
    visible_at = publish.sent + publish.traits.delay_seconds - CLOCK_ERROR_SECONDS
    for lease in history.leases:
        if lease.answered < visible_at:
            yield Kind.EARLY, f"{visible_at - lease.answered:.3f} s before its publish allows", [lease]


def _came_again(leases: Sequence[Lease]) -> Iterator[_Broken]:
    """Return messages that a pop leased although it was sent after their settlement was answered."""
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


def _early(leases: Sequence[Lease]) -> Iterator[_Broken]:
    """Return messages that were leased before the delay of their release was over.

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


def _overlapping(leases: Sequence[Lease]) -> Iterator[_Broken]:
    for first, second in combinations(leases, 2):
        for ours in live_spans(first):
            for theirs in live_spans(second):
                seconds = min(ours.end, theirs.end) - max(ours.start, theirs.start)
                if seconds > 0:
                    yield Kind.OVERLAP, f"for {seconds:.3f} s at least", [first, second]


def _wrong_counts(leases: Sequence[Lease], unanswered: _Unanswered) -> Iterator[_Broken]:
    for first, second in combinations(leases, 2):
        if first.delivery_count == second.delivery_count:
            yield Kind.COUNT, f"two hand-outs have the number {first.delivery_count}", [first, second]
            continue
        higher, lower = (first, second) if first.delivery_count > second.delivery_count else (second, first)
        if lower.sent > higher.answered:  # the higher count was certainly granted earlier
            yield Kind.COUNT, f"fell from {higher.delivery_count} to {lower.delivery_count}", [higher, lower]
    for lease in leases:
        others = sum(other.sent <= lease.answered for other in leases if other is not lease)
        most = 1 + others + unanswered.by(lease.answered)
        if not 1 <= lease.delivery_count <= most:
            yield Kind.COUNT, f"is {lease.delivery_count}, but at most {most} are possible", [lease]


def _dishonest(lease: Lease) -> Iterator[_Broken]:
    for index, settlement in enumerate(lease.settlements):
        earlier = lease.settlements[:index]
        if settlement.status in LOST and must_succeed(lease, settlement):
            yield Kind.REFUSED, f"{settlement.verb} was answered {settlement.status!r}", [lease]
        if settlement.status == ALREADY_ACKED and not any(one.verb is Verb.ACK for one in earlier):
            yield Kind.FALSE_SUCCESS, "the first ack of it was answered 'already_acked'", [lease]
        if settlement.status == DONE[settlement.verb] and any(
            one.status in SETTLED and one.answered < settlement.sent and one.verb is not settlement.verb
            for one in earlier
        ):
            what = f"{settlement.verb} of a settled lease was answered {settlement.status!r}"
            yield Kind.FALSE_SUCCESS, what, [lease]
