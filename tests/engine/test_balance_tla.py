"""The balance in TLA+, under a second checker independent of ours. `make tla` checks larger sizes."""

from pathlib import Path

import pytest

from explorer.group import Case, Views
from explorer.verdict import judge
from popgate.domain.balance import Handover
from tla.checker import MODULE, Size, check


@pytest.mark.parametrize("handover", Handover)
def test_stale_views_and_a_death_end_in_balance(tlc: Path, handover: Handover) -> None:
    outcome = check(tlc, Size(queues=2, members=2, handover=handover, deaths=1, stale=True))
    assert outcome.error == ""
    assert outcome.states > 100


@pytest.mark.parametrize("handover", Handover)
def test_three_queues_and_a_death_end_in_balance(tlc: Path, handover: Handover) -> None:
    outcome = check(tlc, Size(queues=3, members=2, handover=handover, deaths=1))
    assert outcome.error == ""
    assert outcome.states > 100


def test_both_checkers_find_the_same_states(tlc: Path) -> None:
    """Two programs, each written by itself, go through the same."""
    ours = judge(Case(queues=2, members=3, handover=Handover.SOLE, views=Views.STALE))
    assert check(tlc, Size(queues=2, members=3, handover=Handover.SOLE, stale=True)).states == ours.states


def test_a_planted_mistake_is_found(tlc: Path) -> None:
    """One member more may keep one more."""
    source = MODULE.read_text()
    quota = "Cardinality(ahead) < more"
    assert source.count(quota) == 1
    wrong = source.replace(quota, "Cardinality(ahead) <= more")
    size = Size(queues=2, members=2, handover=Handover.SOLE)
    assert "RestsInBalance is violated" in check(tlc, size, source=wrong).error
