"""What the audit must find apart from the life of one lease: refusals, repeats, counts, and the duration of a drain."""

from collections.abc import Sequence

import pytest

from support.audit import Audit, DeadLetter, Delivered, Lease, Mark, Pop, Seen, Settlement, Traits, Verb
from support.audit_redrives import RedrivenAudit
from support.audit_rules import Kind, judge
from support.audit_taken import LATE_SECONDS

REFUSED = Settlement(Verb.ACK, 5.0, 0.0, 5.1, "expired")
LONG_AGO = -LATE_SECONDS


def lease(sent: float, count: int, *settlements: Settlement, seconds: float = 1.0) -> Lease:
    return Lease("m", f"receipt {count} {sent}", "c", sent, sent + 0.1, seconds, count, list(settlements))


def audit_of(*leases: Lease, traits: Traits | None = None) -> Audit:
    audit = Audit()
    audit.began = 0.0
    (publish,) = audit.publishing([("m", 10)], None if traits is None else [traits])
    publish.sent, publish.answered, publish.status, publish.published_answers = 0.0, 0.1, "published", 1
    audit.histories["m"].leases.extend(leases)
    return audit


def found(audit: Audit) -> list[Kind]:
    return [violation.kind for violation in judge(audit, drained=False)]


def unanswered(sent: float) -> Pop:
    return Pop("c", sent, 1.0, None, sent)


# ---------------------------------------------------------------- expired


def test_a_lease_that_ran_out_is_refused_only_if_something_ended_it() -> None:
    assert found(audit_of(lease(1.0, 1, REFUSED))) == [Kind.TAKEN]
    assert found(audit_of(lease(1.0, 1, REFUSED), lease(4.0, 2))) == []
    assert found(audit_of(lease(1.0, 1, REFUSED), lease(6.0, 2))) == [Kind.TAKEN], "it was taken later"
    released = Settlement(Verb.RELEASE, 2.0)
    assert found(audit_of(lease(1.0, 1, released, REFUSED))) == []
    extended = Settlement(Verb.EXTEND, 1.5, 1.0, 1.6, "extended")
    assert found(audit_of(lease(1.0, 1, extended, REFUSED))) == [Kind.TAKEN]
    acked = Settlement(Verb.ACK, 4.0)
    assert found(audit_of(lease(1.0, 1, acked, REFUSED))) == [Kind.TAKEN], "a repeated ack is already_acked"


def test_a_lease_may_be_refused_where_a_request_without_an_answer_or_a_limit_may_have_ended_it() -> None:
    audit = audit_of(lease(1.0, 1, REFUSED))
    for sent, expected in ((LONG_AGO, [Kind.TAKEN]), (3.0, []), (6.0, [Kind.TAKEN])):
        audit.pops = {unanswered(sent)}
        assert found(audit) == expected
    assert found(audit_of(lease(1.0, 1, REFUSED), traits=Traits(ttl_seconds=4.0))) == []
    audit = audit_of(lease(1.0, 3, REFUSED))
    audit.pops = {unanswered(LONG_AGO - 1), unanswered(LONG_AGO - 2)}
    assert found(audit) == [Kind.TAKEN]
    audit.max_deliveries = 3
    assert found(audit) == []


def test_a_refusal_is_judged_by_the_delivery_count_where_a_fault_may_hide_hand_outs() -> None:
    def refused(next_count: int, *, sent: float = 6.0, away: Sequence[tuple[float, float]] = ()) -> list[Kind]:
        audit = audit_of(lease(1.0, 1, REFUSED), lease(sent, next_count))
        audit.pops = {unanswered(5.05) for _ in range(next_count)}
        audit.are_hand_outs_hidden = True
        audit.marks = [Mark(3.0, "killed proxy-1")]
        audit.away = [*away]
        return found(audit)

    assert refused(2) == [Kind.TAKEN], "no hidden one was counted"
    assert refused(3) == [], "the second one is hidden"
    assert refused(2, sent=4.0) == []
    assert refused(2, away=[(4.0, 4.5)]) == [], "a hidden one may have been taken back"
    assert refused(2, away=[(-9.0, -5.0), (9.0, 12.0)]) == [Kind.TAKEN]


# ---------------------------------------------------------------- redrives


def dead_or_redriven(*settlements: Settlement, dead: bool = False, redriven: Sequence[int] = ()) -> list[Kind]:
    """Return the findings on a message that was leased once, perhaps died, and was handed out elsewhere with these
    counts.
    """
    audit = audit_of(lease(1.0, 1, *settlements))
    audit.pops = {unanswered(60.0)}
    audit.dead_letters = [DeadLetter("m", "letter", "rejected", 1)] if dead else []
    elsewhere = RedrivenAudit(audit)
    pop = elsewhere.popping("c", 30.0)
    elsewhere.popped(pop, [Delivered("m", f"receipt {place}", count, 10) for place, count in enumerate(redriven)])
    return sorted({violation.kind for violation in (*judge(audit, drained=True), *judge(elsewhere, drained=True))})


REJECTED = Settlement(Verb.REJECT, 1.2, 0.0, 1.3, "rejected")


def test_a_dead_letter_is_there_or_was_redriven_once() -> None:
    assert dead_or_redriven(REJECTED, dead=True) == []
    assert dead_or_redriven(REJECTED, redriven=[1]) == []
    assert dead_or_redriven(Settlement(Verb.REJECT, 1.2), redriven=[1]) == []
    assert dead_or_redriven(REJECTED) == [Kind.DEAD], "it is gone"
    assert dead_or_redriven(REJECTED, dead=True, redriven=[1]) == [Kind.MOVES]
    assert Kind.MOVES in dead_or_redriven(REJECTED, redriven=[1, 1])
    assert dead_or_redriven(Settlement(Verb.ACK, 1.2, 0.0, 1.3, "acked"), redriven=[1]) == [Kind.FATE]


def test_only_what_was_published_somewhere_is_redriven() -> None:
    audit = audit_of()
    elsewhere = RedrivenAudit(audit)
    elsewhere.popped(elsewhere.popping("c", 30.0), [Delivered("unknown", "receipt", 1, 10)])
    assert Kind.COMPLAINT in found(elsewhere)


# ---------------------------------------------------------------- a broker that drops messages


def lost(*dropping: tuple[float, float], traits: Traits | None = None) -> list[Kind]:
    """Return the findings on a message that was published at 0 and is gone, if the broker dropped messages for that
    long.
    """
    audit = audit_of(traits=traits)
    for since, until in dropping:
        audit.may_drop(since, until)
    return [violation.kind for violation in judge(audit, drained=True)]


def test_only_what_came_while_the_broker_dropped_messages_may_be_gone() -> None:
    assert lost() == [Kind.FATE]
    assert lost((0.05, 5.0)) == []
    assert lost((-5.0, 0.05)) == []
    assert lost((-5.0, -1.0), (1.0, 5.0)) == [Kind.FATE]
    assert lost((10.0, 11.0), traits=Traits(delay_seconds=3.0)) == [], "it may have been stuck on its way"
    assert lost((1.0, 2.0), traits=Traits(delay_seconds=3.0)) == [Kind.FATE]


def test_what_may_have_been_dropped_is_in_nobodys_way_and_may_be_counted_or_not() -> None:
    audit = audit_of(lease(5.0, 1))
    (earlier,) = audit.publishing([("earlier", 10)], [Traits(ordering_key="k")])
    earlier.sent, earlier.answered, earlier.status, earlier.number = 0.0, 0.1, "published", -1
    own = audit.histories["m"].publish
    assert own is not None
    own.traits = Traits(ordering_key="k")
    assert found(audit) == [Kind.ORDER]
    audit.may_drop(0.05, 0.2)
    assert found(audit) == []
    assert counted(audit_of(), 0, 0, 0, 0) == [Kind.STATE]
    audit = audit_of()
    audit.may_drop(0.05, 0.2)
    assert counted(audit, 0, 0, 0, 0) == []


# ---------------------------------------------------------------- repeated publishes


def test_a_dedup_id_makes_one_message() -> None:
    once = Traits(dedup_id="d")
    assert found(audit_of(lease(1.0, 1), lease(4.0, 2), traits=once)) == []
    audit = audit_of(traits=once)
    publish = audit.histories["m"].publish
    assert publish is not None
    audit.publish_answered([publish], ["duplicate"])
    assert found(audit) == []
    audit.publish_answered([publish], ["published"])
    assert found(audit) == [Kind.DEDUP]
    audit.marks = [Mark(at, "cut the power of Redis") for at in (-1.0, 1.0)]
    assert found(audit) == [Kind.DEDUP]
    audit.marks.append(Mark(0.05, "cut the power of Redis"))
    assert found(audit) == [], "the store may not have heard of the first answer"
    assert Kind.DEDUP in found(audit_of(lease(1.0, 1), lease(4.0, 1), traits=once))


# ---------------------------------------------------------------- a drain


def test_everything_is_drained_within_the_stated_time() -> None:
    audit = audit_of()
    audit.heal(60.0)
    assert found(audit) == [Kind.DRAIN], "it never was"
    audit.drained_at = audit.healed_at + 59.0
    assert found(audit) == []
    audit.drained_at = audit.healed_at + 61.0
    assert found(audit) == [Kind.DRAIN]


# ---------------------------------------------------------------- GET S


def counted(audit: Audit, ready: int, in_flight: int, delayed: int, dead: int, *, letters: int = 0) -> list[Kind]:
    listed = [DeadLetter("m", "1", "max_deliveries", 3)] * letters
    audit.seen = [Seen(5.0, 5.1, ready, in_flight, delayed, dead, listed)]
    return found(audit)


@pytest.mark.parametrize("counts", [(0, 0, 0), (2, 0, 0), (1, 1, 0), (0, 1, 0)])
def test_one_message_that_waits_is_counted_once(counts: tuple[int, int, int]) -> None:
    assert counted(audit_of(), 1, 0, 0, 0) == []
    assert counted(audit_of(), 0, 0, 1, 0) == []
    assert set(counted(audit_of(), *counts, 0)) == {Kind.STATE}


def test_a_live_lease_is_counted_as_in_flight() -> None:
    live = lease(1.0, 1, seconds=60.0)
    assert counted(audit_of(live), 0, 1, 0, 0) == []
    assert counted(audit_of(live), 1, 0, 0, 0) == [Kind.STATE]
    released_later = lease(1.0, 1, Settlement(Verb.RELEASE, 5.1, 0.0, 5.2, "released"), seconds=60.0)
    assert counted(audit_of(released_later), 1, 0, 0, 0) == [Kind.STATE]
    assert counted(audit_of(lease(1.0, 1)), 1, 0, 0, 0) == []


def test_what_is_settled_or_dead_is_not_counted_as_present() -> None:
    acked = lease(1.0, 1, Settlement(Verb.ACK, 2.0, 0.0, 2.1, "acked"), seconds=60.0)
    assert counted(audit_of(acked), 0, 0, 0, 0) == []
    assert counted(audit_of(acked), 1, 0, 0, 0) == [Kind.STATE]
    assert counted(audit_of(), 0, 0, 0, 1, letters=1) == []
    assert counted(audit_of(), 1, 0, 0, 1, letters=1) == [Kind.STATE]
    assert counted(audit_of(), 0, 0, 0, 2, letters=1) == [Kind.STATE]


def test_what_was_left_open_may_be_counted_or_not() -> None:
    unsure = lease(1.0, 1, Settlement(Verb.ACK, 2.0))
    for ready in (0, 1):
        assert counted(audit_of(unsure), ready, 0, 0, 0) == []
        assert counted(audit_of(traits=Traits(ttl_seconds=3.0)), ready, 0, 0, 0) == []
    audit = audit_of()
    audit.pops = {unanswered(4.5)}
    for ready in (0, 1):
        assert counted(audit, ready, 1 - ready, 0, 0) == []
