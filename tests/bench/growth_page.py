"""Writes the tables and plots of docs/growth.md from the figures of the growth benchmark.

python growth_page.py FOLDER     writes them anew from growth.json in this folder
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.growth_plot import drawn_all

HEAD = ("", "msg/s", "ready, µs", "ratio", "waiting, µs", "ratio", "p50, ms", "p99, ms", "memory, MiB")
NAMES = {"embedded": "embedded", "rabbitmq": "RabbitMQ"}
BROKER = "RabbitMQ, µs"
"""The additional column of curves that show the processor time of the broker."""
WITH_BROKER = ("size", "in flight")


def _conditions(figures: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for run in figures["runs"]:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines += [
            f"- {run['date']}, `{run['command']}`, medians of {run['rounds']} rounds",
            (
                f"- {run['machine']}; a synced write of 4 KiB takes {run['sync_ms']:.2f} ms; "
                f"load before the start: {run['load']:.1f}"
            ),
            f"- {versions}",
        ]
    return "\n".join(lines)


def _row(name: str, point: Mapping[str, float], base: Mapping[str, float], columns: tuple[str, ...]) -> str:
    cells = [
        name,
        f"{point['rate']:,.0f}",
        f"{point['ready_us']:,.0f}",
        f"{point['ready_us'] / base['ready_us']:.2f}x",
        f"{point['waiting_us']:,.0f}",
        f"{point['waiting_us'] / base['waiting_us']:.2f}x",
        f"{point['p50_ms']:.1f}",
        f"{point['p99_ms']:.1f}",
        f"{point['memory_mib']:,.0f}",
        *([f"{point['broker_us']:,.0f}" if point["broker_us"] else ""] if BROKER in columns else []),
    ]
    return f"| {' | '.join(cells)} |"


def table(curve: str, brokers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of one curve in Markdown."""
    columns = (*HEAD, BROKER) if curve in WITH_BROKER else HEAD
    rows: list[str] = []
    for broker, found in brokers.items():
        if not found["points"]:
            continue
        base = found["points"][0]
        rows += [_row(f"{NAMES[broker]}, {point['at']:,g}", point, base, columns) for point in found["points"]]
        if found["again"] is not None:
            rows.append(_row(f"{NAMES[broker]}, {base['at']:,g} again", found["again"], base, columns))
    remarks = [f"\n{NAMES[broker]}: {found['left_out']}." for broker, found in brokers.items() if found["left_out"]]
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows, *remarks])


def filled(page: str, figures: Mapping[str, Any]) -> str:
    """Return the page with its figures between its marks. Raises: ValueError if a mark is missing."""
    blocks = {curve: table(curve, brokers) for curve, brokers in figures["curves"].items()}
    for name, block in {"conditions": _conditions(figures), **blocks}.items():
        begin, end = f"<!-- figures: {name} -->\n", "<!-- /figures -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"the page has no block of figures {name!r}")
        page = f"{before}{begin}{block}\n{end}{after}"
    return page


def write_plots(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write the plot of each curve."""
    for name, svg in drawn_all(figures).items():
        (folder / name).write_text(svg)


def write(folder: Path) -> None:
    """Write the plots and the tables anew from the figures in the folder."""
    figures = json.loads((folder / "growth.json").read_text())
    write_plots(folder, figures)
    page = folder / "growth.md"
    page.write_text(filled(page.read_text(), figures))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
