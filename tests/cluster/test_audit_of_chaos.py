"""What the audit must find if several proxies serve one group: order, dead letters, and causes of repeated
hand-outs.
"""

from collections.abc import Sequence

import pytest

from support.audit import Audit, DeadLetter, Lease, Mark, Settlement, Traits, Verb
from support.audit_causes import Cause, causes
from support.audit_rules import Kind, judge
from support.audit_spans import live_spans

MAX_DELIVERIES = 3
ACKED = Settlement(Verb.ACK, 3.0, 0.0, 3.1, "acked")
REJECTED = Settlement(Verb.REJECT, 3.0, 0.0, 3.1, "rejected")


def lease(
    message_id: str, sent: float, count: int, *settlements: Settlement, client: str = "c", seconds: float = 10.0
) -> Lease:
    receipt = f"receipt {message_id} {count}"
    return Lease(message_id, receipt, client, sent, sent + 0.1, seconds, count, list(settlements))


def audit_of(*leases: Lease, letters: Sequence[DeadLetter] | None = None) -> Audit:
    """Return an audit with the messages "a", "b" and "c" of one ordering key, published in that order."""
    audit = Audit()
    audit.began, audit.max_deliveries, audit.dead_letters = 0.0, MAX_DELIVERIES, letters
    for message_id in "abc":
        (publish,) = audit.publishing([(message_id, 10)], [Traits(ordering_key="k")])
        publish.sent, publish.answered, publish.status = 0.0, 0.1, "published"
    for one in leases:
        audit.histories[one.message_id].leases.append(one)
    return audit


def found(audit: Audit, message_id: str | None = None, *, drained: bool = False) -> list[Kind]:
    violations = judge(audit, drained=drained)
    return [one.kind for one in violations if message_id is None or one.message_id == message_id]


# ---------------------------------------------------------------- order


def test_a_later_message_of_a_key_must_not_come_while_an_earlier_one_is_leased() -> None:
    assert found(audit_of(lease("a", 1.0, 1), lease("b", 2.0, 1))) == [Kind.ORDER]
    assert found(audit_of(lease("a", 1.0, 1, ACKED), lease("c", 5.0, 1)), "c") == [Kind.ORDER], "b never came"


def test_a_later_message_may_come_once_the_earlier_ones_may_be_settled() -> None:
    unanswered = Settlement(Verb.ACK, 2.0)
    assert found(audit_of(lease("a", 1.0, 1, unanswered), lease("b", 2.0, 1, ACKED), lease("c", 4.0, 1))) == []
    refused = Settlement(Verb.ACK, 12.0, 0.0, 12.1, "expired")
    assert found(audit_of(lease("a", 1.0, 1, refused), lease("b", 20.0, 1)), "b") == [Kind.ORDER]


def test_messages_of_a_key_may_come_together_but_then_not_the_later_one_alone() -> None:
    together = [lease("a", 1.0, 1, seconds=1.0), lease("b", 1.0, 1, seconds=1.0)]
    assert found(audit_of(*together)) == []
    assert found(audit_of(*together, lease("b", 5.0, 2))) == [Kind.ORDER]


# ---------------------------------------------------------------- dead letters


def test_what_was_rejected_is_a_dead_letter() -> None:
    rejected = lease("a", 1.0, 1, REJECTED)
    assert found(audit_of(rejected, letters=[]), "a", drained=True) == [Kind.DEAD]
    assert found(audit_of(rejected, letters=[DeadLetter("a", "1", "rejected", 1)]), "a", drained=True) == []


def test_a_rejection_without_an_answer_may_have_made_a_dead_letter() -> None:
    unsure = lease("a", 1.0, 1, Settlement(Verb.REJECT, 3.0))
    for letters in ([], [DeadLetter("a", "1", "rejected", 1)]):
        assert found(audit_of(unsure, letters=letters), "a", drained=True) == []


@pytest.mark.parametrize(
    ("letters", "settlement"),
    [
        ([DeadLetter("a", "1", "rejected", 1)], Settlement(Verb.RELEASE, 3.0, 0.0, 3.1, "released")),
        ([DeadLetter("a", "1", "max_deliveries", 1)], Settlement(Verb.RELEASE, 3.0, 0.0, 3.1, "released")),
        ([DeadLetter("a", "1", "whim", 3)], REJECTED),
        ([DeadLetter("a", "1", "rejected", 0)], REJECTED),
    ],
    ids=["unasked", "too early", "of no known cause", "of a wrong count"],
)
def test_a_wrong_dead_letter_is_found(letters: Sequence[DeadLetter], settlement: Settlement) -> None:
    assert Kind.DEAD in found(audit_of(lease("a", 1.0, 1, settlement), letters=letters), "a", drained=True)


def test_a_letter_that_nobody_published_is_found() -> None:
    assert found(audit_of(letters=[DeadLetter("x", "1", "rejected", 1)]), "x", drained=True) == [Kind.DEAD]


def test_a_message_moves_once_and_twice_only_where_a_fault_may_have_taken_the_confirm() -> None:
    rejected, letter = lease("a", 1.0, 1, REJECTED), DeadLetter("a", "1", "rejected", 1)
    audit = audit_of(rejected, letters=[letter, letter])
    assert found(audit, "a", drained=True) == [Kind.MOVES]
    audit.marks.append(Mark(3.05, "AMQP connections were cut"))
    assert found(audit, "a", drained=True) == []
    audit.dead_letters = [letter, letter._replace(letter_id="2")]
    assert found(audit, "a", drained=True) == [Kind.MOVES], "a repeated move has the same copy id"


def test_a_message_ends_in_one_way_only() -> None:
    letters = [DeadLetter("a", "1", "rejected", 1)]
    unasked_too = [Kind.FATE, Kind.DEAD]
    assert found(audit_of(lease("a", 1.0, 1, ACKED), letters=letters), "a", drained=True) == unasked_too


def test_who_was_handed_out_too_often_dies_and_is_neither_lost_nor_in_the_way() -> None:
    leases = [lease("a", 2.0 * count, count, seconds=1.0) for count in (1, 2, 3)]
    letters = [DeadLetter("a", "1", "max_deliveries", 3)]
    assert found(audit_of(*leases, letters=letters), "a", drained=True) == []
    assert found(audit_of(*leases, letters=[]), "a", drained=True) == [Kind.FATE]
    assert found(audit_of(*leases, lease("b", 8.0, 1), letters=letters), "b") == []
    assert found(audit_of(*leases, lease("b", 6.5, 1), letters=letters), "b") == [Kind.ORDER], "its last lease lived"


# ---------------------------------------------------------------- why messages came again


def test_a_lease_whose_ack_has_no_answer_is_acked_or_lasts() -> None:
    unsure = lease("a", 1.0, 1, Settlement(Verb.ACK, 2.0))
    assert found(audit_of(unsure, lease("a", 5.0, 2))) == [Kind.CAUSE]
    assert found(audit_of(unsure, lease("a", 11.5, 2))) == []


def test_each_time_that_a_message_came_again_has_a_cause() -> None:
    released = lease("a", 1.0, 1, Settlement(Verb.RELEASE, 2.0, 0.0, 2.1, "released"))
    ran_out = lease("a", 3.0, 2, seconds=1.0)
    audit = audit_of(released, ran_out, lease("a", 6.0, 3), lease("b", 7.0, 2))
    assert causes(audit) == {Cause.RELEASED: 1, Cause.RAN_OUT: 1, Cause.UNANSWERED: 1}


def test_an_extension_without_an_answer_may_take_effect_after_later_ones() -> None:
    short, long = Settlement(Verb.EXTEND, 2.0, 2.0), Settlement(Verb.EXTEND, 3.0, 20.0, 3.5, "extended")
    spans = live_spans(lease("a", 1.0, 1, short, long))
    assert [(span.start, round(span.end, 1)) for span in spans] == [(1.1, 4.0), (3.5, 5.0)]
