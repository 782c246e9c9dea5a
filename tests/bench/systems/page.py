"""The tables of docs/peers.md, made from the figures of a run.

python page.py FOLDER     writes the tables of peers.md, and peers.svg, in this folder anew from its peers.json
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.systems import latency
from bench.systems.chart import drawn
from bench.systems.figures import Figures
from bench.systems.systems import (
    BATCH,
    EMBEDDED,
    EMBEDDED_TOGETHER,
    EMPTY,
    ON_RABBITMQ,
    ON_RABBITMQ_TOGETHER,
    ONE,
    PIKA,
    PLAIN,
    PUSHED_KEYS,
    SYSTEMS,
    System,
    find_system,
)

Row = tuple[str, int]
"""A system and its batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The row ``row`` must have at least ``least`` times the rate of the row ``against``."""

    row: Row
    against: Row
    least: float


TARGETS = (
    Target(row=(ON_RABBITMQ, BATCH), against=(PLAIN, ONE), least=4.0),
    Target(row=(ON_RABBITMQ, BATCH), against=(PIKA, ONE), least=1.9),
    Target(row=(EMBEDDED, BATCH), against=("postgres-pgmq", BATCH), least=1.0),
    Target(row=(EMBEDDED, BATCH), against=("redis-always", BATCH), least=1.2),
    Target(row=(ON_RABBITMQ, ONE), against=(EMPTY, ONE), least=0.35),
    Target(row=(EMBEDDED, ONE), against=(EMPTY, ONE), least=0.35),
    Target(row=(ON_RABBITMQ_TOGETHER, ONE), against=(EMPTY, ONE), least=0.6),
    Target(row=(EMBEDDED_TOGETHER, ONE), against=(EMPTY, ONE), least=0.6),
)
P99_RATIO_MAX = 1.3
TOGETHER = {ON_RABBITMQ: ON_RABBITMQ_TOGETHER, EMBEDDED: EMBEDDED_TOGETHER}
"""The same store, with the acks in the next pop."""


def tables(figures: Figures) -> dict[str, str]:
    """Return the text of each block of the page."""
    return {
        "conditions": _conditions(figures),
        "targets": _targets(figures),
        "batches": _rates(figures, batch_rows(figures)),
        "one": _rates(figures, one_rows(figures)),
        "latency": _latency(figures),
        "faster": _faster(figures),
        "systems": _systems(figures),
    }


def filled(page: str, figures: Figures) -> str:
    """Return the page with its blocks written anew. Raises: ValueError if a block is missing."""
    for name, text in tables(figures).items():
        begin, end = f"<!-- figures: {name} -->\n", "<!-- /figures -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ValueError(f"the page has no block of figures {name!r}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def write(folder: Path) -> None:
    """Write the tables and the plot anew from the figures in the folder."""
    figures = Figures.read(folder / "peers.json")
    page = folder / "peers.md"
    page.write_text(filled(page.read_text(), figures))
    (folder / "peers.svg").write_text(drawn(figures, batch_rows(figures), one_rows(figures)))


def batch_rows(figures: Figures) -> list[Row]:
    """Return the rows with batches, and the consumers to which RabbitMQ pushes, the fastest first."""
    rows = [(system.key, ONE if system.key in PUSHED_KEYS else BATCH) for system in SYSTEMS]
    return _sorted(figures, rows)


def one_rows(figures: Figures) -> list[Row]:
    """Return the rows of single messages, the fastest first."""
    return _sorted(figures, [(system.key, ONE) for system in SYSTEMS if system.key not in PUSHED_KEYS])


def _sorted(figures: Figures, rows: Iterable[Row]) -> list[Row]:
    return sorted((row for row in rows if figures.has(*row)), key=lambda row: -figures.rate(*row))


# -- the blocks ----------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _conditions(figures: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    rounds = f"{figures.rounds} round{'s' if figures.rounds > 1 else ''}"
    lines = [
        f"- {figures.date}, `{figures.command}`, medians of {rounds}",
        (
            f"- {figures.machine}; a synced write of 4 KiB takes {figures.sync_ms:.2f} ms; "
            f"load before the start: {figures.load:.1f}"
        ),
        f"- {versions}",
        *(f"- skipped: {line}" for line in figures.skipped),
    ]
    return "\n".join(lines)


def _rates(figures: Figures, rows: Iterable[Row]) -> str:
    head = ("", "msg/s", "ratio to aio-pika", "client, µs a message", "server, µs a message", "durability")
    return _table(
        head,
        [
            (
                f"**{_name(key)}**" if key.startswith("popgate") else _name(key),
                f"{figures.rate(key, batch):,.0f}",
                _ratio(figures, (key, batch), (PLAIN, ONE)),
                f"{figures.client_us(key, batch):,.0f}",
                f"{figures.server_us(key, batch):,.0f}",
                find_system(key).durability,
            )
            for key, batch in rows
        ],
    )


def _targets(figures: Figures) -> str:
    rows: list[tuple[str, ...]] = []
    for target in TARGETS:
        key, batch = target.row
        size = "one by one" if batch == ONE else f"batches of {batch}"
        if not (figures.has(*target.row) and figures.has(*target.against)):
            rows.append(
                (f"{_name(key)}, {size}", _name(target.against[0]), f"≥ {target.least}x", "", "", "not measured")
            )
            continue
        ratio = figures.ratio(target.row, target.against)
        together = TOGETHER.get(key, "")
        rows.append(
            (
                f"{_name(key)}, {size}",
                _name(target.against[0]),
                f"≥ {target.least}x",
                f"{ratio:.2f}x",
                _ratio(figures, (together, batch), target.against),
                "**reached**" if ratio >= target.least else "missed",
            )
        )
    rows.append(_latency_target(figures))
    return _table(("", "against", "target", "measured", "with settle on pop", ""), rows)


def _latency_target(figures: Figures) -> tuple[str, ...]:
    name = (f"popgate on RabbitMQ, publish to pop at {latency.RATE:,}/s, p99", _name(PLAIN), f"≤ {P99_RATIO_MAX}x")
    if not figures.latencies:
        return (*name, "", "", "not measured")
    ratio = figures.latency_ratio(latency.POPGATE, latency.PLAIN, "p99")
    return (*name, "", f"{ratio:.2f}x", "**reached**" if ratio <= P99_RATIO_MAX else "missed")


def _latency(figures: Figures) -> str:
    if not figures.latencies:
        return "Not measured in this run."
    rows: list[tuple[str, ...]] = []
    for percent in latency.PERCENTILES:
        which = f"p{percent}"
        plain, popgate = (figures.latency(way, which) for way in (latency.PLAIN, latency.POPGATE))
        ratio = figures.latency_ratio(latency.POPGATE, latency.PLAIN, which)
        rows.append((which, f"{plain:.1f} ms", f"{popgate:.1f} ms", f"**{ratio:.2f}x**"))
    return _table(("", "aio-pika consumer", "popgate on RabbitMQ", ""), rows)


def _faster(figures: Figures) -> str:
    """Name each system that is faster than popgate, and say why."""
    lines: list[str] = []
    for system in SYSTEMS:
        wins = [f"**{ratio:.2g}x** {what}" for what, ratio in _advantages(figures, system) if ratio > 1 and system.why]
        if wins:
            lines.append(f"- **{system.name}**: {' and '.join(wins)}. Why: {system.why}.")
    return "\n".join(lines) or "None is faster in this run."


def _advantages(figures: Figures, system: System) -> Iterable[tuple[str, float]]:
    """Yield each of the system's rates as a ratio to the better one of popgate's."""
    for batch in system.totals:
        size = BATCH if system.key in PUSHED_KEYS else batch
        rivals = [(key, size) for key in (system.rival, TOGETHER[system.rival]) if figures.has(key, size)]
        if rivals and figures.has(system.key, batch):
            name = f"of {_name(system.rival)} {'one by one' if size == ONE else f'in batches of {size}'}"
            yield name, min(figures.ratio((system.key, batch), rival) for rival in rivals)


def _systems(figures: Figures) -> str:
    measured = [system for system in SYSTEMS if any(figures.has(system.key, batch) for batch in system.totals)]
    return _table(
        ("", "client", "how a message is taken and settled"),
        [(system.name, system.library, system.settlement) for system in measured],
    )


def _name(key: str) -> str:
    return find_system(key).name


def _ratio(figures: Figures, row: Row, against: Row) -> str:
    if not (figures.has(*row) and figures.has(*against)):
        return ""
    return f"{figures.ratio(row, against):.2f}x"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
