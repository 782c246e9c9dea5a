"""The checker of lock histories: it finds each broken promise, and nothing in histories of a correct lock."""

import random
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popgate.domain.lock_history import Violation, check
from popgate.domain.lock_operations import (
    AWAY,
    CUT_OFF,
    KILLED,
    TAKEN,
    Action,
    Disturbance,
    Operation,
    OperationOutcome,
)

DONE, REFUSED, UNKNOWN = OperationOutcome


def acquire(client: str, invoked: float, completed: float, token: int | None, *, slot: int = 1) -> Operation:
    return Operation(
        client=client,
        action=Action.ACQUIRE,
        outcome=DONE,
        invoked=invoked,
        completed=completed,
        slot=slot,
        token=token,
        wait_seconds=10.0,
    )


def waited(client: str, invoked: float, completed: float, *, wait_seconds: float = 1.0) -> Operation:
    return Operation(
        client=client,
        action=Action.ACQUIRE,
        outcome=REFUSED,
        invoked=invoked,
        completed=completed,
        wait_seconds=wait_seconds,
    )


def settle(
    action: Action, client: str, at: float, token: int, *, slot: int = 1, outcome: OperationOutcome = DONE
) -> Operation:
    return Operation(
        client=client, action=action, outcome=outcome, invoked=at, completed=at + 0.1, slot=slot, token=token
    )


def release(client: str, at: float, token: int, *, slot: int = 1) -> Operation:
    return settle(Action.RELEASE, client, at, token, slot=slot)


def verify(client: str, at: float, token: int, *, slot: int = 1, outcome: OperationOutcome = DONE) -> Operation:
    return settle(Action.VERIFY, client, at, token, slot=slot, outcome=outcome)


def renew(client: str, at: float, token: int, renewed_token: int | None, *, slot: int = 1) -> Operation:
    outcome = REFUSED if renewed_token is None else DONE
    return replace(settle(Action.RENEW, client, at, token, slot=slot, outcome=outcome), renewed_token=renewed_token)


def set_slots(number: int, at: float, outcome: OperationOutcome = DONE) -> Operation:
    return Operation(
        client="admin", action=Action.SET_SLOTS, outcome=outcome, invoked=at, completed=at + 0.1, number=number
    )


def rules(found: Sequence[Violation]) -> list[str]:
    return [violation.rule for violation in found]


def found_in(*operations: Operation, disturbances: Sequence[Disturbance] = (), slots: int = 1) -> list[str]:
    return rules(check(operations, disturbances, slots=slots))


def test_one_after_the_other_is_fine() -> None:
    assert not found_in(acquire("a", 0, 1, 7), verify("a", 2, 7), release("a", 3, 7), acquire("b", 2, 4, 8))


def test_two_slots_are_held_by_two() -> None:
    assert not found_in(acquire("a", 0, 1, 7), acquire("b", 0, 1, 7, slot=2), slots=2)


def test_two_holders_of_a_slot_are_found_with_what_shows_it() -> None:
    first, second, end = acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), release("a", 5, 7)
    (violation,) = check([first, second, end, release("b", 5.5, 8), acquire("c", 6, 7, 9)], [], slots=1)
    assert violation.rule == "exclusion"
    assert violation.excerpt == [first, second, end]


@pytest.mark.parametrize(("what", "client"), [("stopped", "a"), ("connection cut", "a"), ("node killed", "")])
def test_who_could_not_know_is_excused_and_fenced(what: str, client: str) -> None:
    excuse = Disturbance(client=client, at=1.5, what=what)
    assert not found_in(acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), disturbances=[excuse])
    late = Disturbance(client=client, at=4.0, what=what)
    assert found_in(acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), disturbances=[late]) == ["exclusion"]


def test_who_is_told_late_that_it_has_what_it_lost_meanwhile_needs_an_excuse_of_its_own() -> None:
    slow, overtaking = acquire("a", 0, 7, 7), acquire("b", 5, 6, 8)
    assert found_in(slow, overtaking) == ["exclusion"]
    assert not found_in(slow, overtaking, disturbances=[Disturbance(client="a", at=2, what="stopped")])
    assert found_in(slow, overtaking, disturbances=[Disturbance(client="b", at=5.5, what="stopped")]) == ["exclusion"]


def test_who_was_killed_holds_nothing() -> None:
    kill = Disturbance(client="a", at=1.5, what=KILLED)
    assert not found_in(acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), disturbances=[kill])


def test_who_was_told_that_it_lost_holds_nothing() -> None:
    told = verify("a", 1.5, 7, outcome=REFUSED)
    assert not found_in(acquire("a", 0, 1, 7), told, acquire("b", 2, 3, 8))


def test_tokens_that_are_missing_repeated_or_go_back_are_found() -> None:
    assert found_in(acquire("a", 0, 1, None)) == ["tokens"]
    assert found_in(acquire("a", 0, 1, 7), release("a", 2, 7), acquire("b", 3, 4, 7)) == ["tokens"]
    assert found_in(acquire("a", 0, 1, 7), release("a", 2, 7), acquire("b", 3, 4, 6)) == ["tokens"]


def test_tokens_of_grants_that_overlap_may_come_in_any_order() -> None:
    assert not found_in(acquire("a", 0, 3, 7), release("a", 4, 7), acquire("b", 2, 5, 8))


def test_a_verify_that_only_asks_whether_the_lock_is_there_is_found() -> None:
    cut = Disturbance(client="a", at=1.5, what="connection cut")
    assert found_in(acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), verify("a", 4, 7), disturbances=[cut]) == ["verify"]


def test_a_renewal_of_a_lock_that_another_client_has_or_has_had_meanwhile_is_found() -> None:
    cut = Disturbance(client="a", at=1.5, what="connection cut")
    first, other, let_go = acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), release("b", 3.5, 8)
    assert found_in(first, other, renew("a", 4, 7, 7), disturbances=[cut]) == ["renew"]
    assert "renew" in found_in(first, other, let_go, renew("a", 2.5, 7, 9), disturbances=[cut]), "it came back"
    assert not found_in(first, other, let_go, renew("a", 4, 7, None), disturbances=[cut])
    assert not found_in(first, renew("a", 1.2, 7, 8), renew("a", 1.4, 7, 9), release("a", 2, 7), acquire("b", 1, 3, 10))
    assert found_in(first, release("a", 2, 7), renew("a", 3, 7, 8)) == ["release"]


def test_a_verify_can_not_know_that_the_token_was_taken_but_a_renewal_can() -> None:
    taken = Disturbance(client="", at=1.5, what=TAKEN, until=6)
    first, other = acquire("a", 0, 1, 7), acquire("b", 2, 3, 8)
    assert not found_in(first, other, verify("a", 4, 7), disturbances=[taken])
    assert found_in(first, other, verify("a", 7, 7), disturbances=[replace(taken, until=2)]) == ["verify"]
    assert "renew" in found_in(first, other, renew("a", 4, 7, 9), disturbances=[taken])


def test_who_is_told_by_a_renewal_that_it_lost_holds_nothing() -> None:
    assert not found_in(acquire("a", 0, 1, 7), renew("a", 1.5, 7, None), acquire("b", 2, 3, 8))


def test_a_removed_slot_that_is_given_is_found() -> None:
    assert found_in(set_slots(0, 0), acquire("a", 1, 2, 7)) == ["slots"]
    assert not found_in(set_slots(0, 0), set_slots(1, 0.5), acquire("a", 1, 2, 7))
    assert not found_in(set_slots(0, 1.5), acquire("a", 1, 2, 7)), "it was removed only meanwhile"
    assert not found_in(set_slots(0, 0, outcome=UNKNOWN), acquire("a", 1, 2, 7))
    assert found_in(set_slots(1, 0), acquire("a", 1, 2, 7, slot=2), slots=2) == ["slots"]


def test_a_slot_that_is_put_back_while_it_is_held_is_one_slot() -> None:
    between = [set_slots(0, 1.2), set_slots(1, 1.5)]
    assert found_in(acquire("a", 0, 1, 7), *between, acquire("b", 2, 3, 8)) == ["exclusion"]


def test_a_wait_that_does_not_end_is_found() -> None:
    assert found_in(waited("a", 0, 100)) == ["wait"]
    assert not found_in(waited("a", 0, 2))
    assert not found_in(waited("a", 0, 100), disturbances=[Disturbance(client="a", at=1, what="stopped")])


def test_a_client_that_is_overtaken_time_and_again_is_found() -> None:
    others: list[Operation] = []
    for number in range(20):
        client = "bc"[number % 2]
        others += [acquire(client, number + 0.1, number + 0.2, number), release(client, number + 0.5, number)]
    assert found_in(waited("a", 0, 30, wait_seconds=30.0), *others) == ["wait"]
    assert not found_in(waited("a", 0, 30, wait_seconds=30.0), *others, set_slots(1, 5)), "the line was another one"


def test_a_lock_that_is_held_after_its_release_is_found() -> None:
    assert found_in(acquire("a", 0, 1, 7), release("a", 2, 7), verify("a", 3, 7)) == ["release"]
    counted = Operation(client="admin", action=Action.COUNT_HELD, outcome=DONE, invoked=9, completed=9, number=1)
    assert found_in(acquire("a", 0, 1, 7), release("a", 2, 7), counted) == ["release"]


def test_an_acquire_that_is_refused_at_once_though_the_slot_was_let_go_is_found() -> None:
    before, refused = [acquire("a", 0, 1, 7), release("a", 2, 7)], waited("b", 2.2, 2.21, wait_seconds=0.0)
    (violation,) = check([*before, refused], [], slots=1)
    assert (violation.rule, violation.excerpt) == ("free", [before[1], refused])
    assert found_in(*before, acquire("c", 0, 1, 7, slot=2), refused, slots=2) == ["free"]


def test_an_acquire_may_be_refused_while_the_slot_may_be_taken_or_the_broker_was_slow() -> None:
    held = acquire("a", 0, 1, 7)
    before, refused = [held, release("a", 2, 7)], waited("b", 2.2, 2.21, wait_seconds=0.0)
    assert not found_in(held, release("a", 2.15, 7), refused), "it was not told that it was released"
    assert not found_in(held, settle(Action.RELEASE, "a", 2, 7, outcome=UNKNOWN), refused)
    assert not found_in(*before, acquire("c", 2.205, 3, 8), refused), "another one was faster"
    assert not found_in(*before, waited("c", 0.5, 2.15), refused), "its place in line goes a moment later"
    assert not found_in(*before, waited("b", 2.2, 3.0))
    assert not found_in(*before, set_slots(1, 2.15), refused)
    assert not found_in(*before, refused, disturbances=[Disturbance(client="", at=1.5, what=AWAY, until=1.6)])
    assert not found_in(acquire("a", 0, 1, 7), refused, disturbances=[Disturbance(client="a", at=1.5, what=KILLED)])


def test_after_a_count_nobody_holds_what_a_killed_client_had() -> None:
    counted = Operation(client="admin", action=Action.COUNT_HELD, outcome=DONE, invoked=9, completed=9.1)
    refused = waited("b", 9.5, 9.51, wait_seconds=0.0)
    kill = Disturbance(client="a", at=1.5, what=KILLED)
    assert found_in(acquire("a", 0, 1, 7), counted, refused, disturbances=[kill]) == ["free"]


def test_a_client_that_only_loses_answers_loses_no_lock() -> None:
    grants = [acquire("a", 0, 1, 7), acquire("b", 2, 3, 8)]
    assert found_in(*grants, disturbances=[Disturbance(client="a", at=1.5, what=CUT_OFF)]) == ["exclusion"]
    assert not found_in(waited("a", 0, 100), disturbances=[Disturbance(client="a", at=1.5, what=CUT_OFF)])


# ---------------------------------------------------------------- histories of a lock that works


def history(chance: random.Random, *, clients: int, slots: int, steps: int) -> list[Operation]:
    """Generate what clients of a perfect lock record: each operation takes effect at one moment between its two
    times.
    """
    now, token = 0.0, 0
    holders: dict[int, tuple[str, int]] = {}
    done: list[Operation] = []
    for _ in range(steps):
        now += chance.uniform(0.1, 1.0)
        client = f"c{chance.randrange(clients)}"
        before, after = now - chance.uniform(0.0, 0.05), now + chance.uniform(0.0, 0.05)
        mine = next((slot for slot, (holder, _) in holders.items() if holder == client), None)
        free = [slot for slot in range(1, slots + 1) if slot not in holders]
        if mine is not None:
            action = chance.choice([Action.VERIFY, Action.RENEW, Action.RELEASE])
            one = settle(action, client, before, holders[mine][1], slot=mine)
            if action is Action.RENEW:
                token += 1
                one = replace(one, renewed_token=token)
            done.append(one)
            if action is Action.RELEASE:
                del holders[mine]
        elif free:
            token += 1
            slot = chance.choice(free)
            holders[slot] = client, token
            done.append(acquire(client, before, after, token, slot=slot))
        else:
            done.append(waited(client, before, after))
    return done


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3))
def test_nothing_is_found_in_the_history_of_a_lock_that_works(seed: int, clients: int, slots: int) -> None:
    assert not check(history(random.Random(seed), clients=clients, slots=slots, steps=60), [], slots=slots)


@given(st.integers(0, 2**32))
def test_a_grant_beside_another_is_found_wherever_it_stands(seed: int) -> None:
    chance = random.Random(seed)
    done = history(chance, clients=3, slots=1, steps=60)
    held = chance.choice([one for one in done if one.action is Action.ACQUIRE and one.outcome is DONE])
    intruder = acquire("intruder", held.completed + 0.001, held.completed + 0.002, 10_000)
    assert {"exclusion", "tokens"} & set(rules(check([*done, intruder], [], slots=1)))


# ---------------------------------------------------------------- what the prover adds


def write(client: str, at: float, token: int, outcome: OperationOutcome = DONE) -> Operation:
    return settle(Action.WRITE, client, at, token, outcome=outcome)


def test_a_holder_whose_write_is_refused_was_disturbed_or_told_or_it_is_found() -> None:
    refused = [acquire("a", 0, 1, 7), write("a", 2, 7, REFUSED)]
    assert found_in(*refused) == ["fence"]
    assert not found_in(*refused, disturbances=[Disturbance(client="a", at=1.5, what="stopped")])
    assert not found_in(refused[0], verify("a", 1.5, 7, outcome=REFUSED), refused[1])
    assert not found_in(acquire("a", 0, 1, 7), write("a", 2, 7))


def test_a_slot_that_nobody_can_have_is_found() -> None:
    counted = Operation(client="admin", action=Action.COUNT_FREE, outcome=DONE, invoked=9, completed=9.5, number=1)
    assert not found_in(counted)
    assert found_in(counted, slots=2) == ["slots"]
    assert found_in(set_slots(2, 1), counted) == ["slots"]
    assert not found_in(set_slots(2, 1, outcome=UNKNOWN), counted, slots=2), "who knows how many there are"


def test_a_lock_that_cannot_be_acquired_in_the_end_is_found() -> None:
    failed = Operation(client="admin", action=Action.COUNT_FREE, outcome=UNKNOWN, invoked=9, completed=9.5)
    again = Operation(client="admin", action=Action.COUNT_FREE, outcome=DONE, invoked=10, completed=10.5, number=1)
    assert found_in(failed) == ["slots"]
    assert not found_in(failed, again)


def test_a_question_without_an_answer_is_found() -> None:
    asked = Operation(client="a", action=Action.VERIFY, outcome=UNKNOWN, invoked=1, slot=1, token=7)
    assert found_in(asked) == ["wait"]
    assert not found_in(asked, disturbances=[Disturbance(client="a", at=1.5, what=KILLED)])


def test_who_is_not_told_whether_it_holds_steps_down() -> None:
    asked = verify("a", 1.5, 7, outcome=UNKNOWN)
    assert not found_in(acquire("a", 0, 1, 7), asked, acquire("b", 2, 3, 8))


def test_a_disturbance_excuses_who_was_given_the_lock_while_it_took_effect() -> None:
    grants = [acquire("a", 1.1, 1.2, 7), acquire("b", 2, 3, 8)]
    assert found_in(*grants, disturbances=[Disturbance(client="a", at=1.0, what="cut")]) == ["exclusion"]
    assert not found_in(*grants, disturbances=[Disturbance(client="a", at=1.0, what="cut", until=1.3)])


def test_a_missing_part_of_the_broker_excuses_late_answers_and_no_second_holder() -> None:
    away = Disturbance(client="", at=0.0, what=AWAY, until=50.0)
    assert not found_in(waited("a", 1, 40), disturbances=[away])
    assert found_in(acquire("a", 0, 1, 7), acquire("b", 2, 3, 8), disturbances=[away]) == ["exclusion"]


def test_a_long_history_is_checked_in_a_few_seconds() -> None:
    done = history(random.Random(1), clients=8, slots=2, steps=30_000)
    started = perf_counter()
    assert not check(done, [], slots=2)
    assert perf_counter() - started < 10
