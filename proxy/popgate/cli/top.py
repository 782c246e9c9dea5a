"""Defines ``popgate top``, which shows the subscriptions and their rates, live on a terminal."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from popgate.cli.client_errors import explain
from popgate.cli.connecting import open_client, url_of
from popgate.cli.endings import ExitCode
from popgate.cli.flags import Commands, add_command, number, seconds
from popgate.cli.pending_read import PendingRead
from popgate.cli.printing import (
    Column,
    JsonObject,
    Printer,
    bold,
    clipped,
    complain,
    duration,
    field,
    note,
    output_of,
    visible,
)
from popgate.cli.screen import Screen, screen
from popgate.cli.top_figures import Reading, read_figures, rows_of
from popgate_client import Client, RetryLater

INTERVAL_SECONDS = 2.0
PAUSE_FACTOR = 3.0
"""How many times longer than a look the pause after it is, at least, if no interval is given: a look asks for the state
of each subscription."""
PATIENCE_SECONDS = 3.0
"""Seconds without an answer after which the live display says so."""
EPILOG = """\
Shows for each subscription: ready, blocked, in flight, delayed and dead messages, the age of the oldest message known
to wait, the messages per second that came and that were acked since the previous look, and the pops that wait. Rates
and waiting pops need the permission 'metrics'.

On a terminal, the display is updated until q or Ctrl-C. Keys: r ready, f in flight, d dead, a age, i in, o out, p
pollers, n name: sort by this; j and k, or the arrows, scroll. Elsewhere, or with -o, it prints one table or JSON lines,
after one interval; with --interval-seconds it repeats, with --count N it prints N times.

examples:
  popgate top
  popgate top orders --sort age
  popgate top -o json --interval-seconds 10 >> figures.jsonl
  popgate top -o table --interval-seconds 5 --count 12
"""


@dataclass(frozen=True, slots=True)
class _Sort:
    field: str
    title: str
    key: str


SORTS = {
    "ready": _Sort("ready", "READY", "r"),
    "in-flight": _Sort("in_flight", "IN FLIGHT", "f"),
    "dead": _Sort("dead", "DEAD", "d"),
    "age": _Sort("oldest_age_seconds", "OLDEST", "a"),
    "in": _Sort("in_per_second", "IN/S", "i"),
    "out": _Sort("out_per_second", "OUT/S", "o"),
    "pollers": _Sort("pollers", "POLLERS", "p"),
    "name": _Sort("topic", "TOPIC", "n"),
}
KEYS = {sort.key: name for name, sort in SORTS.items()}
DOWN, UP = ("j", "\x1b[B", "\x1bOB"), ("k", "\x1b[A", "\x1bOA")


def _rate(name: str) -> Column:
    def cell(row: JsonObject) -> str:
        rate: float | None = row[name]
        return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"

    return Column({"in_per_second": "IN/S", "out_per_second": "OUT/S"}[name], cell)


COLUMNS = (
    Column("TOPIC", field("topic"), clips=True),
    Column("GROUP", field("group"), clips=True),
    Column("READY", field("ready")),
    Column("IN FLIGHT", field("in_flight")),
    Column("DEAD", field("dead")),
    Column("OLDEST", lambda row: duration(row["oldest_age_seconds"])),
    _rate("in_per_second"),
    _rate("out_per_second"),
    Column("POLLERS", field("pollers")),
    Column("BLOCKED", field("blocked")),
    Column("DELAYED", field("delayed")),
    Column("MODE", field("mode")),
)
"""The columns in the order of their importance: a narrow terminal shows only the first ones."""
TEXTS = ("TOPIC", "GROUP", "MODE")
"""The columns that are aligned to the left."""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "top", top, help="show subscriptions and their rates, live", epilog=EPILOG)
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="default: all topics")
    parser.add_argument("group", metavar="GROUP", nargs="?", help="default: all groups")
    parser.add_argument("--sort", choices=SORTS, default="ready", help="sort by this, the largest first")
    parser.add_argument(
        "--interval-seconds",
        type=seconds(0.1, 86_400),
        metavar="SECONDS",
        help=f"time between two looks (default: {INTERVAL_SECONDS:g}, or longer with very many groups)",
    )
    parser.add_argument("--count", type=number(1), metavar="N", help="print N times, and end")


def top(arguments: argparse.Namespace) -> int:
    """Show the subscriptions live, or print them."""
    is_live = sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty() and arguments.count is None
    with open_client(arguments) as client:
        if is_live and "output" not in arguments:
            return _live(client, arguments)
        return _print(client, arguments)


def _sorted(rows: Sequence[JsonObject], by: str) -> list[JsonObject]:
    """Return the rows with the largest figure first; rows with equal or unknown figures are in the order of names."""
    named = sorted(rows, key=lambda row: (row["topic"], row["group"]))
    if by == "name":
        return named
    return sorted(named, key=lambda row: -1.0 if row[SORTS[by].field] is None else row[SORTS[by].field], reverse=True)


def _print(client: Client, arguments: argparse.Namespace) -> int:
    """Print the figures after each interval: as often as --count says, or until Ctrl-C if only --interval-seconds is
    given, or once."""
    interval: float = arguments.interval_seconds or INTERVAL_SECONDS
    repeats = arguments.interval_seconds is not None and arguments.count is None
    count: int = arguments.count or 1
    printer = Printer(COLUMNS, output_of(arguments), name=lambda row: f"{row['topic']} {row['group']}")
    before = read_figures(client, arguments.topic, arguments.group)
    for at in itertools.count(1):
        time.sleep(interval)
        try:
            now = read_figures(client, arguments.topic, arguments.group)
        except RetryLater as error:
            if not repeats:
                raise
            complain(explain(error, url_of(arguments)))
            continue
        printer.print(_sorted(rows_of(before, now), arguments.sort))
        if not now.states:
            note(arguments, "no subscriptions")
        before = now
        if not repeats and at >= count:
            break
    return ExitCode.OK


@dataclass(slots=True)
class _View:
    """What the live display shows."""

    url: str
    sort: str
    rows: Sequence[JsonObject] = ()
    trouble: str | None = None
    first: int = 0

    def lines(self, width: int, height: int) -> list[str]:
        """Return the lines of the display, none longer than ``width``, and at most ``height``."""
        height = max(height, 4)
        rows = _sorted(self.rows, self.sort)
        space = height - 3
        self.first = max(0, min(self.first, len(rows) - space))
        shown = rows[self.first : self.first + space]
        head = (
            f"popgate top  {visible(self.url)}  {len(rows)} subscription{'' if len(rows) == 1 else 's'}, by {self.sort}"
        )
        foot = self.trouble or "sort: " + " ".join(f"{sort.key}={name}" for name, sort in SORTS.items()) + "  q=quit"
        table = _table(shown, width)
        if self.trouble is None and not rows:
            table.append("no subscriptions")
        return [head[:width], *(bold(line) for line in table[:1]), *table[1:], foot[:width]]

    def press(self, key: str) -> None:
        if key in KEYS:
            self.sort, self.first = KEYS[key], 0
        elif key in DOWN:
            self.first += 1
        elif key in UP:
            self.first = max(0, self.first - 1)


def _table(rows: Sequence[JsonObject], width: int) -> list[str]:
    """Return the lines of the table. Columns that do not fit are left out, the last ones first; long names are
    shortened."""
    cells = [[column.title for column in COLUMNS]]
    cells += [[clipped(column.cell(row)) for column in COLUMNS] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(COLUMNS))]
    figures = sum(one + 2 for one in widths[2:5])  # ready, in flight and dead are always shown if possible
    name_max = max(5, (width - figures - 2) // 2)
    widths[0], widths[1] = (min(one, name_max) for one in widths[:2])
    fitting = [at for at, end in enumerate(itertools.accumulate(one + 2 for one in widths)) if end - 2 <= width]
    return ["  ".join(_cell(line[at], at, widths[at]) for at in fitting).rstrip()[:width] for line in cells]


def _cell(text: str, at: int, width: int) -> str:
    text = text if len(text) <= width else f"{text[: width - 1]}~"
    return text.ljust(width) if COLUMNS[at].title in TEXTS else text.rjust(width)


def _live(client: Client, arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    before = read_figures(client, arguments.topic, arguments.group)  # an error is shown on the normal screen
    view = _View(client_url(arguments), arguments.sort, rows_of(None, before))
    pending = None
    with screen() as taken:
        while True:
            pause = max(INTERVAL_SECONDS, (time.monotonic() - began) * PAUSE_FACTOR)
            if _wait(taken, view, time.monotonic() + (arguments.interval_seconds or pause)):
                break
            began = time.monotonic()
            pending = PendingRead(partial(read_figures, client, arguments.topic, arguments.group), taken.wake)
            if not _wait_for(pending, taken, view):
                break
            before = _look(pending, arguments, view, before)
    if pending is not None and not pending.is_done:
        sys.stdout.flush()
        os._exit(ExitCode.OK)  # the threads of the read would hold up the end of the process
    return ExitCode.OK


def client_url(arguments: argparse.Namespace) -> str:
    """Return the URL of the server without a password, to be shown."""
    from popgate_client.transport import without_password

    return without_password(url_of(arguments))


def _wait_for(pending: PendingRead[Reading], taken: Screen, view: _View) -> bool:
    """Show the view until the read has ended. Return whether it has: otherwise the user wants to end."""
    began = time.monotonic()
    until = began + PATIENCE_SECONDS
    while not pending.is_done:
        if _wait(taken, view, until, lambda: pending.is_done):
            return False
        if not pending.is_done:
            seconds = round(time.monotonic() - began)
            view.trouble = f"no answer from {view.url} for {seconds} seconds; these are the last figures"
            until = time.monotonic() + 1
    return True


def _look(pending: PendingRead[Reading], arguments: argparse.Namespace, view: _View, before: Reading) -> Reading:
    """Take the figures into ``view``. If the server is away, keep the former ones, and say so in the view."""
    try:
        now = pending.result()
    except RetryLater as error:
        view.trouble = explain(error, url_of(arguments))
        return before
    view.trouble, view.rows = None, rows_of(before, now)
    return now


def _wait(taken: Screen, view: _View, until: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Show the view until a time, or until ``is_over``, and change it at each key. Return whether the user wants to
    end."""
    while not is_over():
        width, height = taken.size
        taken.show(view.lines(width, height))
        key = taken.key(until)
        if key is None:
            return False
        if key in ("q", "Q", "\x04"):
            return True
        view.press(key)
    return False
