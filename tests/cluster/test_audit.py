"""Tests of the audit itself: it must find every kind of broken promise, and none if popgate may have kept it."""

import pytest

from support.audit import Audit, DeadLetter, Delivered, Lease, Pop, Settlement, Traits, Verb
from support.audit_rules import Kind, judge
from support.audit_spans import live_spans

ACKED = Settlement(Verb.ACK, 3.0, 0.0, 3.1, "acked")


def lease(sent: float, answered: float, count: int, *settlements: Settlement, seconds: float = 10.0) -> Lease:
    return Lease("m", f"receipt {count} {sent}", "c", sent, answered, seconds, count, list(settlements))


def audit_of(*leases: Lease, status: str = "published") -> Audit:
    audit = Audit()
    audit.began = 0.0
    (publish,) = audit.publishing([("m", 10)])
    publish.sent, publish.answered, publish.status = 0.0, 0.1, status
    audit.histories["m"].leases.extend(leases)
    return audit


def kinds(*leases: Lease, drained: bool = False, status: str = "published") -> set[Kind]:
    return {violation.kind for violation in judge(audit_of(*leases, status=status), drained=drained)}


def test_a_message_that_is_settled_once_breaks_nothing() -> None:
    expired = lease(1.0, 1.1, 1, seconds=1.0)
    assert kinds(expired, lease(2.5, 2.6, 2, ACKED), drained=True) == set()


def test_a_published_message_that_nobody_settled_is_lost_once_all_is_drained() -> None:
    assert kinds(lease(1.0, 1.1, 1, seconds=1.0), drained=True) == {Kind.FATE}
    assert kinds(lease(1.0, 1.1, 1, seconds=1.0), drained=False) == set()
    assert kinds(drained=True) == {Kind.FATE}


def test_a_message_whose_publish_got_no_answer_may_be_absent() -> None:
    assert kinds(drained=True, status="") == set()
    assert kinds(drained=True, status="failed") == set()


def test_who_asks_after_a_messages_ttl_does_not_get_it_and_it_is_not_lost() -> None:
    def found(*leases: Lease, drained: bool = False) -> set[Kind]:
        audit = audit_of(*leases)
        publish = audit.histories["m"].publish
        assert publish is not None
        publish.traits = Traits(delay_seconds=1.0, ttl_seconds=2.0)
        for one in leases:
            audit.pops.add(Pop(one.client, one.sent, one.seconds, None, one.sent, one.answered))
        return {violation.kind for violation in judge(audit, drained=drained)}

    assert found(lease(3.0, 3.3, 1), drained=True) == set(), "it may be gone since 3.0"
    assert found(lease(2.9, 3.0, 1), drained=True) == {Kind.FATE}, "as far as anybody asked it was not over"
    assert found(lease(3.2, 3.3, 1)) == {Kind.EXPIRED}


def test_an_ack_without_an_answer_may_have_taken_effect() -> None:
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.ACK, 2.0)), drained=True) == set()
    refused = Settlement(Verb.ACK, 13.0, 0.0, 13.1, "expired")
    assert kinds(lease(1.0, 1.1, 1, refused), drained=True) == {Kind.FATE, Kind.TAKEN}


def test_an_acked_message_must_not_come_again() -> None:
    assert kinds(lease(1.0, 1.1, 1, ACKED), lease(4.0, 4.1, 2)) == {Kind.CAME_AGAIN}


def test_a_rejected_message_must_not_come_again() -> None:
    rejected = Settlement(Verb.REJECT, 3.0, 0.0, 3.1, "rejected")
    assert kinds(lease(1.0, 1.1, 1, rejected), lease(4.0, 4.1, 2)) == {Kind.CAME_AGAIN}


def test_an_ack_that_succeeds_after_somebody_else_got_the_message_is_false() -> None:
    late = Settlement(Verb.ACK, 5.0, 0.0, 5.1, "acked")
    assert kinds(lease(1.0, 1.1, 1, late, seconds=1.0), lease(3.0, 3.1, 2)) == {Kind.CAME_AGAIN}


def test_two_leases_can_not_both_be_acked() -> None:
    first = lease(1.0, 1.5, 1, Settlement(Verb.ACK, 3.0, 0.0, 3.1, "acked"), seconds=0.1)
    second = lease(1.4, 1.6, 2, Settlement(Verb.ACK, 3.0, 0.0, 3.1, "acked"))
    assert kinds(first, second) == {Kind.FALSE_SUCCESS}


@pytest.mark.parametrize(("sent", "answered"), [(5.0, 5.1), (10.5, 10.9)])
def test_a_second_lease_must_not_begin_before_the_first_one_ends(sent: float, answered: float) -> None:
    assert kinds(lease(1.0, 1.1, 1), lease(sent, answered, 2)) == {Kind.OVERLAP}


def test_a_second_lease_may_begin_when_the_first_one_may_have_ended() -> None:
    assert kinds(lease(1.0, 1.1, 1), lease(10.5, 11.0, 2)) == set()
    released = Settlement(Verb.RELEASE, 3.0)
    assert kinds(lease(1.0, 1.1, 1, released), lease(3.0, 3.1, 2)) == set()


def test_an_extension_that_was_answered_lengthens_a_lease_and_one_that_was_not_may_have_shortened_it() -> None:
    extended = Settlement(Verb.EXTEND, 9.0, 10.0, 9.1, "extended")
    assert kinds(lease(1.0, 1.1, 1, extended), lease(15.0, 15.1, 2)) == {Kind.OVERLAP}
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.EXTEND, 2.0, 1.0)), lease(4.0, 4.1, 2)) == set()
    revived = lease(1.0, 1.1, 1, Settlement(Verb.EXTEND, 20.0, 10.0, 20.1, "extended"))
    assert [(span.start, round(span.end, 1)) for span in live_spans(revived)] == [(1.1, 11.0), (20.1, 30.0)]


def test_a_delayed_release_keeps_its_delay() -> None:
    released = Settlement(Verb.RELEASE, 2.0, 5.0, 2.1, "released")
    assert kinds(lease(1.0, 1.1, 1, released), lease(3.0, 3.1, 2)) == {Kind.EARLY}
    assert kinds(lease(1.0, 1.1, 1, released), lease(3.0, 7.1, 2)) == set()
    again = Settlement(Verb.RELEASE, 6.0, 5.0, 6.1, "released")
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.RELEASE, 2.0, 5.0), again), lease(7.0, 7.1, 2)) == set()


def test_delivery_counts_grow() -> None:
    assert kinds(lease(1.0, 1.1, 2, seconds=1.0), lease(3.0, 3.1, 1)) == {Kind.COUNT}
    assert kinds(lease(1.0, 1.1, 1, seconds=1.0), lease(3.0, 3.1, 1)) == {Kind.COUNT}
    assert kinds(lease(1.0, 1.1, 1, seconds=1.0), lease(3.0, 3.1, 3)) == {Kind.COUNT}


def test_a_pop_without_an_answer_may_have_counted() -> None:
    audit = audit_of(lease(1.0, 1.1, 1, seconds=1.0), lease(3.0, 3.1, 3))
    audit.popping("c", 1.0).sent = 2.0
    assert judge(audit, drained=False) == []


@pytest.mark.parametrize("verb", [Verb.ACK, Verb.RELEASE, Verb.EXTEND, Verb.REJECT])
def test_a_live_lease_must_not_be_refused(verb: Verb) -> None:
    refused = Settlement(verb, 3.0, 5.0, 3.1, "expired")
    assert kinds(lease(1.0, 1.1, 1, refused)) == {Kind.REFUSED}
    assert Kind.REFUSED not in kinds(lease(1.0, 1.1, 1, refused, seconds=2.05))


def test_a_repeated_ack_of_a_live_lease_must_not_be_refused() -> None:
    again = Settlement(Verb.ACK, 4.0, 0.0, 4.1, "expired")
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.ACK, 3.0), again)) == {Kind.REFUSED}
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.RELEASE, 3.0), again)) == set()


def test_the_first_ack_is_never_already_acked() -> None:
    already = Settlement(Verb.ACK, 3.0, 0.0, 3.1, "already_acked")
    assert kinds(lease(1.0, 1.1, 1, already)) == {Kind.FALSE_SUCCESS}
    assert kinds(lease(1.0, 1.1, 1, Settlement(Verb.ACK, 2.0), already)) == set()


def test_what_nobody_published_and_what_was_changed_is_noted() -> None:
    audit = Audit()
    audit.published(audit.publishing([("known", 5)]), ["published"])
    pop = audit.popping("c", 10.0)
    audit.popped(pop, [Delivered("unknown", "r1", 1, 5), Delivered("known", "r2", 1, -1)])
    found = judge(audit, drained=False)
    assert [violation.message_id for violation in found] == ["unknown", "known"]
    assert {violation.kind for violation in found} == {Kind.COMPLAINT}


def test_a_receipt_handle_is_given_twice_only_to_the_same_attempt() -> None:
    audit = Audit()
    audit.published(audit.publishing([("m", 5)]), ["published"])
    message = Delivered("m", "r", 1, 5)
    audit.popped(audit.popping("c", 10.0, attempt_id="a"), [message])
    audit.popped(audit.popping("c", 10.0, attempt_id="a"), [message])
    assert judge(audit, drained=False) == []
    audit.popped(audit.popping("c", 10.0), [message])
    assert [violation.kind for violation in judge(audit, drained=False)] == [Kind.COMPLAINT]


def test_a_repeated_attempt_is_given_the_same_leases_and_nothing_else() -> None:
    audit = Audit()
    audit.published(audit.publishing([("a", 5), ("b", 5)]), ["published", "published"])
    first, second = Delivered("a", "r1", 1, 5), Delivered("b", "r2", 1, 5)
    for _ in range(2):
        audit.popped(audit.popping("c", 10.0, attempt_id="one"), [first])
    assert judge(audit, drained=False) == []
    audit.popped(audit.popping("c", 10.0, attempt_id="one"), [second])
    found = judge(audit, drained=False)
    assert [(violation.kind, violation.message_id, violation.what) for violation in found] == [
        (Kind.ATTEMPT, "a", "was not given again to its own attempt"),
        (Kind.ATTEMPT, "b", "was given to an attempt beyond what it had been given before"),
    ]


def test_a_repeated_attempt_is_not_given_again_what_was_settled() -> None:
    audit = Audit()
    audit.published(audit.publishing([("a", 5), ("b", 5)]), ["published", "published"])
    (given,) = audit.popped(audit.popping("c", 10.0, attempt_id="one"), [Delivered("a", "r1", 1, 5)])
    given.begin(Verb.ACK)
    audit.popped(audit.popping("c", 10.0, attempt_id="one"), [Delivered("b", "r2", 1, 5)])
    assert judge(audit, drained=False) == []


def test_who_was_handed_out_too_often_is_in_nobodys_way_where_nobody_knows_the_dead_letters() -> None:
    def found(letters: list[DeadLetter] | None, max_deliveries: int | None, came_again: float = 2.0) -> set[Kind]:
        audit = Audit()
        audit.began, audit.dead_letters, audit.max_deliveries = 0.0, letters, max_deliveries
        for publish in audit.publishing([("first", 10), ("later", 10)], [Traits(ordering_key="k")] * 2):
            publish.sent, publish.answered, publish.status = 0.0, 0.1, "published"
        for name, sent, count in (("first", 1.0, 1), ("later", 5.0, 1), ("first", came_again, 2)):
            taken = Lease(name, f"{name} {count}", "c", sent, sent + 0.1, 1.0, count)
            audit.histories[name].leases.append(taken)
        return {violation.kind for violation in judge(audit, drained=False)}

    assert found(None, 2) == set()
    assert found(None, 2, came_again=8.0) == {Kind.ORDER}, "it was none, for it was handed out later"
    assert found(None, None) == {Kind.ORDER}
    assert found([], 2) == {Kind.ORDER}


def test_a_violation_shows_only_what_concerns_it() -> None:
    audit = audit_of(lease(1.0, 1.1, 1, seconds=1.0), lease(3.0, 3.1, 2), lease(5.0, 5.1, 3))
    audit.mark("killed")
    audit.marks[0] = audit.marks[0]._replace(at=4.0)
    (violation,) = judge(audit, drained=False)
    assert str(violation).splitlines() == [
        "two live leases at once: m for 7.880 s at least",
        "        0.000 -    0.100  publish: published",
        "        3.000 -    3.100  pop by c: lease ...eceipt 2 3.0, delivery 2, live at least until 13.000",
        "        4.000            *** killed",
        "        5.000 -    5.100  pop by c: lease ...eceipt 3 5.0, delivery 3, live at least until 15.000",
    ]


def test_figures_count_what_was_answered() -> None:
    audit = Audit()
    audit.published(audit.publishing([("a", 1), ("b", 1)]), ["published", "failed"])
    (popped,) = audit.popped(audit.popping("c", 10.0), [Delivered("a", "r", 1, 1)])
    assert audit.outstanding() == ["a"]
    audit.settled(popped, popped.begin(Verb.ACK), "acked")
    audit.popping("c", 10.0)
    figures = audit.figures()
    assert (figures["published"], figures["acked"], figures["pops unanswered"]) == (1, 1, 1)
    assert audit.open_count == 0
    assert audit.outstanding() == []
    assert judge(audit, drained=True) == []
