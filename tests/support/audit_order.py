"""The judge of order: a message with a key is handed out only after all earlier ones, unless in the same answer.

Pure. A message no longer blocks its key once a settlement of it was sent that may have taken effect, once its ttl is
over, or, if it is dead-lettered by its delivery count, once its last lease has ended. If the dead letters were not
read, each message counts as one that may have reached the delivery limit.
"""

from collections.abc import Iterator
from itertools import accumulate

from support.audit import LOST, Audit, History, Lease, Verb


def out_of_order(audit: Audit) -> Iterator[tuple[History, Lease]]:
    """Return each lease of a later message with the earlier one that blocked it."""
    worn_out = _worn_out(audit)
    for line in _lines(audit):
        free_at = [_free_at(audit, history, is_worn_out=history.message_id in worn_out) for history in line]
        latest = list(accumulate(free_at, max))
        for place, later in enumerate(line):
            for lease in later.leases:
                before = place - 1
                # A prefix is free when its latest message is: this avoids walking long keys from the beginning.
                while before >= 0 and latest[before] >= lease.answered:
                    if free_at[before] >= lease.answered and not _is_with(line[before], lease):
                        yield line[before], lease
                    before -= 1


def _worn_out(audit: Audit) -> set[str]:
    """Return the ids of messages that are, or may be, dead letters because they reached the delivery limit."""
    if audit.dead_letters is not None:
        worn_out = {letter.message_id for letter in audit.dead_letters if letter.cause == "max_deliveries"}
        return worn_out | audit.redriven.keys()
    if audit.max_deliveries is None:
        return set()
    unanswered = sum(pop.answered == float("inf") for pop in audit.pops)
    return {
        message_id
        for message_id, history in audit.histories.items()
        if len(history.leases) + unanswered >= audit.max_deliveries
    }


def _lines(audit: Audit) -> Iterator[list[History]]:
    lines: dict[str, list[tuple[int, History]]] = {}
    for history in audit.histories.values():
        publish = history.publish
        if publish is not None and publish.is_promised and publish.traits.ordering_key is not None:
            lines.setdefault(publish.traits.ordering_key, []).append((publish.number, history))
    for line in lines.values():
        yield [history for _, history in sorted(line, key=lambda numbered: numbered[0])]


def _free_at(audit: Audit, history: History, *, is_worn_out: bool) -> float:
    """Return the earliest time at which it may no longer block its key."""
    times = [float("inf")]
    if history.publish is not None:
        times.append(history.publish.is_kept_until)
        if audit.may_be_dropped(history.publish):
            times.append(history.publish.sent)
    for lease in history.leases:
        for settlement in lease.settlements:
            if settlement.verb in (Verb.ACK, Verb.REJECT) and settlement.status not in LOST:
                times.append(settlement.sent)
    if is_worn_out:
        times.append(max((_earliest_end(lease) for lease in history.leases), default=float("-inf")))
    return min(times)


def _earliest_end(lease: Lease) -> float:
    """Return the earliest time at which it may have ended."""
    released = [one.sent for one in lease.settlements if one.verb is Verb.RELEASE]
    return min([lease.ends_at, *released])


def _is_with(earlier: History, lease: Lease) -> bool:
    """Tell whether the same answer held both."""
    return any((one.client, one.answered) == (lease.client, lease.answered) for one in earlier.leases)
