"""What goes to standard output: JSON lines for programs, a table for people.

A table makes everything visible: control characters, which a message may use to take over a terminal, are escaped. In
JSON they are escaped by the format, and what the format leaves (DEL and C1) here.
"""

import argparse
import json
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

JsonObject: TypeAlias = Mapping[str, Any]

CELL_LENGTH_MAX = 60
_LEFT_BY_JSON = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: how its cell is read from a row."""

    title: str
    cell: Callable[[JsonObject], str]


class Printer:
    """Prints rows, in one format. The header of a table comes before its first row, and once."""

    def __init__(self, columns: Sequence[Column], *, as_table: bool) -> None:
        self._columns = columns
        self.as_table = as_table
        self._widths: list[int] = []

    def print(self, rows: Iterable[JsonObject]) -> None:
        """Write the rows and flush: when this returns, they have left the process. Raises: BrokenPipeError."""
        if self.as_table:
            self._print_table([[column.cell(row) for column in self._columns] for row in rows])
        else:
            for row in rows:
                print(json_line(row))
        sys.stdout.flush()

    def start_again(self) -> None:
        """The next row gets a header again."""
        self._widths = []

    def _print_table(self, cells: Sequence[Sequence[str]]) -> None:
        if not cells:
            return
        titles = [column.title for column in self._columns]
        lines = cells if self._widths else [titles, *cells]
        known = self._widths or [0] * len(titles)
        self._widths = [max(width, *(len(line[at]) for line in lines)) for at, width in enumerate(known)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, self._widths, strict=True)).rstrip())


def wants_table(arguments: argparse.Namespace) -> bool:
    """As ``--output`` says; else a table on a terminal."""
    output: str | None = getattr(arguments, "output", None)
    return sys.stdout.isatty() if output is None else output == "table"


def json_line(value: JsonObject) -> str:
    """One line of JSON, harmless on a terminal."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LEFT_BY_JSON)


def visible(text: str) -> str:
    """The text on one line, with everything that a terminal would obey escaped."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def clipped(text: str) -> str:
    """The beginning of a long text, made visible."""
    shown = visible(text[: CELL_LENGTH_MAX + 1])
    return shown if len(shown) <= CELL_LENGTH_MAX else shown[: CELL_LENGTH_MAX - 3] + "..."


def field(name: str, missing: str = "-") -> Callable[[JsonObject], str]:
    """A cell that shows one field."""

    def cell(row: JsonObject) -> str:
        value = row.get(name)
        return missing if value is None else visible(str(value))

    return cell


def duration(seconds: float | None) -> str:
    """A length of time in its two largest units, such as ``2h 5m``; ``-`` where there is none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    parts: list[str] = []
    rest = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def reader_gone() -> bool:
    """Whether nobody can read standard output any more, as after ``| head``; only a write would say so otherwise."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))
    except OSError:  # standard output is no file, as under a test
        return False


def complain(line: str) -> None:
    """One line on standard error, as every complaint of ``popgate`` looks."""
    print(f"popgate: {line}", file=sys.stderr)
