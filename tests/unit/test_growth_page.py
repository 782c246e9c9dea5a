"""The page on growth shows the figures of the benchmark that are beside it."""

import json
from pathlib import Path

from bench.growth_page import filled
from bench.growth_plot import drawn_all

DOCS = Path(__file__).parents[2] / "docs"


def test_the_plots_and_tables_of_the_page_are_made_from_the_figures_beside_it() -> None:
    figures = json.loads((DOCS / "growth.json").read_text())
    for name, svg in drawn_all(figures).items():
        assert (DOCS / name).read_text() == svg, name
    page = (DOCS / "growth.md").read_text()
    assert page == filled(page, figures)
