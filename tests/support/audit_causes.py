"""Why messages were handed out more than once: each repeated hand-out is attributed to a cause that popgate admits.

Pure. The causes are those of the guarantees: a lease that ended because it ran out or was released, and a request
without an answer. After an ack without an answer, the lease either is acked or still lasts, so such an ack alone is no
cause.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from support.audit import LOST, Audit, History, Lease, Settlement, Verb
from support.audit_spans import live_spans


class Cause(StrEnum):
    RAN_OUT = "lease ran out"
    RELEASED = "released"
    UNANSWERED = "a hand-out without an answer"


def causes(audit: Audit) -> Counter[Cause]:
    """Count the repeated hand-outs by cause."""
    return Counter(
        cause for history in audit.histories.values() for _, _, cause in _repeats(history) if cause is not None
    )


def uncaused(history: History) -> Iterator[tuple[Lease, Lease]]:
    """Return hand-outs that only a settlement without an answer could explain, each with the one before.

    If the one before was certainly live, the rule about live leases reports it.
    """
    for before, lease, cause in _repeats(history):
        if cause is None and before is not None and any(map(_is_unsure_end, before.settlements)):
            yield before, lease


def _repeats(history: History) -> Iterator[tuple[Lease | None, Lease, Cause | None]]:
    by_count = {lease.delivery_count: lease for lease in history.leases}
    for lease in history.leases:
        if lease.delivery_count > 1:
            before = by_count.get(lease.delivery_count - 1)
            # If no client received the previous hand-out, the rule on delivery counts decides which pop may have got
            # it.
            yield before, lease, Cause.UNANSWERED if before is None else _cause(before, lease)


def _cause(before: Lease, lease: Lease) -> Cause | None:
    if any(
        one.verb is Verb.RELEASE and one.status not in LOST and one.sent < lease.answered for one in before.settlements
    ):
        return Cause.RELEASED
    unended = replace(before, settlements=[one for one in before.settlements if not _is_unsure_end(one)])
    spans = live_spans(unended)
    return Cause.RAN_OUT if not spans or spans[-1].end <= lease.answered else None


def _is_unsure_end(settlement: Settlement) -> bool:
    return settlement.verb in (Verb.ACK, Verb.REJECT) and not settlement.status
