"""The plot of a hung consumer's effect on the queues, drawn as SVG from the benchmark's figures.

python plot.py FIGURES.json PLOT.svg

It has a light background, so that it looks the same on light and dark pages, and its lines differ by dashes and names,
not by colours alone.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, PANEL_HEIGHT = 860, 250
LEFT, RIGHT, TOP, GAP, BOTTOM = 62, 24, 64, 62, 46
LOOKS = {
    "pop": ("#0b5fb0", "", 3.0),
    "pull": ("#b45309", "10 4", 2.5),
    "pull, silent": ("#15803d", "10 4 2 4", 2.5),
    "plain AMQP": ("#b91c1c", "2 4", 3.0),
}
"""Colour, dashes and width of each line."""
NAMES = {
    "pop": "pop",
    "pull": "pull, heartbeats go on",
    "pull, silent": "pull, silent altogether",
    "plain AMQP": "plain AMQP",
}
Place = Callable[[float], float]


class Panel(NamedTuple):
    title: str
    column: int
    """One column of a sample."""
    top: float
    place: Place
    ticks: Sequence[float]


def drawn(figures: dict[str, Any]) -> str:
    """Return the SVG."""
    seconds, hangs_at = float(figures["seconds"]), float(figures["hangs_at"])
    ways = {way: figures["ways"][way]["samples"] for way in LOOKS if way in figures["ways"]}
    second_top = TOP + PANEL_HEIGHT + GAP
    height = second_top + PANEL_HEIGHT + BOTTOM
    oldest_max = _round_up(max(sample[1] for samples in ways.values() for sample in samples))
    decades = math.ceil(math.log10(max(11, *(sample[2] for samples in ways.values() for sample in samples))))
    panels = (
        Panel("age of the oldest message, seconds", 1, TOP, _linear(TOP, oldest_max), _steps(oldest_max)),
        Panel(
            "backlog, messages (logarithmic, from 10)",
            2,
            second_top,
            _logarithmic(second_top, decades),
            [10.0**power for power in range(1, decades + 1)],
        ),
    )

    def across(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / seconds

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2937" role="img">'
    )
    parts = [
        head,
        "<title>One of four consumers hangs: age of the oldest message and backlog over time</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#d1d5db"/>',
        *_legend(ways),
    ]
    for panel in panels:
        parts += _grid(panel, across, seconds)
        x = across(hangs_at)
        parts.append(line(x, panel.top, x, panel.top + PANEL_HEIGHT, "#6b7280", 1.5))
        parts.append(text(x + 6, panel.top + 14, "one of four hangs", "start", "#4b5563"))
        parts += [_curve(panel, LOOKS[way], samples, across) for way, samples in ways.items()]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, height - 10, "seconds", "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(ways: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for way in ways:
        colour, dashes, width = LOOKS[way]
        parts.append(line(x, 20, x + 36, 20, colour, width, dashes))
        parts.append(text(x + 43, 24.5, NAMES[way], "start"))
        x += 78 + 6.6 * len(NAMES[way])
    return parts


def _grid(panel: Panel, across: Place, seconds: float) -> list[str]:
    parts = [f'<text x="{LEFT}" y="{panel.top - 10}" font-weight="bold">{panel.title}</text>']
    for tick in panel.ticks:
        y = panel.place(tick)
        parts += [line(LEFT, y, WIDTH - RIGHT, y, "#e5e7eb", 1), text(LEFT - 8, y + 4.5, f"{tick:,g}", "end")]
    floor = panel.top + PANEL_HEIGHT
    parts.append(line(LEFT, floor, WIDTH - RIGHT, floor, "#6b7280", 1))
    for tick in _steps(seconds):
        parts.append(text(across(tick), floor + 18, f"{tick:g}", "middle"))
    return parts


def _curve(panel: Panel, look: tuple[str, str, float], samples: Sequence[Sequence[float]], across: Place) -> str:
    colour, dashes, width = look
    points = " ".join(f"{across(sample[0]):.1f},{panel.place(sample[panel.column]):.1f}" for sample in samples)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dashes: str = "") -> str:
    """Return a line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    where = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{colour}" stroke-width="{width}"{dashed}/>'


def text(x: float, y: float, text: str, anchor: str, colour: str = "#1f2937") -> str:
    """Return a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _linear(top: float, highest: float) -> Place:
    return lambda value: top + PANEL_HEIGHT * (1 - value / highest)


def _logarithmic(top: float, decades: int) -> Place:
    """Scale logarithmically from 10 up; smaller values are at the bottom, because they come and go with each
    publish.
    """
    return lambda value: top + PANEL_HEIGHT * (1 - (math.log10(max(value, 10.0)) - 1) / (decades - 1))


def _step(highest: float) -> float:
    """Return the step of a scale with about five to ten marks."""
    power = 10 ** math.floor(math.log10(highest))
    return float(next(step for step in (power / 5, power / 2, power, 2 * power) if highest / step <= 8))


def _round_up(value: float) -> float:
    value = max(value, 1.0)
    return math.ceil(value / _step(value) - 0.05) * _step(value)


def _steps(highest: float) -> list[float]:
    step = _step(highest)
    return [number * step for number in range(int(highest / step + 1e-9) + 1)]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(json.loads(Path(sys.argv[1]).read_text())))
