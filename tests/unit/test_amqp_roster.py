"""How programs on bare RabbitMQ interpret each other's announcements: the members, and the consumer of each queue."""

from popgate_client.amqp.balance import QueueView, Waiting
from popgate_client.amqp.roster import Order, Roster, Spot, Statement


def spot(tag: str, *behind: str, is_active: bool = False, priority: int = 0) -> Spot:
    return Spot("q", tag, priority, frozenset(behind), is_active)


def statement(member: str, *spots: Spot, version: int = 1, is_member: bool = True) -> Statement:
    return Statement(member, version, is_member, spots)


def roster(*statements: Statement) -> Roster:
    made = Roster()
    for one in statements:
        made.hear(one, 0.0)
    return made


def order(others: Roster, mine: Spot, *, takes: bool = False) -> Order:
    return others.order(mine, takes=takes)


def test_the_only_one_in_line_comes_first() -> None:
    assert order(roster(), spot("a 1")) is Order.FIRST


def test_who_knew_of_another_before_it_joined_is_behind() -> None:
    assert order(roster(statement("b", spot("b 1"))), spot("a 1", "b 1")) is Order.BEHIND


def test_who_all_others_are_behind_comes_first_and_those_who_left_do_not_count() -> None:
    others = roster(statement("b", spot("b 1", "a 1")), statement("c", spot("c 1", "a 1", "b 1")))
    assert order(others, spot("a 1", "long gone")) is Order.FIRST


def test_who_is_behind_somebody_who_is_behind_me_is_behind_me() -> None:
    others = roster(statement("b", spot("b 1", "a 1")), statement("c", spot("c 1", "b 1")))
    assert order(others, spot("a 1")) is Order.FIRST


def test_of_two_that_joined_at_the_same_time_one_stays_and_the_other_joins_anew() -> None:
    mine, other = spot("a 1"), spot("b 1")
    assert order(roster(statement("b", other)), mine) is Order.UNKNOWN_BUT_STAYS
    assert order(roster(statement("a", mine)), other) is Order.UNKNOWN
    assert order(roster(statement("b", spot("b 2", "a 1"))), mine) is Order.FIRST


def test_nobody_comes_first_while_another_says_that_it_consumes() -> None:
    others = roster(statement("b", spot("b 1", "a 1", is_active=True)))
    assert others.is_taken("q")
    assert order(others, spot("a 1")) is Order.BEHIND


def test_a_higher_priority_comes_first() -> None:
    assert order(roster(statement("b", spot("b 1", "a 1", priority=1))), spot("a 1")) is Order.BEHIND


def test_a_lower_priority_that_stood_before_me_is_overtaken_where_priorities_take_over() -> None:
    others = roster(statement("b", spot("b 1")))
    mine = spot("a 1", "b 1", priority=1)
    assert order(others, mine) is Order.BEHIND
    assert order(others, mine, takes=True) is Order.FIRST
    assert order(roster(statement("b", spot("b 1", is_active=True))), mine, takes=True) is Order.BEHIND
    assert order(roster(statement("b", spot("b 1", priority=1))), mine, takes=True) is Order.BEHIND


def test_an_older_statement_that_comes_late_is_no_news() -> None:
    others = roster(statement("b", spot("b 2"), version=2))
    assert not others.hear(statement("b", spot("b 1"), version=1), 1.0)
    assert others.tags("q") == {"b 2"}


def test_a_beat_of_somebody_unknown_or_with_a_newer_version_says_that_something_was_missed() -> None:
    others = roster(statement("b", version=2))
    assert others.hear_beat("c", 1, 0.0)
    assert others.hear_beat("b", 3, 0.0)
    assert not others.hear_beat("b", 2, 0.0)


def test_who_is_silent_is_looked_for_and_dropped_with_all_its_places() -> None:
    others = roster(statement("b", spot("b 1")))
    others.hear_beat("c", 1, 8.0)
    assert others.silent(10.0, 5.0) == ["b"]
    assert others.drop("b")
    assert not others.drop("b")
    assert others.tags("q") == frozenset()


def test_the_view_has_members_in_their_order_the_one_that_consumes_and_those_in_line() -> None:
    others = roster(statement("b", spot("b 1", is_active=True)), statement("a", spot("a 1", "b 1")))
    seen = others.group_view(statement("c"), ["q", "empty"])
    assert seen.members == ["a", "b", "c"]
    assert seen.queues == {"q": QueueView("b", 0, (Waiting("a"),)), "empty": QueueView()}
    assert seen.active_tags == {"b 1"}
    assert seen.tags == {"a": {"a 1"}, "b": {"b 1"}, "c": frozenset()}


def test_who_leaves_is_no_member_and_keeps_what_it_still_consumes() -> None:
    others = roster(statement("b", spot("b 1", is_active=True), is_member=False))
    seen = others.group_view(statement("c"), ["q"])
    assert seen.members == ["c"]
    assert seen.queues["q"].active == "b"


def test_where_two_say_that_they_consume_a_queue_nobody_can_know() -> None:
    others = roster(statement("a", spot("a 1", is_active=True)), statement("b", spot("b 1", is_active=True)))
    seen = others.group_view(statement("c"), ["q"])
    assert seen.queues["q"] == QueueView(None, 0, (Waiting("a"), Waiting("b")))
