"""Grafana can read the dashboard: its fields are those of Grafana's published schema, and its panels don't overlap.

tests/cluster/test_alerts.py runs its queries on a Prometheus.
"""

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

Json = dict[str, "Json"] | list["Json"] | str | float | None
DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "popgate.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRID_COLUMNS = 24
UNLISTED = {"definition"}
"""Fields that Grafana writes, and that its published schema does not list."""


def leaves(value: Json, place: str = "") -> Iterator[tuple[str, Json]]:
    """Yield each number and text with its place."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name not in UNLISTED:
                yield from leaves(one, f"{place}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from leaves(one, f"{place}[{number}]")
    else:
        yield place, value


def test_grafanas_schema_knows_every_field() -> None:
    register_default_plugins()
    written = dict(leaves(json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))))
    lost = [place for place, value in leaves(DASHBOARD) if place not in written or written[place] != value]
    assert lost == []


def test_the_panels_are_on_the_grid_and_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= GRID_COLUMNS
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, f"{one} and {other}"


def test_each_panel_has_an_id_and_says_what_it_shows() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            targets = [target["refId"] for target in panel["targets"]]
            assert len(set(targets)) == len(targets) > 0
            used = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert used == [{"type": "prometheus", "uid": "${datasource}"}] * len(used)
