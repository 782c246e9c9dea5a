"""The plots of the growth benchmark, drawn as SVG from its figures: one for each curve.

All scales are logarithmic. A flat line means that the cost of a message does not grow.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.plot import line, text

WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 1_020, 250, 210
LEFT, TOP, GAP, BOTTOM = 62, 84, 80, 58
LOOKS = {"embedded": ("#0b5fb0", "", 3.0), "rabbitmq": ("#b45309", "10 4", 2.5)}
"""Colour, dashes and width of each broker's lines."""
NAMES = {"embedded": "embedded", "rabbitmq": "on RabbitMQ"}
Points = Sequence[Mapping[str, float]]


class Panel(NamedTuple):
    title: str
    column: str
    """One figure of a point."""


PANELS = (
    Panel("pop + ack, messages a second", "rate"),
    Panel("processor time, µs a message", "ready_us"),
    Panel("p99 from publish to ack, ms", "p99_ms"),
)
TITLES = {
    "clients": ("Growing number of clients", "clients"),
    "queues": ("Growing number of queues in one topic", "queues"),
    "topics": ("Growing number of topics with one queue each", "topics"),
    "size": ("Growing messages", "KiB of a body"),
    "in flight": ("Growing number of messages in flight", "messages in flight"),
}


class _Scale(NamedTuple):
    """A logarithmic scale from the decade of the lowest value to that of the highest, over ``length`` from ``start``.

    ``length`` is negative for an axis that runs upwards.
    """

    first: int
    last: int
    start: float
    length: float

    def place(self, value: float) -> float:
        return self.start + self.length * (math.log10(value) - self.first) / (self.last - self.first)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self.first, self.last + 1)]


def _scale(values: Sequence[float], start: float, length: float) -> _Scale:
    first = math.floor(math.log10(min(values)) + 1e-9)
    last = math.ceil(math.log10(max(values)) - 1e-9)
    return _Scale(first, max(last, first + 1), start, length)


def file_name(curve: str) -> str:
    return f"growth-{curve.replace(' ', '-')}.svg"


def drawn_all(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the SVG of each curve by its file name."""
    return {
        file_name(curve): drawn(curve, {name: found["points"] for name, found in brokers.items() if found["points"]})
        for curve, brokers in figures["curves"].items()
    }


def drawn(curve: str, brokers: Mapping[str, Points]) -> str:
    """Return the SVG of one curve."""
    title, axis = TITLES[curve]
    height = TOP + PANEL_HEIGHT + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2937" role="img">'
    )
    parts = [
        head,
        f"<title>{title}: rate, processor time and latency of a pop and an ack</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#d1d5db"/>',
        *_legend(brokers),
    ]
    for number, panel in enumerate(PANELS):
        parts += _panel(panel, axis, brokers, LEFT + number * (PANEL_WIDTH + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(brokers: Mapping[str, Points]) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for broker in brokers:
        colour, dashes, width = LOOKS[broker]
        parts += [line(x, 24, x + 36, 24, colour, width, dashes), text(x + 43, 28.5, NAMES[broker], "start")]
        x += 78 + 6.6 * len(NAMES[broker])
    return parts


def _panel(panel: Panel, axis: str, brokers: Mapping[str, Points], left: float) -> list[str]:
    every = [point for points in brokers.values() for point in points]
    floor, right = TOP + PANEL_HEIGHT, left + PANEL_WIDTH
    across = _scale([point["at"] for point in every], left, PANEL_WIDTH)
    up = _scale([point[panel.column] for point in every], floor, -PANEL_HEIGHT)
    parts = [f'<text x="{left:.1f}" y="{TOP - 14}" font-weight="bold">{panel.title}</text>']
    for tick in up.ticks():
        y = up.place(tick)
        parts += [line(left, y, right, y, "#e5e7eb", 1), text(left - 8, y + 4.5, f"{tick:,g}", "end")]
    parts.append(line(left, floor, right, floor, "#6b7280", 1))
    for tick in across.ticks():
        parts.append(text(across.place(tick), floor + 18, _short(tick), "middle"))
    parts.append(text((left + right) / 2, floor + 40, axis, "middle"))
    for broker, points in brokers.items():
        colour, dashes, width = LOOKS[broker]
        places = [(across.place(point["at"]), up.place(point[panel.column])) for point in points]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    return parts


def _short(value: float) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value:,g}"
