"""The short form of `make bench-growth`: checks that it measures, writes its figures, and draws them."""

import json
from typing import Any

import pytest

from bench import growth, growth_load, growth_plot
from bench.growth_curves import CURVES

POINTS = {"clients": 2, "in flight": 1}


def test_the_benchmark_of_growth_measures_and_draws_its_curves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(growth_load, "SETTLE_SECONDS", 0.03)
    saved: list[dict[str, Any]] = []
    figures = growth.run(list(POINTS), ["embedded"], growth.QUICK, saved.append)
    assert saved[-1] == figures == json.loads(json.dumps(figures))
    for name, count in POINTS.items():
        found = figures["curves"][name]["embedded"]
        points = found["points"]
        assert len(points) == count
        assert all(figure > 0 for point in points for name, figure in point.items() if name != "broker_us")
        assert (found["again"] is not None) == (count > 1)
        assert not found["left_out"]
    printed = capsys.readouterr().out
    assert "embedded: messages in flight" in printed
    plots = growth_plot.drawn_all(figures)
    assert sorted(plots) == ["growth-clients.svg", "growth-in-flight.svg"]
    assert all(svg.count("<polyline") == 3 for svg in plots.values())


def test_every_curve_has_a_title() -> None:
    assert {curve.name for curve in CURVES} == set(growth_plot.TITLES)
