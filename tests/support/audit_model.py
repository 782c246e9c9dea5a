"""The judge of `GET S`: its counts must follow from the answers that clients received. Pure.

The model is a range for each count, because some outcomes are open: a publish, an ack or a rejection without an answer
may have taken effect or not, and a pop without an answer may have leased any message for its seconds. Counts are read
while no client is active, and read again until they fit (`audit_rest`), so a change that popgate has yet to notice is
no error.

A message whose ttl is over may be counted until a proxy meets it. One with a dedup_id whose publish was answered late
may be stored twice at the broker; only the broker sees both copies.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from support.audit import DONE, SETTLED, Audit, History, Lease, Pop, Seen, Verb
from support.audit_spans import live_spans

SLACK_SECONDS = 2.0
"""Maximum seconds after which the end of a lease must show in the counts."""


class Range(NamedTuple):
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


def wrong_counts(audit: Audit) -> Iterator[str]:
    """Return what is wrong with the recorded counts."""
    for seen in audit.seen:
        yield from unlike_model(audit, seen)


def unlike_model(audit: Audit, seen: Seen) -> Iterator[str]:
    """Return what is wrong with the counts of one answer. The dead letters are those listed together with it."""
    dead = {letter.message_id for letter in seen.letters} | audit.redriven.keys()
    waiting = in_flight = Range(0, 0)
    for history in map(partial(_until, seen.answered), audit.histories.values()):
        ended = history.message_id in dead or _is_settled(history, seen)
        one = _waiting(history, seen, ended=ended)
        is_excused = history.publish is not None and audit.may_be_dropped(history.publish)
        waiting = _sum(waiting, one._replace(least=0) if is_excused else one)
        in_flight = _sum(in_flight, Range(0, 0) if ended else _in_flight(history, seen))
    if any(pop.answered == float("inf") and _may_last(audit, pop, seen) for pop in audit.pops):
        in_flight = Range(in_flight.least, waiting.most)
    told = {
        "ready, in flight or delayed": (seen.ready + seen.in_flight + seen.delayed, waiting),
        "in flight": (seen.in_flight, in_flight),
        "dead": (seen.dead, Range(len(seen.letters), len(seen.letters))),
    }
    for what, (count, expected) in told.items():
        if not expected.least <= count <= expected.most:
            yield f"{count} messages were counted as {what}, but there are {expected}"


def _until(at: float, history: History) -> History:
    """Return the requests sent before that time."""
    leases = [
        replace(lease, settlements=[one for one in lease.settlements if one.sent < at])
        for lease in history.leases
        if lease.sent < at
    ]
    return replace(history, leases=leases)


def _sum(one: Range, other: Range) -> Range:
    return Range(one.least + other.least, one.most + other.most)


def _waiting(history: History, seen: Seen, *, ended: bool) -> Range:
    """Count the message if it is neither settled nor dead nor expired, and its second copy, which may outlive it."""
    publish = history.publish
    if publish is None or publish.sent >= seen.answered:
        return Range(0, 0)
    may_be_doubled = publish.traits.dedup_id is not None and (publish.requests > 1 or not publish.status)
    if ended:
        return Range(0, int(may_be_doubled))
    is_stored = publish.is_promised and publish.answered <= seen.sent
    is_kept = publish.is_kept_until > seen.answered and not any(lease.may_be_settled for lease in history.leases)
    return Range(int(is_stored and is_kept), 1 + may_be_doubled)


def _in_flight(history: History, seen: Seen) -> Range:
    spans = [span for lease in history.leases for span in live_spans(lease)]
    is_live = any(span.start <= seen.sent and seen.answered <= span.end for span in spans)
    return Range(int(is_live), int(any(_latest_end(lease) > seen.sent for lease in history.leases)))


def _may_last(audit: Audit, pop: Pop, seen: Seen) -> bool:
    """Tell whether a lease of a pop without an answer may be live; a late pop is carried out by the time all parts
    work again.
    """
    began = seen.sent if audit.healed_at > seen.sent else max(pop.sent, audit.healed_at)
    return began + pop.seconds + SLACK_SECONDS > seen.sent


def _latest_end(lease: Lease) -> float:
    released = [one.answered for one in lease.settlements if one.status == DONE[Verb.RELEASE]]
    ends = [lease.answered + lease.seconds]
    ends += [one.answered + one.seconds for one in lease.settlements if one.verb is Verb.EXTEND]
    return min([max(ends), *released]) + SLACK_SECONDS


def _is_settled(history: History, seen: Seen) -> bool:
    settlements = [one for lease in history.leases for one in lease.settlements]
    return any(one.status in SETTLED and one.answered <= seen.sent for one in settlements)
