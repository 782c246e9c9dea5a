"""The comparison with other systems: its figures, its page, and a short run with what needs no installation."""

import json
from pathlib import Path

import pytest

from bench.systems import run
from bench.systems.figures import Figures, Measured
from bench.systems.metering import Job, Meter
from bench.systems.page import filled, tables, write
from bench.systems.systems import BATCH, EMBEDDED, EMBEDDED_TOGETHER, EMPTY, ONE, PLAIN, SYSTEMS, System

DOCS = Path(__file__).parents[2] / "docs"
SHORT_SCALE = 0.01


def figures_of(*drains: Measured) -> Figures:
    return Figures(machine="a machine", command="make", date="2026-01-01", sync_ms=1.0, drains=list(drains))


def measured(number: int, system: str, batch: int, rate: float) -> Measured:
    return Measured(round=number, system=system, batch=batch, rate=rate, client_us=10.0, server_us=20.0)


def test_a_ratio_divides_the_rates_of_the_same_round() -> None:
    slow_machine = (measured(1, PLAIN, ONE, 10.0), measured(1, EMBEDDED, BATCH, 40.0))
    fast_machine = (measured(2, EMBEDDED, BATCH, 80.0), measured(2, PLAIN, ONE, 20.0))
    assert figures_of(*slow_machine, *fast_machine).ratio((EMBEDDED, BATCH), (PLAIN, ONE)) == 4.0


def test_the_page_tells_which_target_is_reached_and_which_was_not_measured() -> None:
    figures = figures_of(
        measured(1, EMPTY, ONE, 100.0), measured(1, EMBEDDED, ONE, 35.0), measured(1, EMBEDDED_TOGETHER, ONE, 59.0)
    )
    lines = tables(figures)["targets"].splitlines()
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines[2:]}
    assert verdicts["popgate embedded, one by one"] == "**reached**"
    assert verdicts["popgate embedded, settle on pop, one by one"] == "missed"
    assert verdicts["popgate on RabbitMQ, batches of 32"] == "not measured"


def test_the_page_names_a_faster_system_and_the_reason() -> None:
    figures = figures_of(measured(1, EMBEDDED, BATCH, 100.0), measured(1, "redis-always", BATCH, 150.0))
    assert tables(figures)["faster"].startswith("- **Redis Streams, appendfsync always**: **1.5x** ")
    figures = figures_of(measured(1, EMBEDDED, BATCH, 100.0), measured(1, "redis-always", BATCH, 90.0))
    assert tables(figures)["faster"] == "None is faster in this run."


def test_a_page_without_a_block_for_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="no block"):
        filled("a page", figures_of(measured(1, EMPTY, ONE, 1.0)))


def test_the_tables_and_the_plot_of_the_documentation_are_made_from_the_figures_beside_them(tmp_path: Path) -> None:
    names = ("peers.json", "peers.md", "peers.svg")
    for name in names:
        (tmp_path / name).write_text((DOCS / name).read_text())
    write(tmp_path)
    for name in names:
        assert (tmp_path / name).read_text() == (DOCS / name).read_text()


def test_a_meter_stops_with_the_last_settlement() -> None:
    meter = Meter(Job(client="", port=0, total=3, batch=2, clients=1))
    meter.start()
    meter.settled(2)
    assert not meter.is_done
    meter.settled(1)
    first = meter.result
    meter.settled(1)
    assert first is not None
    assert meter.result == first
    assert first.messages == 3


def test_each_system_with_a_reason_has_a_row_of_popgate_to_be_compared_with() -> None:
    keys = {system.key for system in SYSTEMS}
    assert {system.rival for system in SYSTEMS} <= keys


def test_a_short_run_measures_what_needs_no_installation_and_skips_what_is_missing(tmp_path: Path) -> None:
    missing = System(
        key="missing",
        name="a system without its library",
        server="empty",
        client="popgate_client:EMPTY_REQUESTS",
        library="no library",
        totals={ONE: 1},
        durability="none",
        settlement="none",
        modules=("a_library_that_does_not_exist",),
    )
    chosen = [system for system in SYSTEMS if system.key in (EMPTY, EMBEDDED_TOGETHER)]
    figures = run.measure([*chosen, missing], rounds=1, scale=SHORT_SCALE)
    assert figures.skipped == [
        "a system without its library: the client library a_library_that_does_not_exist is not installed"
    ]
    drained = {(one.system, one.batch) for one in figures.drains}
    assert drained == {(EMPTY, ONE), (EMBEDDED_TOGETHER, ONE), (EMBEDDED_TOGETHER, BATCH)}
    assert all(one.rate > 0 and one.client_us > 0 for one in figures.drains)
    figures.write(tmp_path / "peers.json")
    assert json.loads((tmp_path / "peers.json").read_text())["date"] == figures.date
    again = Figures.read(tmp_path / "peers.json")
    assert "popgate embedded, settle on pop" in tables(again)["batches"]
