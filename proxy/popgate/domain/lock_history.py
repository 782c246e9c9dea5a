"""Checks a lock's guarantees against a recorded history. Pure: uses no broker, process or clock.

A history is a list of operations and a list of disturbances. Each operation has the times of its invocation and its
completion on one machine's clock. A disturbance is an event that may end a client's lock without the client's
knowledge, or that delays the client's answers: the client's process was killed or stopped, its connection was cut, a
node of the broker was killed, or its slot was released by force. A check of tens of thousands of operations takes one
or two seconds.

The rules, after amqp-locks ("as correct as possible") and Kleppmann's "How to do distributed locking":

- ``tokens``: if a slot is granted and then requested again, the later grant has the higher token. No token is granted
  twice. So a resource that refuses lower tokens serves only one holder of a slot.
- ``exclusion``: a slot has two holders at the same time only if the one with the lower token was disturbed before.
- ``verify``: a verify does not confirm a slot if the slot was granted to another client, with a higher token, before
  the verify began. The broker can't know this if it took the token from a holder whose channel lives on (``TAKEN``).
- ``renew``: the same holds for a renewal. A renewal also fails if the slot was granted to another client, with a token
  between the holder's and the renewed one, even if that client no longer holds the slot.
- ``fence``: a resource that refuses lower tokens serves every holder that was not disturbed.
- ``slots``: a slot is not granted if an administrator removed it before the request. When no client holds a slot, as
  many slots can be acquired as are configured.
- ``free``: an acquire is refused at once only if other clients may hold all slots at that time.
- ``wait``: every wait and every other call ends in time. A waiting client is overtaken only a limited number of times.
- ``release``: a verify after a release reports that the lock is lost. At the end of the history, no slot is held.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from popgate.domain.lock_operations import (
    Action,
    Disturbance,
    Disturbances,
    GrantKey,
    Operation,
    OperationOutcome,
)

WAIT_SLACK_SECONDS = 5.0
"""Seconds by which a wait may exceed its requested time, because a broker that has lost a node needs some time."""
ANSWER_SECONDS_MAX = 15.0
"""Maximum seconds that a verify, a write, a release or an administrator's change may take."""
AT_ONCE_SECONDS = 0.2
"""If an acquire is refused within this many seconds, it was refused at once, and not because of a slow broker."""
FREED_SECONDS = 8.0
"""Maximum seconds for which a slot may stay held after its client vanished, or after a call had no known outcome."""
CHANGED_SECONDS = 2.0
"""Seconds after a change of slots, or after a disturbance of all clients, in which free slots may be refused."""
OVERTAKEN_MAX = 3
"""Maximum number of later acquires that are granted during one wait, for each client that is involved: the waiting
client and each client that overtakes it."""

_CONFIRM = {Action.VERIFY: "verify", Action.RENEW: "renewal"}
"""The actions whose success confirms that the client holds the slot, and what their calls are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation of ``rule``. ``excerpt``: the operations and disturbances that prove it, ordered by time."""

    rule: str
    detail: str
    excerpt: Sequence[Operation | Disturbance]


@dataclass(frozen=True, slots=True)
class _Holding:
    """A period in which a client believed that it held a slot.

    It begins at ``start``, when the client received the grant. It ends at ``end``, when the client began to release the
    slot, learned that the slot was lost, or was killed (``ending``).
    """

    grant: Operation
    end: float
    ending: Operation | Disturbance | None

    @property
    def start(self) -> float:
        return self.grant.completed


def check(operations: Sequence[Operation], disturbances: Sequence[Disturbance], *, slots: int) -> list[Violation]:
    """Return all violations of the rules, the earliest first. ``slots`` is the lock's initial number of slots."""
    disturbed = Disturbances(disturbances)
    found = [
        *_check_tokens(operations),
        *_check_exclusion(operations, disturbed),
        *_check_verifies(operations, disturbed),
        *_check_renewals(operations),
        *_check_fence(operations, disturbed),
        *_check_slots(operations, slots),
        *_check_counts(operations, slots),
        *_check_free(operations, disturbed, slots),
        *_check_waits(operations, disturbed),
        *_check_releases(operations),
    ]
    return sorted(found, key=lambda violation: _time(violation.excerpt[-1]))


def _check_tokens(operations: Sequence[Operation]) -> Iterator[Violation]:
    for slot, grants in _grants(operations).items():
        given: dict[int, Operation] = {}
        for grant in grants:
            if grant.token is None:
                yield Violation(rule="tokens", detail=f"slot {slot} was given without a token", excerpt=[grant])
            elif (earlier := given.setdefault(grant.token, grant)) is not grant:
                detail = f"token {grant.token} of slot {slot} was given twice"
                yield Violation(rule="tokens", detail=detail, excerpt=[earlier, grant])
        highest = _Highest(grants)
        for grant in sorted(grants, key=lambda grant: grant.invoked):
            before = highest.completed_before(grant.invoked)
            if before is not None and grant.token is not None and (before.token or 0) > grant.token:
                detail = f"token {grant.token} of slot {slot} came after {before.token}"
                yield Violation(rule="tokens", detail=detail, excerpt=[before, grant])


class _Highest:
    """Finds the grant with the highest token among the grants that were completed before a given time.

    From call to call of ``completed_before``, the given time must not decrease.
    """

    def __init__(self, grants: Sequence[Operation]) -> None:
        """``grants`` must be in the order of their completion."""
        self._grants = [grant for grant in grants if grant.token is not None]
        self._next = 0
        self._highest: Operation | None = None

    def completed_before(self, time: float) -> Operation | None:
        while self._next < len(self._grants) and self._grants[self._next].completed < time:
            grant = self._grants[self._next]
            if self._highest is None or (grant.token or 0) > (self._highest.token or 0):
                self._highest = grant
            self._next += 1
        return self._highest


def _check_exclusion(operations: Sequence[Operation], disturbed: Disturbances) -> Iterator[Violation]:
    for slot, holdings in _holdings(operations, disturbed).items():
        standing: list[_Holding] = []
        for later in holdings:
            standing = [earlier for earlier in standing if earlier.end > later.start]
            for earlier in standing:
                # The client that received its grant later may have acquired the slot earlier.
                overtaken, by = (one.grant for one in sorted((earlier, later), key=_order))
                if disturbed.lost_between(overtaken.client, overtaken.invoked, later.start):
                    continue
                detail = f"{by.client} was given slot {slot} while {overtaken.client} held it undisturbed"
                excerpt = [earlier.grant, later.grant, *([earlier.ending] if earlier.ending is not None else [])]
                yield Violation(rule="exclusion", detail=detail, excerpt=excerpt)
            standing.append(later)


def _order(holding: _Holding) -> tuple[float, float]:
    """Return the sort key of a holding: the token, or for a lock without tokens the time of the grant."""
    return holding.grant.token or 0, holding.start


def _check_verifies(operations: Sequence[Operation], disturbed: Disturbances) -> Iterator[Violation]:
    grants = _grants(operations)
    highest = {slot: _Highest(given) for slot, given in grants.items()}
    held = (one for one in operations if one.action in _CONFIRM and one.outcome is OperationOutcome.DONE)
    for verify in sorted(held, key=lambda verify: verify.invoked):
        grant = highest[verify.slot].completed_before(verify.invoked) if verify.slot in highest else None
        if grant is not None and grant.client != verify.client and (grant.token or 0) > (verify.token or 0):
            if verify.action is Action.VERIFY and disturbed.taken_between(grant.completed, verify.invoked):
                continue
            what = f"a {_CONFIRM[verify.action]} of {verify.client}"
            detail = f"{what} confirmed slot {verify.slot}, which {grant.client} was given before"
            yield Violation(rule=verify.action, detail=detail, excerpt=[grant, verify])


def _check_renewals(operations: Sequence[Operation]) -> Iterator[Violation]:
    by_token = {
        slot: sorted((grant for grant in grants if grant.token is not None), key=lambda grant: grant.token or 0)
        for slot, grants in _grants(operations).items()
    }
    for renewal in operations:
        if renewal.renewed_token is None or renewal.outcome is not OperationOutcome.DONE:
            continue
        grants = by_token.get(renewal.slot, [])
        first = bisect_right(grants, renewal.token or 0, key=lambda grant: grant.token or 0)
        last = bisect_left(grants, renewal.renewed_token, key=lambda grant: grant.token or 0)
        between = next((grant for grant in grants[first:last] if grant.client != renewal.client), None)
        if between is not None:
            what = f"slot {renewal.slot}, which {between.client} was given in the meantime"
            detail = f"a renewal of {renewal.client} confirmed {what}"
            yield Violation(rule="renew", detail=detail, excerpt=[between, renewal])


def _check_fence(operations: Sequence[Operation], disturbed: Disturbances) -> Iterator[Violation]:
    grants = {grant.grant: grant for given in _grants(operations).values() for grant in given}
    lost = {one.grant: one.invoked for one in operations if _ends_holding(one)}
    for write in operations:
        grant = grants.get(write.grant)
        if write.action is not Action.WRITE or write.outcome is not OperationOutcome.REFUSED or grant is None:
            continue
        if lost.get(write.grant, inf) < write.invoked:
            continue
        if disturbed.lost_between(write.client, grant.invoked, write.completed):
            continue
        detail = f"{write.client} held slot {write.slot} undisturbed, and its token was refused as overtaken"
        yield Violation(rule="fence", detail=detail, excerpt=[grant, write])


def _check_slots(operations: Sequence[Operation], slots: int) -> Iterator[Violation]:
    changes = _changes(operations)
    for slot, grants in _grants(operations).items():
        for grant in grants:
            present = slots >= slot
            last: Operation | None = None
            for change in changes:
                if change.completed < grant.invoked and change.outcome is OperationOutcome.DONE:
                    present, last = change.number >= slot, change
                elif change.invoked < grant.completed:
                    present = present or change.number >= slot  # the change may have taken effect before the grant
                    if change.outcome is OperationOutcome.UNKNOWN:
                        present = True
            if not present and last is not None:
                detail = f"slot {slot} was given to {grant.client} after it had been removed"
                yield Violation(rule="slots", detail=detail, excerpt=[last, grant])


def _check_counts(operations: Sequence[Operation], slots: int) -> Iterator[Violation]:
    changes = _changes(operations)
    counts = sorted((one for one in operations if one.action is Action.COUNT_FREE), key=lambda count: count.invoked)
    for count in counts:
        if count.outcome is not OperationOutcome.DONE:  # a failed count was repeated, unless it is the last one
            if count is counts[-1]:
                yield Violation(rule="slots", detail="the lock can't be acquired while it is free", excerpt=[count])
            continue
        before = [change for change in changes if change.invoked < count.invoked]
        if before and before[-1].outcome is not OperationOutcome.DONE:
            continue
        wanted = before[-1].number if before else slots
        if count.number != wanted:
            detail = f"{count.number} of {wanted} slots could be acquired while all were free"
            yield Violation(rule="slots", detail=detail, excerpt=[*before[-1:], count])


def _check_free(operations: Sequence[Operation], disturbed: Disturbances, slots: int) -> Iterator[Violation]:
    acquires = [one for one in operations if one.action is Action.ACQUIRE]
    releases = {one.grant: one for one in operations if one.action is Action.RELEASE}
    counts = [one for one in operations if one.action is Action.COUNT_HELD and one.outcome is OperationOutcome.DONE]
    counted = sorted(count.completed for count in counts)
    asked = sorted(one.invoked for one in acquires)
    left = sorted(_left(one, releases, counted) for one in acquires)
    changes = _changes(operations)
    for refused in acquires:
        start, end = refused.invoked, refused.completed
        before = [change for change in changes if change.invoked < end][-1:]
        is_uncertain = any(
            one.outcome is not OperationOutcome.DONE or one.completed > start - CHANGED_SECONDS for one in before
        )
        if refused.outcome is not OperationOutcome.REFUSED or end - start > AT_ONCE_SECONDS or is_uncertain:
            continue
        others = bisect_left(asked, end) - bisect_left(left, start) - 1
        present = before[0].number if before else slots
        if others < present and not disturbed.late_between("", start - CHANGED_SECONDS, end):
            released = [one for one in releases.values() if one.completed < start]
            detail = f"{refused.client} was refused at once though a slot was free"
            excerpt = [*sorted(released, key=lambda one: one.completed)[-1:], refused]
            yield Violation(rule="free", detail=detail, excerpt=excerpt)


def _left(acquire: Operation, releases: Mapping[GrantKey, Operation], counted: Sequence[float]) -> float:
    """Return the latest time at which the acquire may have held a slot. No slot is held at the next count of slots."""
    if acquire.outcome is OperationOutcome.REFUSED:
        return acquire.completed + AT_ONCE_SECONDS  # the broker may remove the waiter a moment later
    at = bisect_right(counted, acquire.invoked)
    last = acquire if acquire.outcome is OperationOutcome.UNKNOWN else releases.get(acquire.grant)
    known = inf if last is None else last.completed
    if last is not None and last.outcome is OperationOutcome.UNKNOWN:
        known += FREED_SECONDS
    return min(known, counted[at] if at < len(counted) else inf)


def _check_waits(operations: Sequence[Operation], disturbed: Disturbances) -> Iterator[Violation]:
    acquires = [one for one in operations if one.action is Action.ACQUIRE]
    grants = sorted((one for one in acquires if one.outcome is OperationOutcome.DONE), key=lambda grant: grant.invoked)
    asked = [grant.invoked for grant in grants]
    changes = _changes(operations)
    for one in operations:
        if one.action in (Action.COUNT_HELD, Action.COUNT_FREE):
            continue
        is_wait = one.action is Action.ACQUIRE
        latest = one.invoked + (one.wait_seconds + WAIT_SLACK_SECONDS if is_wait else ANSWER_SECONDS_MAX)
        overtaking: list[Operation] = []
        if is_wait:
            meanwhile = grants[bisect_right(asked, one.invoked) : bisect_left(asked, one.completed)]
            overtaking = [grant for grant in meanwhile if grant.completed < one.completed]
        clients = 1 + len({grant.client for grant in overtaking})
        # While slots are added or removed, a waiting client has to find the new slots, and may be overtaken more often.
        in_line = not any(change.invoked < one.completed and change.completed > one.invoked for change in changes)
        is_late, is_overtaken = one.completed > latest, in_line and len(overtaking) > OVERTAKEN_MAX * clients
        if not (is_late or is_overtaken) or disturbed.late_between(one.client, one.invoked, latest):
            continue
        if is_late:
            asked_for = f"was ready to wait for {one.wait_seconds:g} s" if is_wait else f"asked for {one.action}"
            detail = f"{one.client} {asked_for}, and got no answer in time"
            yield Violation(rule="wait", detail=detail, excerpt=[one])
        else:
            detail = f"{one.client} was overtaken {len(overtaking)} times by clients that came later"
            yield Violation(rule="wait", detail=detail, excerpt=[one, overtaking[0], overtaking[-1]])


def _check_releases(operations: Sequence[Operation]) -> Iterator[Violation]:
    released: dict[GrantKey, Operation] = {}
    for one in sorted(operations, key=lambda operation: operation.invoked):
        if one.outcome is not OperationOutcome.DONE:
            continue
        if one.action is Action.ACQUIRE:
            released.pop(one.grant, None)
        elif one.action is Action.RELEASE:
            released[one.grant] = one
        elif one.action in _CONFIRM and one.grant in released and released[one.grant].completed < one.invoked:
            detail = f"a {_CONFIRM[one.action]} of {one.client} confirmed slot {one.slot}, which it had released"
            yield Violation(rule="release", detail=detail, excerpt=[released[one.grant], one])
        elif one.action is Action.COUNT_HELD and one.number:
            detail = f"{one.number} slots are held although all clients have released theirs"
            yield Violation(rule="release", detail=detail, excerpt=[one])


def _changes(operations: Sequence[Operation]) -> list[Operation]:
    changes = [one for one in operations if one.action is Action.SET_SLOTS]
    return sorted(changes, key=lambda operation: operation.invoked)


def _grants(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    """Return the grants of each slot in the order of their completion."""
    grants: defaultdict[int, list[Operation]] = defaultdict(list)
    for one in sorted(operations, key=lambda operation: operation.completed):
        if one.action is Action.ACQUIRE and one.outcome is OperationOutcome.DONE:
            grants[one.slot].append(one)
    return grants


def _ends_holding(one: Operation) -> bool:
    """Return whether the client believes, from this operation on, that it does not hold the slot.

    This is also the case after a verify or a renewal without an answer.
    """
    return one.action is Action.RELEASE or (one.action in _CONFIRM and one.outcome is not OperationOutcome.DONE)


def _holdings(operations: Sequence[Operation], disturbed: Disturbances) -> dict[int, list[_Holding]]:
    """Return the holdings of each slot in the order of their starts."""
    endings: defaultdict[GrantKey, list[Operation]] = defaultdict(list)
    for one in sorted(operations, key=lambda operation: operation.invoked):
        if _ends_holding(one):
            endings[one.grant].append(one)
    holdings: defaultdict[int, list[_Holding]] = defaultdict(list)
    for slot, grants in _grants(operations).items():
        for grant in grants:
            after = (one for one in endings[grant.grant] if one.invoked >= grant.completed)
            ending: Operation | Disturbance | None = next(after, None)
            end = inf
            if isinstance(ending, Operation):
                end = ending.invoked if ending.action is Action.RELEASE else ending.completed
            kill = disturbed.kills.get(grant.client)
            if kill is not None and kill.at < end:
                end, ending = max(kill.at, grant.completed), kill
            holdings[slot].append(_Holding(grant, end, ending))
    return holdings


def _time(one: Operation | Disturbance) -> float:
    return one.at if isinstance(one, Disturbance) else one.invoked
