"""The judge of `expired`: an ack or a rejection is refused only if the lease was taken over or settled. Pure.

A lease that ran out can still be settled until its message is handed out again. These reasons for a refusal are
accepted, with every doubt in popgate's favour:

- a later hand-out, whose pop was sent before the refusal arrived, answered or not: a pop without an answer may have
  been carried out up to `LATE_SECONDS` after it was sent, but not `HEALED_SECONDS` after all parts worked again;
- a settlement of the message that may have taken effect, except an extension, and for an ack except another ack;
- the end of its ttl, or of its last allowed delivery.

If proxies lease from each other (`are_hand_outs_hidden`), a fault may hide such a hand-out from every client. But a
hidden hand-out has a delivery count too: if the message is handed out again to a pop sent after the refusal, and its
delivery count has risen by only one, there was no hidden hand-out. The exception is a hidden hand-out that was taken
back, which uncounts it: a proxy takes one back if the store did not answer, in a span in which the two may have been
disconnected (`Audit.away`). Releases and extensions have more reasons (a drain, the maximum age of a lease) and are not
judged here; another rule judges refusals of certainly live leases.
"""

from collections.abc import Iterator

from support.audit import LOST, Audit, History, Lease, Settlement, Verb
from support.audit_spans import must_succeed

LATE_SECONDS = 45.0
"""Maximum seconds after which a sent request is still carried out; longer than any pause and time limit of a run."""
HEALED_SECONDS = 10.0
"""The same, counted from when all parts worked again, for a request sent before; longer than any pop waits."""
AWAY_SECONDS = 2.0
"""Maximum seconds between a hand-out and the failure for which it is taken back, and before the nemesis reports that
failure.
"""


class Takers:
    """The times at which a hand-out unknown to all clients may have taken a message."""

    def __init__(self, audit: Audit) -> None:
        self.max_deliveries = audit.max_deliveries
        self._away = audit.away
        self._healed_at = audit.healed_at
        self._times = [pop.sent for pop in audit.pops if pop.answered == float("inf")]
        if audit.are_hand_outs_hidden:
            self._times += [mark.at for mark in audit.marks]

    def may_have_taken(self, lease: Lease, refused: Settlement) -> bool:
        return any(at <= refused.answered and lease.sent <= self._latest(at) for at in self._times)

    def were_counted(self, lease: Lease, refused: Settlement) -> bool:
        """Tell whether every hand-out between the lease and its refusal permanently raised the delivery count."""
        since, until = lease.answered - AWAY_SECONDS, refused.answered + AWAY_SECONDS
        return not any(start <= until and since <= end for start, end in self._away)

    def _latest(self, at: float) -> float:
        return min(at + LATE_SECONDS, max(at, self._healed_at) + HEALED_SECONDS)


def refused_untaken(history: History, takers: Takers) -> Iterator[tuple[str, list[Lease]]]:
    for lease in history.leases:
        for refused in lease.settlements:
            is_judged = refused.status == "expired" and refused.verb in (Verb.ACK, Verb.REJECT)
            if is_judged and not must_succeed(lease, refused) and not _has_reason(history, lease, refused, takers):
                yield f"{refused.verb} was answered 'expired', and nothing has ended the lease for good", [lease]


def _has_reason(history: History, lease: Lease, refused: Settlement, takers: Takers) -> bool:
    publish, most = history.publish, takers.max_deliveries
    is_over = publish is None or publish.is_kept_until <= refused.answered
    is_worn_out = most is not None and lease.delivery_count >= most and lease.ends_at <= refused.answered
    taken = any(
        other.delivery_count > lease.delivery_count and other.sent <= refused.answered for other in history.leases
    )
    settled = any(_may_refuse(other, refused) for one in history.leases for other in one.settlements)
    if is_over or is_worn_out or taken or settled:
        return True
    is_next = any(other.delivery_count == lease.delivery_count + 1 for other in history.leases)
    return takers.may_have_taken(lease, refused) and not (is_next and takers.were_counted(lease, refused))


def _may_refuse(other: Settlement, refused: Settlement) -> bool:
    is_repeat = other.verb is Verb.ACK and refused.verb is Verb.ACK
    may_end = other.verb is not Verb.EXTEND and other.status not in LOST
    return other is not refused and may_end and not is_repeat and other.sent <= refused.answered
