"""Draws plots as inline SVG, in the colours of the surrounding page.

Owns scales, marks and labels; the caller supplies the data. Colours are the page's variables, so that one drawing works
in light and dark mode; lines also differ by their dashes. A point may be None: there the line is interrupted.
"""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 860, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 34
SERIES_MAX = 6
"""Maximum lines of one plot; equal to the number of colours."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 6")
BARS_MAX = 24
BAR_HEIGHT, NAME_WIDTH = 24, 210
MINUTE, HOUR, DAY = 60, 3_600, 86_400
TIME_STEPS = (1, 5, 15, 60, 300, 900, 1_800, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 7 * DAY, 30 * DAY)
Place = Callable[[float], float]


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float | None]]
    """Unix seconds and value, in order."""


class Bar(NamedTuple):
    name: str
    parts: Sequence[tuple[str, float]]
    """Kind, which chooses the colour, and value."""
    note: str = ""


def lines(title: str, series: Sequence[Line], *, unit: str = "", logarithmic: bool = False) -> str:
    """Plot values over time, of at most the first SERIES_MAX series."""
    series = [one for one in series[:SERIES_MAX] if any(value is not None for _, value in one.points)]
    if not series:
        return ""
    times = [at for one in series for at, _ in one.points]
    values = [value for one in series for _, value in one.points if value is not None]
    first, last = min(times), max(times)
    last = max(last, first + 1)
    ticks = _decades(values) if logarithmic else _steps(max(values))
    low, high = ticks[0], ticks[-1]
    floor = HEIGHT - BOTTOM

    def across(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - first) / (last - first)

    def up(value: float) -> float:
        share = math.log(max(value, low) / low) / math.log(high / low) if logarithmic else value / high
        return floor - (floor - TOP) * share

    parts = [_head(HEIGHT, title)]
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, amount(tick), "end"))
    for at in _time_ticks(first, last):
        parts.append(_text(across(at), floor + 18, _clock(at, last - first), "middle"))
    for number, one in enumerate(series):
        dashes = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
        for run in _runs(one.points):
            where = " ".join(f"{across(at):.1f},{up(value):.1f}" for at, value in run)
            if len(run) == 1:
                at, value = run[0]
                parts.append(f'<circle class="dot c{number}" cx="{across(at):.1f}" cy="{up(value):.1f}" r="2.5"/>')
            else:
                parts.append(f'<polyline class="line c{number}" points="{where}"{dashes}/>')
    parts += _legend([one.name for one in series])
    if unit:
        parts.append(_text(LEFT, HEIGHT - 2, unit, "start", "small"))
    return "".join([*parts, "</svg>"])


def bars(title: str, rows: Sequence[Bar], *, unit: str = "") -> str:
    """Plot one bar of coloured parts per row, for at most the first BARS_MAX rows."""
    rows = rows[:BARS_MAX]
    highest = max((sum(value for _, value in row.parts) for row in rows), default=0.0)
    if highest <= 0:
        return ""
    height = TOP + BAR_HEIGHT * len(rows) + 10
    room = WIDTH - NAME_WIDTH - 150
    parts = [_head(height, title)]
    for number, row in enumerate(rows):
        y, x = TOP + BAR_HEIGHT * number, float(NAME_WIDTH)
        parts.append(_text(NAME_WIDTH - 10, y + 15, row.name, "end"))
        for kind, value in row.parts:
            wide = room * value / highest
            if value > 0:
                hint = f"<title>{escape(kind)}: {amount(value)} {escape(unit)}</title>"
                parts.append(
                    f'<rect class="bar {escape(kind)}" x="{x:.1f}" y="{y + 3}" width="{max(wide, 1.0):.1f}"'
                    f' height="{BAR_HEIGHT - 7}" rx="2">{hint}</rect>'
                )
            x += wide
        total = amount(sum(value for _, value in row.parts))
        parts.append(_text(x + 8, y + 15, row.note or f"{total} {unit}".strip(), "start", "small"))
    return "".join([*parts, "</svg>"])


def amount(value: float) -> str:
    """Format a number: three significant digits below 100, else whole with thousands separators."""
    if value and abs(value) < 100 and value != int(value):
        return f"{value:.3g}"
    return f"{value:,.0f}"


def _head(height: float, title: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="0" y="16">{escape(title)}</text>'
    )


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = float(WIDTH - RIGHT)
    for number, name in reversed(list(enumerate(names))):
        x -= 6.8 * len(name)
        parts.append(_text(x, 16, name, "start", "small"))
        dashes = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
        parts.append(f'<line class="line c{number}" x1="{x - 30:.1f}" y1="12" x2="{x - 6:.1f}" y2="12"{dashes}/>')
        x -= 46
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _steps(highest: float) -> list[float]:
    highest = highest if highest > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(one for one in (power / 5, power / 2, power, 2 * power) if highest / one <= 6)
    return [number * step for number in range(math.ceil(highest / step - 1e-9) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    above = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def _time_ticks(first: float, last: float) -> list[float]:
    step = next((one for one in TIME_STEPS if (last - first) / one <= 9), TIME_STEPS[-1])
    begin = math.ceil(first / step) * step
    return [begin + number * step for number in range(int((last - begin) / step) + 1)] if begin <= last else [first]


def _clock(at: float, span: float) -> str:
    when = datetime.fromtimestamp(at, UTC)
    if span > 3 * DAY:
        return f"{when:%b %d}"
    if span > DAY:
        return f"{when:%d. %H:%M}"
    return f"{when:%H:%M:%S}" if span < 10 * MINUTE else f"{when:%H:%M}"
