"""The plot of docs/peers.md: bars of messages a second, drawn as SVG from the figures of a run."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from bench.plot import line, text
from bench.systems.figures import Figures
from bench.systems.systems import find_system

WIDTH, LEFT, RIGHT, TOP, GAP, BOTTOM = 860, 270, 76, 40, 52, 20
BAR, PITCH = 15, 22
OURS, OTHERS = "#0b5fb0", "#9ca3af"


def drawn(figures: Figures, batches: Sequence[tuple[str, int]], ones: Sequence[tuple[str, int]]) -> str:
    """Return the SVG: a panel of the rows with batches, and one of single messages, each with its own scale."""
    second_top = TOP + PITCH * len(batches) + GAP
    height = second_top + PITCH * len(ones) + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#1f2937" role="img">'
    )
    parts = [
        head,
        "<title>Messages a second of popgate and of other systems</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#d1d5db"/>',
        *_panel(figures, "batches of 32, or pushed: messages a second", TOP, batches),
        *_panel(figures, "one by one: messages a second", second_top, ones),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(figures: Figures, title: str, top: float, rows: Sequence[tuple[str, int]]) -> list[str]:
    parts = [f'<text x="{LEFT}" y="{top - 12}" font-weight="bold">{title}</text>']
    highest = max((figures.rate(*row) for row in rows), default=1.0)
    for number, (key, batch) in enumerate(rows):
        y = top + number * PITCH
        rate = figures.rate(key, batch)
        width = (WIDTH - LEFT - RIGHT) * rate / highest
        colour = OURS if key.startswith("popgate") else OTHERS
        parts += [
            text(LEFT - 8, y + 12, escape(find_system(key).name.replace("`", "")), "end"),
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            text(LEFT + width + 6, y + 12, f"{rate:,.0f}", "start"),
        ]
    if rows:
        parts.append(line(LEFT, top - 4, LEFT, top + PITCH * len(rows) - 3, "#6b7280", 1))
    return parts
