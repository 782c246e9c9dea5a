"""The chains of ordering keys, compared with plain lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.message import Message
from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import BufferedMessage, Counts, MessageState
from popgate.engine.queue.ordering_keys import OrderingKeys

KEYS = st.sampled_from("ab")


def held(number: int) -> BufferedMessage:
    return BufferedMessage(Counts(), 0, CopyId(f"{number:032x}"))


@given(st.lists(st.tuples(st.sampled_from(["join", "join", "drop", "look"]), KEYS, st.integers(0, 9)), min_size=12))
def test_the_first_is_whoever_has_nobody_left_before_it(steps: list[tuple[str, str, int]]) -> None:
    """In any order of adding, dropping and looking for the next."""
    keys = OrderingKeys()
    model: dict[str, list[BufferedMessage]] = {"a": [], "b": []}
    for number, (action, key, pick) in enumerate(steps):
        line = model[key]
        if action == "join":
            line.append(held(number))
            keys.append(line[-1], key)
        elif line:
            one = line[pick % len(line)]
            if action == "drop":
                line.remove(one)
                one.enter(MessageState.DROPPED)
                first = keys.remove(one)
                assert first is None or first is line[0]
            else:
                one.next_of_key()
        for present in model.values():
            assert [one.is_head for one in present] == [True, *[False] * (len(present) - 1)][: len(present)]
            for place, one in enumerate(present):
                assert one.next_of_key() is (present[place + 1] if place + 1 < len(present) else None)


def test_what_came_back_is_lined_up_by_when_it_was_published() -> None:
    keys = OrderingKeys()
    many = [held(number) for number in range(5)]
    for place in (3, 4, 0, 1, 2):
        one = many[place]
        one.rank = 100 - place
        keys.defer(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
        assert one.awaits_order
    many[1].enter(MessageState.DROPPED)
    assert keys.order_deferred(many) == [many[0]]
    assert keys.is_ordered
    assert [many[0].next_of_key(), many[2].next_of_key(), many[4].next_of_key()] == [many[2], many[3], None]
    assert many[0].rank < many[2].rank < many[3].rank < many[4].rank


def test_what_a_client_has_stays_in_front_of_what_came_back_whatever_their_places_say() -> None:
    """A delayed message becomes visible late, and one with a dedup_id is stored late: both after messages with later
    places.
    """
    keys = OrderingKeys()
    early, leased, late = (held(number) for number in range(3))
    leased.enter(MessageState.LEASED)
    for place, one in enumerate((early, leased, late)):
        one.rank = 1 + place
        keys.defer(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
    assert keys.order_deferred([early, leased, late]) == [leased]
    assert [leased.next_of_key(), early.next_of_key()] == [early, late]


def test_what_clients_had_is_lined_up_among_itself_by_its_place_whoever_has_it_now() -> None:
    """Two of a key were leased together, and the first was released before the queue returned."""
    keys = OrderingKeys()
    new, given_back, leased = (held(number) for number in range(3))
    given_back.delivery_count = 1
    leased.enter(MessageState.LEASED)
    leased.delivery_count = 1
    for place, one in enumerate((new, given_back, leased)):
        one.rank = 1 + place
        keys.defer(one, "k", Message(one.copy_id, "", b"", {}, "k", 0.0))
    assert keys.order_deferred([new, given_back, leased]) == [given_back]
    assert [given_back.next_of_key(), leased.next_of_key()] == [leased, new]


@pytest.mark.parametrize("head_is_leased", [False, True])
def test_a_redelivered_message_goes_in_front_of_later_ones_that_no_client_has_had(head_is_leased: bool) -> None:
    """RabbitMQ may redeliver it behind them, if it was on its way to a consumer that was being cancelled."""
    keys = OrderingKeys()
    first, overtaken, second, third = many = [held(number) for number in range(4)]
    for number in (0, 2, 3, 1):
        one = many[number]
        one.rank = 10 + len([other for other in many if other.rank])
        one.message = Message(one.copy_id, "", b"", {}, "k", 0.0)
        if one is overtaken:
            keys.defer(one, "k", one.message)
        else:
            keys.append(one, "k")
    if head_is_leased:
        first.enter(MessageState.LEASED)
    assert keys.order_deferred(many) == []
    assert [first.next_of_key(), overtaken.next_of_key(), second.next_of_key()] == [overtaken, second, third]
    assert [one.is_head for one in many] == [True, False, False, False]
    assert first.rank < overtaken.rank <= second.rank
    first.enter(MessageState.DROPPED)
    assert keys.remove(first) is overtaken
    overtaken.enter(MessageState.DROPPED)
    assert keys.remove(overtaken) is second


def test_a_redelivered_message_becomes_the_head_where_no_client_has_had_any() -> None:
    keys = OrderingKeys()
    first, second = many = [held(number) for number in range(2)]
    for rank, one in enumerate((second, first), 1):
        one.rank, one.message = rank, Message(one.copy_id, "", b"", {}, "k", 0.0)
    keys.append(second, "k")
    assert first.message is not None
    keys.defer(first, "k", first.message)
    assert keys.order_deferred(many) == [first]
    assert [one.is_head for one in many] == [True, False]
    assert first.next_of_key() is second
