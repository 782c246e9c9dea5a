"""The plot of a soak as SVG: memory, descriptors, threads and latency of each proxy over time."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP = 860, 130, 70, 24, 56, 44
LOOKS = (("#0b5fb0", ""), ("#b45309", "8 4"))
"""Colour and dashes of each proxy's line."""


class Panel(NamedTuple):
    title: str
    key: str
    factor: float


PANELS = (
    Panel("memory, MiB", "memory_bytes", 1 / (1 << 20)),
    Panel("open descriptors", "descriptors", 1),
    Panel("threads", "threads", 1),
    Panel("publish, 99th percentile, ms", "publish_p99_seconds", 1_000),
    Panel("pop, 99th percentile, ms", "pop_p99_seconds", 1_000),
    Panel("ack, 99th percentile, ms", "ack_p99_seconds", 1_000),
)


def drawn(series: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the SVG for the samples of each proxy."""
    seconds = max((one["at"] for samples in series.values() for one in samples), default=1.0)
    height = TOP + len(PANELS) * (PANEL_HEIGHT + GAP)
    names = ", ".join(series)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2937" role="img">'
    )
    parts = [
        head,
        f"<title>Memory, descriptors, threads and latency of {escape(names)} over {seconds / 60:.0f} minutes</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, (colour, dashes)) in enumerate(zip(series, LOOKS, strict=False)):
        x = LEFT + number * 200
        parts.append(f'<path d="M{x} 22h40" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>')
        parts.append(f'<text x="{x + 48}" y="26">{escape(name)}</text>')
    for number, panel in enumerate(PANELS):
        parts += _panel(panel, TOP + number * (PANEL_HEIGHT + GAP), series, seconds)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, series: Mapping[str, Sequence[Mapping[str, float]]], seconds: float) -> list[str]:
    lines = [
        [(one["at"], one[panel.key] * panel.factor) for one in samples if panel.key in one]
        for samples in series.values()
    ]
    highest = max((value for line in lines for _, value in line), default=1.0) * 1.1 or 1.0
    bottom = top + PANEL_HEIGHT

    def place(at: float, value: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * at / seconds:.1f} {bottom - PANEL_HEIGHT * value / highest:.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(panel.title)}</text>']
    parts += _grid(top, highest, seconds, place)
    for line, (colour, dashes) in zip(lines, LOOKS, strict=False):
        if line:
            path = "M" + " L".join(place(at, value) for at, value in line)
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    return parts


def _grid(top: float, highest: float, seconds: float, place: Callable[[float, float], str]) -> list[str]:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = top + PANEL_HEIGHT * (1 - share)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#4b5563">{highest * share:.3g}</text>')
        x, _ = place(seconds * share, 0).split()
        shown = f"{seconds * share / 60:.3g} min"
        parts.append(f'<text x="{x}" y="{top + PANEL_HEIGHT + 16}" text-anchor="middle" fill="#4b5563">{shown}</text>')
    return parts
