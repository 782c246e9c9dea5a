"""An embedded proxy in virtual time on a disk that loses what was not synced, under load (``simulator``)."""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from simulator.embedded_run import Fault, simulate_embedded
from simulator.planted import an_old_checksum_counts, answered_before_it_is_committed, nothing_is_synced
from simulator.run import SEED_MAX
from support.audit_rules import Kind

SEEDS, SEEDS_FULL = 8, 1_000
FIRST = 1
"""First seed. It is fixed, so that a change is judged by its own effect. The full run draws it."""
PLANTED_MAX = 12
LOST = {Kind.FATE, Kind.CAME_AGAIN, Kind.COUNT}
"""Rules that are broken by a store that has lost something."""

pytestmark = [
    pytest.mark.usefixtures("quiet_simulation"),
    # A process is killed between two steps of its event loop, so what it has just begun never runs.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]


def test_an_embedded_proxy_keeps_its_promises_over_power_cuts_whatever_the_seed(
    record_property: Callable[[str, object], None], *, full_run: bool
) -> None:
    first, count = (secrets.randbelow(SEED_MAX), SEEDS_FULL) if full_run else (FIRST, SEEDS)
    cuts = 0
    for seed in range(first, first + count):
        outcome = simulate_embedded(seed)
        assert not outcome.complaint, outcome
        cuts += outcome.faults.get(Fault.POWER, 0)
    record_property("told", f"embedded simulation: {count} seeds from {first}, {cuts} power cuts")
    assert cuts > count


@pytest.mark.parametrize("bug", [nothing_is_synced, answered_before_it_is_committed])
def test_a_store_that_answers_before_its_disk_has_synced_is_found(
    bug: Callable[[], AbstractContextManager[None]],
) -> None:
    with bug():
        assert any(LOST & simulate_embedded(seed).kinds for seed in range(FIRST, FIRST + PLANTED_MAX))


def test_a_checksum_that_is_believed_after_a_power_cut_is_found() -> None:
    with an_old_checksum_counts():
        outcomes = map(simulate_embedded, range(FIRST, FIRST + PLANTED_MAX))
        assert any("it has changed since popgate closed it" in outcome.complaint for outcome in outcomes)


def test_a_seed_of_power_cuts_does_the_same_again() -> None:
    assert simulate_embedded(FIRST) == simulate_embedded(FIRST)
