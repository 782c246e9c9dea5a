"""The time spans in which a lease is certainly live, allowing for unknown times inside requests. Pure.

A span lasts from the pop's answer until `seconds` after the pop was sent, or until the first settlement was sent that
may have taken effect. An extension that was answered starts a new span. Clocks of processes differ by up to
`CLOCK_ERROR_SECONDS`.
"""

from dataclasses import replace
from typing import NamedTuple

from support.audit import DONE, LOST, Lease, Settlement, Verb

CLOCK_ERROR_SECONDS = 0.02


class Span(NamedTuple):
    start: float
    end: float


def live_spans(lease: Lease, *, but: Verb | None = None) -> list[Span]:
    """Return the spans in which the lease is certainly live. Settlements of the kind `but` are ignored."""
    spans: list[Span] = []
    start, end = lease.answered, lease.ends_at
    shortest = float("inf")
    for settlement in lease.settlements:
        if settlement.status in LOST or settlement.verb is but:
            continue
        if settlement.verb is not Verb.EXTEND:
            end = min(end, settlement.sent)
            break
        earliest_end = settlement.sent + min(settlement.seconds, shortest)
        if settlement.status == DONE[Verb.EXTEND]:
            spans.append(Span(start, min(end, earliest_end)))
            start, end = settlement.answered, earliest_end
        else:
            shortest = min(shortest, settlement.seconds)  # it may take effect at any later time, even after others
            end = min(end, earliest_end)
    spans.append(Span(start, end))
    return [Span(start, end - CLOCK_ERROR_SECONDS) for start, end in spans if start < end - CLOCK_ERROR_SECONDS]


def must_succeed(lease: Lease, settlement: Settlement) -> bool:
    """Tell whether the lease was certainly live from the request until its answer.

    A repeated ack of a lease that was live when the first ack was sent finds it either live or already acked by that
    ack.
    """
    earlier = lease.settlements[: lease.settlements.index(settlement)]
    overlooked = Verb.ACK if settlement.verb is Verb.ACK else None
    if overlooked is None and any(one.verb is not Verb.EXTEND and one.status not in LOST for one in earlier):
        return False
    spans = live_spans(replace(lease, settlements=earlier), but=overlooked)
    return any(span.start <= settlement.sent and settlement.answered <= span.end for span in spans)
