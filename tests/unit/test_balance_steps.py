"""What one member does for the plan, for each kind of handover; programs without a proxy do it by the same code."""

import filecmp
import inspect

import pytest

import popgate.domain.balance
import popgate_client.amqp.balance
from popgate.domain.balance import Handover, QueueView, Step, Verb, Waiting, decide, members_seen

ALL = list(Handover)


def steps(
    queue: QueueView, to: str | None, handover: Handover, *, me: str = "me", late: bool = False
) -> list[Step[str]]:
    moves = {} if to is None else {"q": to}
    return decide(me, {"q": queue}, moves, handover, overdue={"q"} if late else ())


def waits(*members: str | tuple[str, int]) -> tuple[Waiting, ...]:
    return tuple(Waiting(one) if isinstance(one, str) else Waiting(*one) for one in members)


def test_proxies_and_programs_on_bare_rabbitmq_run_one_source() -> None:
    """In the sources the second is a link. Two different files would decide differently."""
    one, other = (inspect.getfile(module) for module in (popgate.domain.balance, popgate_client.amqp.balance))
    assert one != other
    assert filecmp.cmp(one, other, shallow=False)


def test_who_is_on_the_view_takes_part() -> None:
    views = [QueueView("c", waiting=waits("b")), QueueView(None, waiting=waits("b", "d")), QueueView()]
    assert members_seen(views, "a") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("handover", ALL)
def test_everybody_stands_in_the_line_of_a_queue_that_stays(handover: Handover) -> None:
    assert steps(QueueView("a"), None, handover) == [Step(Verb.SUBSCRIBE, "q")]
    assert steps(QueueView(), None, handover) == [Step(Verb.SUBSCRIBE, "q")]
    assert steps(QueueView("a", waiting=waits("me")), None, handover) == []
    assert steps(QueueView("me", waiting=waits("a")), None, handover) == []


@pytest.mark.parametrize("handover", ALL)
def test_a_queue_without_anybody_is_left_to_its_receiver_for_a_while(handover: Handover) -> None:
    assert steps(QueueView(), "b", handover) == []
    assert steps(QueueView(), "b", handover, late=True) == [Step(Verb.SUBSCRIBE, "q")]
    assert steps(QueueView(), "me", handover) == [Step(Verb.SUBSCRIBE, "q")]


@pytest.mark.parametrize(
    ("handover", "by_the_receiver", "by_another"),
    [(Handover.TAKE, Step(Verb.SUBSCRIBE, "q", 4), [Step(Verb.SUBSCRIBE, "q")]),
     (Handover.CLAIM, Step(Verb.SUBSCRIBE, "q", 3), [Step(Verb.SUBSCRIBE, "q")]),
     (Handover.SOLE, Step(Verb.SUBSCRIBE, "q"), [])],
)  # fmt: skip
def test_the_receiver_comes_next(handover: Handover, by_the_receiver: Step[str], by_another: list[Step[str]]) -> None:
    queue = QueueView("a", 3, waits(("b", 2)))
    assert steps(queue, "me", handover) == [by_the_receiver]
    assert steps(queue, "c", handover) == by_another


def test_a_receiver_who_waits_goes_to_the_head_of_the_line_or_the_others_leave_it() -> None:
    queue = QueueView("a", waiting=waits("b", "me"))
    assert steps(queue, "me", Handover.TAKE) == [Step(Verb.CLAIM, "q", 1)]
    assert steps(queue, "me", Handover.CLAIM) == [Step(Verb.CLAIM, "q", 1)]
    assert steps(queue, "me", Handover.SOLE) == []
    assert [steps(queue, "me", handover, me="b") for handover in ALL] == [[], [], [Step(Verb.YIELD, "q")]]
    at_the_head = QueueView("a", waiting=waits("b", ("me", 1)))
    assert steps(at_the_head, "me", Handover.CLAIM) == []
    assert steps(QueueView("a", 7, waits("me")), "me", Handover.TAKE) == [Step(Verb.CLAIM, "q", 8)]


def test_a_queue_is_let_go_only_when_its_receiver_comes_next() -> None:
    release = [Step(Verb.RELEASE, "q")]
    nobody, someone, receiver = (
        QueueView("me"),
        QueueView("me", waiting=waits("b")),
        QueueView("me", waiting=waits("c")),
    )
    both, claimed = QueueView("me", waiting=waits("b", "c")), QueueView("me", waiting=waits("b", ("c", 1)))
    for handover in (Handover.CLAIM, Handover.SOLE):
        assert [steps(queue, "c", handover) for queue in (nobody, someone, both)] == [[], [], []]
        assert [steps(queue, "c", handover) for queue in (receiver, claimed)] == [release, release]
    assert [steps(queue, "c", Handover.TAKE) for queue in (nobody, someone, receiver)] == [[], [], []]
