"""What a lock promised, checked against a recorded history of it. Pure: knows no broker, no process and no clock.

A history is a list of operations, each with the times of its invocation and its completion on one machine's clock, and
of disturbances: what was done to a holder so that it could not know what became of its lock (its process was killed or
stopped, its connection cut, a node of the broker killed, its slot taken by force).

The rules, after amqp-locks ("as correct as possible") and Kleppmann's "How to do distributed locking":

- ``tokens``: of two grants of a slot the one that was asked for after the other had been given has the higher token,
  and no token is given twice. So a resource that refuses lower tokens serves one holder a slot.
- ``exclusion``: two holders of a slot at a time only where the earlier one was disturbed meanwhile.
- ``verify``: nobody is told that it holds a slot that somebody else was given before it asked.
- ``slots``: no slot is given that an administrator had removed before it was asked for; nor, once it is back, before
  its earlier holder has let go.
- ``wait``: every wait ends in time, and nobody is overtaken time and again.
- ``release``: after a release the holder is told that it holds nothing; in the end nothing is held.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import inf

WAIT_SLACK_SECONDS = 5.0
"""How much longer than asked for a wait may take: a broker that loses a node needs some seconds."""
OVERTAKEN_MAX = 3
"""So many rounds of all who wait may pass before a waiting client has its turn."""


class Action(StrEnum):
    ACQUIRE = "acquire"
    VERIFY = "verify"
    RELEASE = "release"
    SET_SLOTS = "set_slots"
    COUNT_HELD = "count_held"
    """In the end, when everybody has let go."""


class Outcome(StrEnum):
    DONE = "done"
    """Acquired; verified as held; released; set; counted."""
    REFUSED = "refused"
    """Not acquired in time; verified as lost."""
    UNKNOWN = "unknown"
    """It failed, or nobody lived to see the answer: it may have taken effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``completed`` is inf where there was no answer. ``slot`` and ``token`` are a grant's; ``number`` is how many
    slots were set, or counted as held. ``wait_seconds`` is what an acquire was ready to wait."""

    client: str
    action: Action
    outcome: Outcome
    invoked: float
    completed: float = inf
    slot: int = 0
    token: int | None = None
    number: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """``client`` could not know what became of its lock from ``at`` on; empty: nobody could."""

    client: str
    at: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """``excerpt``: the operations and disturbances that show it, and no others, in the order of their times."""

    rule: str
    detail: str
    excerpt: Sequence[Operation | Disturbance]


@dataclass(frozen=True, slots=True)
class _Holding:
    """What a client believed: that it held a slot from ``start`` until ``end``, when it let go or was told."""

    grant: Operation
    end: float
    ending: Operation | Disturbance | None

    @property
    def start(self) -> float:
        return self.grant.completed


def check(operations: Sequence[Operation], disturbances: Sequence[Disturbance], *, slots: int) -> list[Violation]:
    """All violations, the earliest first; an empty list where the history keeps every rule. The lock began with
    ``slots``."""
    found = [
        *_check_tokens(operations),
        *_check_exclusion(operations, disturbances),
        *_check_verifies(operations),
        *_check_slots(operations, slots),
        *_check_waits(operations, disturbances),
        *_check_releases(operations),
    ]
    return sorted(found, key=lambda violation: _time(violation.excerpt[-1]))


def _check_tokens(operations: Sequence[Operation]) -> Iterator[Violation]:
    for slot, grants in _grants(operations).items():
        for grant in grants:
            if grant.token is None:
                yield Violation(rule="tokens", detail=f"slot {slot} was given without a token", excerpt=[grant])
        known = [grant for grant in grants if grant.token is not None]
        for earlier, later in combinations(sorted(known, key=lambda grant: grant.completed), 2):
            assert earlier.token is not None
            assert later.token is not None
            if earlier.token == later.token:
                detail = f"token {later.token} of slot {slot} was given twice"
            elif earlier.completed < later.invoked and earlier.token > later.token:
                detail = f"token {later.token} of slot {slot} came after {earlier.token}"
            else:
                continue
            yield Violation(rule="tokens", detail=detail, excerpt=[earlier, later])


def _check_exclusion(operations: Sequence[Operation], disturbances: Sequence[Disturbance]) -> Iterator[Violation]:
    for slot, holdings in _holdings(operations, disturbances).items():
        for earlier, later in combinations(sorted(holdings, key=lambda holding: holding.start), 2):
            if later.start >= earlier.end:
                continue
            excuse = [one for one in disturbances if one.client in ("", earlier.grant.client) and one.at < later.start]
            if any(one.at >= earlier.grant.invoked for one in excuse):
                continue
            detail = f"{later.grant.client} was given slot {slot} while {earlier.grant.client} held it undisturbed"
            excerpt = [earlier.grant, later.grant, *([earlier.ending] if earlier.ending is not None else [])]
            yield Violation(rule="exclusion", detail=detail, excerpt=excerpt)


def _check_verifies(operations: Sequence[Operation]) -> Iterator[Violation]:
    grants = _grants(operations)
    for verify in operations:
        if verify.action is not Action.VERIFY or verify.outcome is not Outcome.DONE:
            continue
        for grant in grants.get(verify.slot, []):
            is_newer = grant.client != verify.client and (grant.token or 0) > (verify.token or 0)
            if is_newer and grant.completed < verify.invoked:
                detail = f"{verify.client} was told that it holds slot {verify.slot}, which {grant.client} was given"
                yield Violation(rule="verify", detail=detail, excerpt=[grant, verify])
                break


def _check_slots(operations: Sequence[Operation], slots: int) -> Iterator[Violation]:
    changes = sorted(
        (one for one in operations if one.action is Action.SET_SLOTS), key=lambda operation: operation.invoked
    )
    for slot, grants in _grants(operations).items():
        for grant in grants:
            present = slots >= slot
            last: Operation | None = None
            for change in changes:
                if change.completed < grant.invoked and change.outcome is Outcome.DONE:
                    present, last = change.number >= slot, change
                elif change.invoked < grant.completed:
                    present = present or change.number >= slot  # it may have come in between
                    if change.outcome is Outcome.UNKNOWN:
                        present = True
            if not present and last is not None:
                detail = f"slot {slot} was given to {grant.client} after it had been removed"
                yield Violation(rule="slots", detail=detail, excerpt=[last, grant])


def _check_waits(operations: Sequence[Operation], disturbances: Sequence[Disturbance]) -> Iterator[Violation]:
    acquires = [one for one in operations if one.action is Action.ACQUIRE]
    grants = [one for one in acquires if one.outcome is Outcome.DONE]
    clients = len({one.client for one in acquires})
    for wait in acquires:
        disturbed = any(one.client in ("", wait.client) and one.at >= wait.invoked for one in disturbances)
        if disturbed:
            continue
        if wait.completed > wait.invoked + wait.wait_seconds + WAIT_SLACK_SECONDS:
            detail = f"{wait.client} was ready to wait for {wait.wait_seconds:g} s, and got no answer in time"
            yield Violation(rule="wait", detail=detail, excerpt=[wait])
            continue
        overtaking = [one for one in grants if one.invoked > wait.invoked and one.completed < wait.completed]
        if len(overtaking) > OVERTAKEN_MAX * clients:
            detail = f"{wait.client} was overtaken {len(overtaking)} times by those who came later"
            yield Violation(rule="wait", detail=detail, excerpt=[wait, overtaking[0], overtaking[-1]])


def _check_releases(operations: Sequence[Operation]) -> Iterator[Violation]:
    released = {
        (one.client, one.slot, one.token): one
        for one in operations
        if one.action is Action.RELEASE and one.outcome is Outcome.DONE
    }
    for one in operations:
        if one.action is Action.VERIFY and one.outcome is Outcome.DONE:
            release = released.get((one.client, one.slot, one.token))
            if release is not None and release.completed < one.invoked:
                detail = f"{one.client} was told that it holds slot {one.slot}, which it had released"
                yield Violation(rule="release", detail=detail, excerpt=[release, one])
        if one.action is Action.COUNT_HELD and one.outcome is Outcome.DONE and one.number:
            detail = f"{one.number} slots are held though everybody has let go"
            yield Violation(rule="release", detail=detail, excerpt=[one])


def _grants(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    """Grants by slot."""
    grants: defaultdict[int, list[Operation]] = defaultdict(list)
    for one in operations:
        if one.action is Action.ACQUIRE and one.outcome is Outcome.DONE:
            grants[one.slot].append(one)
    return grants


def _holdings(operations: Sequence[Operation], disturbances: Sequence[Disturbance]) -> dict[int, list[_Holding]]:
    """From each grant until its holder began to let go, or learned that it has lost it, or was killed."""
    endings: dict[tuple[str, int, int | None], Operation] = {}
    for one in sorted(operations, key=lambda operation: operation.invoked):
        lost = one.action is Action.VERIFY and one.outcome is Outcome.REFUSED
        if one.action is Action.RELEASE or lost:
            endings.setdefault((one.client, one.slot, one.token), one)
    holdings: defaultdict[int, list[_Holding]] = defaultdict(list)
    for slot, grants in _grants(operations).items():
        for grant in grants:
            ending: Operation | Disturbance | None = endings.get((grant.client, slot, grant.token))
            end = inf
            if isinstance(ending, Operation):
                end = ending.invoked if ending.action is Action.RELEASE else ending.completed
            for kill in disturbances:
                if kill.client == grant.client and kill.what == KILLED and grant.completed <= kill.at < end:
                    end, ending = kill.at, kill
            holdings[slot].append(_Holding(grant, end, ending))
    return holdings


def _time(one: Operation | Disturbance) -> float:
    return one.at if isinstance(one, Disturbance) else one.invoked


KILLED = "killed"
"""A disturbance after which a client believes nothing any more."""
