"""The plan of queue ownership: balanced, with the fewest moves, and stable when half carried out."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.balance import Handover, QueueView, Waiting, holder, plan, quotas

Owners = Mapping[str, str | None]

MEMBERS = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True).map(sorted)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[str], dict[str, str | None]]:
    """Generate members and the owner of each queue; some queues have none."""
    members = draw(MEMBERS)
    owners = draw(st.lists(st.sampled_from([None, *members]), max_size=30))
    return members, {f"q{number:02}": owner for number, owner in enumerate(owners)}


def planned(members: Sequence[str], owners: Owners) -> dict[str, str]:
    return plan(members, {name: QueueView(owner) for name, owner in owners.items()})


def fewest_moves(members: Sequence[str], owners: Owners) -> int:
    """Return the fewest moves of owned queues: all above the share, except one queue for each of the remainder."""
    share, extra = divmod(len(owners), len(members))
    above = [count - share for count in counted(members, owners).values() if count > share]
    return sum(above) - min(extra, len(above))


def counted(members: Sequence[str], owners: Owners) -> Counter[str]:
    return Counter(dict.fromkeys(members, 0)) + Counter(owner for owner in owners.values() if owner is not None)


def is_balanced(members: Sequence[str], owners: Owners) -> bool:
    counts = counted(members, owners)
    each = [counts[member] for member in members]
    return None not in owners.values() and max(each) - min(each) <= 1


@given(views())
def test_a_plan_balances_with_the_fewest_moves(view: tuple[list[str], dict[str, str | None]]) -> None:
    members, owners = view
    moves = planned(members, owners)
    assert is_balanced(members, {**owners, **moves})
    assert sum(owners[name] is not None for name in moves) == fewest_moves(members, owners)
    assert all(owners[name] != to for name, to in moves.items())


@given(views(), st.randoms(use_true_random=False))
def test_a_plan_that_is_half_done_goes_on(view: tuple[list[str], dict[str, str | None]], chance: random.Random) -> None:
    """Owners release and others take, each at a different time: every new view gives the rest of the plan, and
    nothing else moves.
    """
    members, owners = view
    least = fewest_moves(members, owners)
    released: Counter[str] = Counter()
    while moves := planned(members, owners):
        name = chance.choice(sorted(moves))
        if owners[name] is None:
            owners[name] = moves[name]
        else:
            released[name] += 1
            owners[name] = None
    assert is_balanced(members, owners)
    assert released.total() == least
    assert not released or max(released.values()) == 1


@given(views(), st.randoms(use_true_random=False))
def test_stale_views_move_nothing_twice(view: tuple[list[str], dict[str, str | None]], chance: random.Random) -> None:
    """Each member acts on its own view, which may be old except for its own queues. Claims are conditional."""
    members, owners = view
    least = fewest_moves(members, owners)
    seen = {member: dict(owners) for member in members}
    releases = 0
    for _ in range(4_000):
        if is_balanced(members, owners):
            break
        me = chance.choice(members)
        if chance.random() < 0.3:
            seen[me] = dict(owners)
        for name, to in planned(members, seen[me]).items():
            if seen[me][name] == me and owners[name] == me:
                owners[name] = seen[me][name] = None
                releases += 1
            elif to == me and owners[name] is None:
                owners[name] = seen[me][name] = me
    assert is_balanced(members, owners)
    assert releases == least


@pytest.mark.parametrize("queue_count", [8, 100, 1_000])
@pytest.mark.parametrize("size", range(2, 11))
def test_a_join_and_a_leave_move_no_more_than_they_must(queue_count: int, size: int) -> None:
    members = [f"m{number:02}" for number in range(size)]
    owners: dict[str, str | None] = {f"q{number:04}": None for number in range(queue_count)}
    owners.update(planned(members, owners))
    assert is_balanced(members, owners)
    joined = sorted([*members, "joiner"])
    moves = planned(joined, owners)
    assert len(moves) == queue_count // (size + 1)
    assert set(moves.values()) <= {"joiner"}
    owners.update(moves)
    left = {name: None if owner == "joiner" else owner for name, owner in owners.items()}
    back = planned(members, left)
    assert back.keys() == moves.keys()
    assert is_balanced(members, {**left, **back})


def test_what_nobody_can_know_yet_is_waited_for() -> None:
    moving = QueueView(None, waiting=(Waiting("b"), Waiting("c")))
    views = {"q1": QueueView("a"), "q2": QueueView("a"), "q3": QueueView("a"), "q4": moving}
    assert plan(["a", "b", "c"], views) == {}
    assert plan(["a", "b", "c"], {**views, "q5": QueueView()}) == {"q5": "b"}
    del views["q4"]
    assert plan(["a", "b", "c"], views) == {"q1": "b", "q2": "c"}


def test_a_queue_goes_to_the_next_in_line_before_others_who_wait() -> None:
    views = {
        "q1": QueueView("a", waiting=(Waiting("c"),)),
        "q2": QueueView("a", waiting=(Waiting("b"), Waiting("c", 1))),
        "q3": QueueView("a", waiting=(Waiting("b"), Waiting("c"))),
    }
    assert plan(["a", "b", "c"], views) == {"q1": "c", "q2": "b"}


def test_who_takes_a_queue_has_it() -> None:
    taken = QueueView("a", 0, (Waiting("b", 1), Waiting("c")))
    assert [holder(taken, handover) for handover in Handover] == ["b", "a", "a"]
    assert plan(["a", "b", "c"], {"q1": taken, "q2": QueueView("a")}, Handover.TAKE) == {}


def test_what_somebody_has_who_is_no_member_is_left() -> None:
    owners = {"q1": "gone", "q2": "a", "q3": "a", "q4": "a"}
    assert planned(["a", "b"], owners) == {"q2": "b"}


def test_those_who_have_more_keep_it() -> None:
    assert quotas(["a", "b", "c"], {"a": 0, "b": 0, "c": 2}, 4) == {"a": 1, "b": 1, "c": 2}
