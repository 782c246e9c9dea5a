"""The judge of repeats: a repeated pop gets the same receipt handles, and a repeated publish makes one message. Pure.

A request without an answer may have been carried out or not, so only answers are compared. A repeated pop must return
the live leases: those that have not ended `CLOCK_ERROR_SECONDS` before the answer and for which no settlement was sent
by then. Two copies of a published message show as two hand-outs with the same delivery count. A repeated publish is
answered `published` again, for the same copy, if a fault kept the first answer from the store.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from support.audit import Audit, History, Lease, Pop
from support.audit_spans import CLOCK_ERROR_SECONDS


def unlike_repeats(audit: Audit) -> Iterator[tuple[str, str, Sequence[Lease]]]:
    """Return message, description and leases for each attempt whose repeat was given other leases than before."""
    attempts: dict[str, list[Pop]] = {}
    for pop in audit.pops:
        if pop.attempt_id is not None and pop.answered < float("inf"):
            attempts.setdefault(pop.attempt_id, []).append(pop)
    for pops in attempts.values():
        known: list[Lease] = []
        for pop in sorted(pops, key=lambda one: one.answered):
            yield from _unlike(known, pop)
            known += [lease for lease in pop.leases if lease not in known]


def _unlike(known: Sequence[Lease], pop: Pop) -> Iterator[tuple[str, str, Sequence[Lease]]]:
    alive = [lease for lease in known if _lives(lease, pop.answered)]
    for lease in alive:
        if lease not in pop.leases:
            yield lease.message_id, "was not given again to its own attempt", [lease]
    if alive and len(alive) == len(known):
        for lease in pop.leases:
            if lease not in known:
                what = "was given to an attempt beyond what it had been given before"
                yield lease.message_id, what, [*alive, lease]


def _lives(lease: Lease, at: float) -> bool:
    return at < lease.ends_at - CLOCK_ERROR_SECONDS and all(one.sent >= at for one in lease.settlements)


def published_twice(audit: Audit, history: History) -> Iterator[tuple[str, Sequence[Lease]]]:
    """Return the evidence of two messages with one dedup_id."""
    publish = history.publish
    if publish is None or publish.traits.dedup_id is None:
        return
    may_be_pending = any(publish.sent <= mark.at <= publish.answered for mark in audit.marks)
    if publish.published_answers > 1 and not may_be_pending:
        yield f"was answered 'published' {publish.published_answers} times", []
    for first, second in combinations(history.leases, 2):
        if first.delivery_count == second.delivery_count:
            yield f"two of it were handed out, each for the {first.delivery_count}. time", [first, second]
