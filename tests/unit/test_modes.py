"""How a consume mode is switched: the steps, their generations, and which leases are valid after each."""

from dataclasses import replace

import pytest

from popgate.domain.modes import DRAIN_SECONDS, drained, is_good, leased_by, pull_prefix, switched, wrong_mode
from popgate.domain.names import GroupName, LeaseId, Subscription, TopicName
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec, Policy

POP = GroupSpec(subscription=Subscription(TopicName("t"), GroupName("g")), policy=Policy(max_deliveries=3))
POPPED = LeaseId("proxy1")
NOW = 1_000.0


def pulled(spec: GroupSpec) -> LeaseId:
    return LeaseId(f"{pull_prefix(spec)}4")


def to_pull(spec: GroupSpec = POP, seconds: float | None = None) -> GroupSpec:
    return switched(spec, ConsumeMode.PULL, now=NOW, drain_seconds=seconds)


def to_pop(spec: GroupSpec, seconds: float | None = None) -> GroupSpec:
    return switched(spec, ConsumeMode.POP, now=NOW, drain_seconds=seconds)


DRAINING = to_pull()
PULL = drained(DRAINING)


def test_from_pop_to_pull_the_group_drains_and_each_step_has_the_next_generation() -> None:
    drain = Drain(to=ConsumeMode.PULL, ends_at=NOW + DRAIN_SECONDS)
    assert replace(POP, mode=ConsumeMode.DRAINING, mode_generation=2, drain=drain) == DRAINING
    assert replace(POP, mode=ConsumeMode.PULL, mode_generation=3, lease_generation=3) == PULL
    assert to_pop(PULL) == replace(POP, mode_generation=4, lease_generation=4)


def test_a_repeated_switch_changes_nothing() -> None:
    for mode, spec in ((ConsumeMode.POP, POP), (ConsumeMode.PULL, DRAINING), (ConsumeMode.PULL, PULL)):
        assert switched(spec, mode, now=NOW + 50) is spec


def test_a_repeat_with_a_timeout_of_its_own_counts_it_anew() -> None:
    again = switched(DRAINING, ConsumeMode.PULL, now=NOW + 50, drain_seconds=5)
    assert again == replace(DRAINING, drain=Drain(to=ConsumeMode.PULL, ends_at=NOW + 55))
    assert switched(PULL, ConsumeMode.PULL, now=NOW, drain_seconds=5) is PULL


def test_half_way_back_no_lease_is_cut_off() -> None:
    back = to_pop(DRAINING)
    assert back == replace(POP, mode_generation=3)
    assert is_good(back, POPPED)
    draining = to_pull(back)
    assert draining.mode_generation == 4
    assert drained(draining).mode_generation == 5


def test_a_drain_without_time_is_a_step_of_its_own_all_the_same() -> None:
    draining = to_pull(seconds=0)
    assert draining.drain == Drain(to=ConsumeMode.PULL, ends_at=NOW)


def test_from_pull_to_pop_a_group_drains_only_where_it_is_asked_for() -> None:
    draining = to_pop(PULL, seconds=5)
    assert draining.mode is ConsumeMode.DRAINING
    assert draining.drain == Drain(to=ConsumeMode.POP, ends_at=NOW + 5)
    assert is_good(draining, pulled(PULL))
    back = to_pull(draining)
    assert back.mode is ConsumeMode.PULL
    assert pulled(back) == pulled(PULL)
    assert to_pop(PULL, seconds=0).mode is ConsumeMode.POP
    assert not is_good(drained(draining), pulled(PULL))


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        (POP, ConsumeMode.POP),
        (DRAINING, ConsumeMode.POP),
        (PULL, ConsumeMode.PULL),
        (to_pop(PULL, seconds=5), ConsumeMode.PULL),
        (to_pop(PULL), ConsumeMode.POP),
    ],
)
def test_leases_are_good_for_as_long_as_their_mode_lasts(spec: GroupSpec, mode: ConsumeMode) -> None:
    assert leased_by(spec) is mode
    assert is_good(spec, POPPED) is (mode is ConsumeMode.POP)
    assert is_good(spec, pulled(spec)) is (mode is ConsumeMode.PULL)


def test_leases_of_an_earlier_pull_are_not_those_of_a_later_one() -> None:
    later = drained(to_pull(to_pop(PULL)))
    assert later.mode is ConsumeMode.PULL
    assert not is_good(later, pulled(PULL))
    assert is_good(later, pulled(later))


@pytest.mark.parametrize(
    ("spec", "wanted", "why"),
    [
        (DRAINING, ConsumeMode.POP, "changing to pull mode: leased messages can be settled"),
        (DRAINING, ConsumeMode.PULL, "changing to pull mode: try again when all leases have ended"),
        (PULL, ConsumeMode.POP, "in pull mode: ask for an assignment"),
        (POP, ConsumeMode.PULL, "in pop mode: pop"),
    ],
)
def test_who_comes_for_another_mode_is_told_the_one_that_is(spec: GroupSpec, wanted: ConsumeMode, why: str) -> None:
    error = wrong_mode(spec, wanted)
    assert error.mode == spec.mode
    assert why in error.detail
