"""The explorer finds mistakes: of the algorithm as it was published, and those planted into production's source."""

from dataclasses import replace

import pytest

from explorer.algorithms import changed, published
from explorer.broker import Choice
from explorer.cases import current, empty, size, stale
from explorer.group import Case, Label, Views
from explorer.verdict import judge
from popgate.domain.balance import Handover, QueueView, Waiting


def as_published(case: Case) -> Case:
    return replace(case, handover=Handover.SOLE, choice=Choice.LATE, algorithm=published)


def told(case: Case) -> str:
    return "\n".join(judge(case).complaints)


def held(active: str | None, others: str) -> QueueView:
    return QueueView(active, waiting=tuple(Waiting(one) for one in others if one != active))


# ---------------------------------------------------------------- as published


def test_as_published_it_comes_to_rest_in_balance_only() -> None:
    """The published algorithm is right in this respect."""
    assert "out of balance" not in told(as_published(replace(size(2, 3), joiners=1)))


def test_as_published_one_who_is_slow_to_subscribe_makes_another_release_for_ever() -> None:
    """Two queues, two members, current views. Each of the four actions happens repeatedly, except one member's
    subscription: that is so if members hang. Our algorithm comes to rest.
    """
    case = as_published(empty(size(2, 2)))
    by_action = judge(case, what=lambda label: label.what)
    assert by_action.fair_loops
    assert judge(case).fair_loops == 0, "nobody is slow for ever"
    hung = judge(replace(case, hangs=1))
    assert hung.fair_loops


def test_as_published_a_release_leaves_a_queue_without_anybody() -> None:
    assert "a step leaves a queue without a member" in told(as_published(empty(size(2, 2))))


def test_as_published_stale_views_keep_queues_moving_for_ever() -> None:
    """Views do not show a member's own actions immediately: on such views it releases again, and the other one
    releases back.
    """
    verdict = judge(as_published(replace(size(2, 2), views=Views.BLIND)))
    assert verdict.fair_loops


def test_as_published_queues_are_released_more_often_than_need_be() -> None:
    verdict = judge(as_published(size(3, 3)))
    assert verdict.loops == 0
    assert verdict.excess == 3
    assert "3 times, 3 at best, 2 would do" in "\n".join(verdict.complaints)


# ---------------------------------------------------------------- planted

PLANTED = [
    pytest.param(
        "rich = [member for member in members if counts[member] > share]",
        "rich = sorted((one for one in members if counts[one] > share), key=lambda one: (-counts[one], one))",
        replace(stale(size(5, 4)), handover=Handover.CLAIM, start=tuple(held(one, "abcd") for one in "bbbaa")),
        "would do",
        id="who has most may keep most: quotas change while a plan is half done",
    ),
    pytest.param(
        'if name not in moves and due[holders[name] or ""] < 0 and',
        "if name not in moves and",
        size(3, 3),
        "goes round for ever",
        id="whether one has too many is not looked at before each gift",
    ),
    pytest.param(
        "and next_in_line(waiting) == to",
        "",
        replace(current(size(4, 2)), handover=Handover.CLAIM),
        "a step leaves a queue without a member",
        id="a queue is let go before its receiver comes next",
    ),
    pytest.param(
        "if any(holders[name] not in counts and queues[name].waiting for name in names):",
        "if False:",
        replace(size(3, 3), choice=Choice.LATE, start=(held("a", "b"), held(None, "a"), held(None, "ba"))),
        "goes round for ever",
        id="nobody waits for what is between two",
    ),
    pytest.param(
        "return Step(Verb.YIELD, name) if is_moved and handover is Handover.SOLE else None",
        "return None",
        size(2, 3),
        "comes to rest out of balance",
        id="nobody steps aside",
    ),
    pytest.param(
        "(is_orphan or handover is Handover.SOLE)",
        "is_orphan",
        size(2, 3),
        "goes round for ever",
        id="who stepped aside comes back at once",
    ),
    pytest.param(
        "not is_overdue and",
        "",
        replace(empty(size(2, 2)), hangs=1),
        "comes to rest out of balance",
        id="one who hangs is waited for, for ever",
    ),
    pytest.param(
        "above = 1 + max(",
        "above = max(",
        replace(size(2, 3), handover=Handover.CLAIM),
        "goes round for ever",
        id="who claims asks for no more than the others have",
    ),
    pytest.param(
        "is_taken = handover is Handover.TAKE and",
        "is_taken = False and",
        replace(size(3, 2), handover=Handover.TAKE),
        "goes round as long as",
        id="what is being taken still counts for the other",
    ),
]


@pytest.mark.parametrize(("old", "new", "case", "found"), PLANTED)
def test_planted_mistakes_are_found(old: str, new: str, case: Case, found: str) -> None:
    assert found in told(replace(case, algorithm=changed(old, new)))
    assert told(case) == ""


def test_steps_say_who_did_what() -> None:
    """The output shows the way to a broken promise step by step."""
    way = judge(as_published(empty(size(2, 2)))).complaints[0].partition(": ")[2]
    assert way.startswith("subscribe a q1; activate RabbitMQ q1; subscribe a q2")
    assert Label("die", "a").befalls
