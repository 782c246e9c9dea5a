"""The lines of ordering keys, held against plain lists."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.message import Message
from popgate.domain.names import CopyId
from popgate.engine.held import Held, HeldState, Tally
from popgate.engine.lines import Lines
from popgate.engine.queue_host import QueueHost

KEYS = st.sampled_from("ab")


def held(number: int) -> Held:
    host = SimpleNamespace(tally=Tally(), queue=SimpleNamespace(number=0))  # all that a message asks of its queue
    return Held(cast("QueueHost", host), CopyId(f"{number:032x}"))


@given(st.lists(st.tuples(st.sampled_from(["join", "join", "drop", "look"]), KEYS, st.integers(0, 9)), min_size=12))
def test_the_first_is_whoever_has_nobody_left_before_it(steps: list[tuple[str, str, int]]) -> None:
    """In any order of joining, dropping and looking who is next."""
    lines = Lines()
    model: dict[str, list[Held]] = {"a": [], "b": []}
    for number, (action, key, pick) in enumerate(steps):
        line = model[key]
        if action == "join":
            line.append(held(number))
            lines.join(line[-1], key)
        elif line:
            one = line[pick % len(line)]
            if action == "drop":
                line.remove(one)
                one.state = HeldState.DROPPED
                first = lines.leave(one)
                assert first is None or first is line[0]
            else:
                one.next_in_line()
        for present in model.values():
            assert [one.is_first for one in present] == [True, *[False] * (len(present) - 1)][: len(present)]
            for place, one in enumerate(present):
                assert one.next_in_line() is (present[place + 1] if place + 1 < len(present) else None)


def test_what_came_back_is_lined_up_by_when_it_was_published() -> None:
    lines = Lines()
    many = [held(number) for number in range(5)]
    for place in (3, 4, 0, 1, 2):
        one = many[place]
        one.rank = 100 - place
        lines.join_later(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
        assert one.is_unsorted
    many[1].state = HeldState.DROPPED
    assert lines.line_up() == [many[0]]
    assert lines.is_sorted
    assert [many[0].next_in_line(), many[2].next_in_line(), many[4].next_in_line()] == [many[2], many[3], None]
    assert many[0].rank < many[2].rank < many[3].rank < many[4].rank


def test_what_a_client_has_stays_in_front_of_what_came_back_whatever_their_places_say() -> None:
    """A delayed message is visible late, and one with a dedup_id is stored late: both behind later places."""
    lines = Lines()
    early, leased, late = (held(number) for number in range(3))
    leased.state = HeldState.LEASED
    for place, one in enumerate((early, leased, late)):
        one.rank = 1 + place
        lines.join_later(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
    assert lines.line_up() == [leased]
    assert [leased.next_in_line(), early.next_in_line()] == [early, late]


def test_what_clients_had_is_lined_up_among_itself_by_its_place_whoever_has_it_now() -> None:
    """Two of a key were leased together, and the first was given back before the queue came back."""
    lines = Lines()
    new, given_back, leased = (held(number) for number in range(3))
    given_back.delivery_count = 1
    leased.state, leased.delivery_count = HeldState.LEASED, 1
    for place, one in enumerate((new, given_back, leased)):
        one.rank = 1 + place
        lines.join_later(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
    assert lines.line_up() == [given_back]
    assert [given_back.next_in_line(), leased.next_in_line()] == [leased, new]
