"""The figures of a hung consumer, and their plot."""

import json
from pathlib import Path

from bench.fates import HUNG, Fates
from bench.plot import drawn

DOCS = Path(__file__).parents[2] / "docs"
HEALTHY, END = 1, 10.0


def test_a_message_that_the_hung_consumer_holds_waits_until_somebody_else_is_given_it() -> None:
    fates = Fates()
    fates.published(0, 1.0)
    fates.taken([0], HUNG, 1.5)
    fates.taken([0], HEALTHY, 4.0)[0].settled = 4.5
    summary = fates.summary(hangs_at=1.0, end=END)
    assert (summary.held, summary.still_held) == (1, 0)
    assert summary.held_wait_seconds_max == 2.5
    assert summary.other_wait_seconds_max == 0.0
    assert 3.3 < summary.oldest_seconds_max <= 3.5


def test_a_message_that_stays_with_the_hung_consumer_waits_until_the_end() -> None:
    fates = Fates()
    fates.published(0, 1.0)
    fates.taken([0], HUNG, 1.5)
    summary = fates.summary(hangs_at=1.0, end=END)
    assert (summary.held, summary.still_held, summary.backlog_at_end) == (1, 1, 1)
    assert summary.held_wait_seconds_max == 8.5
    assert summary.oldest_seconds_at_end == 9.0


def test_what_a_consumer_settled_before_it_hung_is_not_held() -> None:
    fates = Fates()
    fates.published(0, 1.0)
    fates.taken([0], HUNG, 1.5)[0].settled = 2.0
    summary = fates.summary(hangs_at=3.0, end=END)
    assert (summary.held, summary.backlog_at_end) == (0, 0)
    assert summary.wait_before_seconds_max == summary.other_wait_seconds_max == 0.5


def test_a_message_that_nobody_is_given_waits_behind_the_hung_consumer() -> None:
    fates = Fates()
    fates.published(0, 4.0)
    summary = fates.summary(hangs_at=1.0, end=END)
    assert summary.other_wait_seconds_max == 6.0
    assert summary.wait_before_seconds_max == 0.0


def test_samples_tell_the_backlog_and_its_oldest_message() -> None:
    fates = Fates()
    for number in range(3):
        fates.published(number, number + 0.5)
    fates.taken([0], HEALTHY, 1.0)[0].settled = 2.0
    assert [(one.at, one.oldest_seconds, one.backlog) for one in fates.samples(3.0, 1.0)] == [
        (0.0, 0.0, 0),
        (1.0, 0.5, 1),
        (2.0, 0.5, 1),
        (3.0, 1.5, 2),
    ]


def test_the_plot_of_the_documentation_is_drawn_from_the_figures_beside_it() -> None:
    figures = json.loads((DOCS / "pop-against-pull.json").read_text())
    assert (DOCS / "pop-against-pull.svg").read_text() == drawn(figures)
