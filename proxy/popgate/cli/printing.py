"""Prints to standard output: JSON lines for programs, or a table for human readers.

Control characters in a message could control the user's terminal. So a table shows them escaped. The JSON encoder
escapes most control characters, and this module escapes the rest (DEL and C1).
"""

import argparse
import json
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from popgate.auth.keys import without_credentials

JsonObject: TypeAlias = Mapping[str, Any]

CELL_LENGTH_MAX = 60
_CREDENTIALS = re.compile(r"(:/{1,2})[^\s'\"]*@")
_LEFT_BY_JSON = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and a function that reads the column's cell from a row."""

    title: str
    cell: Callable[[JsonObject], str]


class Printer:
    """Prints rows as JSON lines or as a table. The header of a table is printed once, before the first row."""

    def __init__(self, columns: Sequence[Column], *, as_table: bool) -> None:
        self._columns = columns
        self.as_table = as_table
        self._widths: list[int] = []

    def print(self, rows: Iterable[JsonObject]) -> None:
        """Write the rows and flush. When this returns, the rows have left the process. Raises: BrokenPipeError."""
        if self.as_table:
            self._print_table([[column.cell(row) for column in self._columns] for row in rows])
        else:
            for row in rows:
                print(json_line(row))
        sys.stdout.flush()

    def start_again(self) -> None:
        """Print the header again before the next row."""
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
    """Return whether to print a table, as ``--output`` requests. Without this flag, print a table only on a
    terminal."""
    output: str | None = getattr(arguments, "output", None)
    return sys.stdout.isatty() if output is None else output == "table"


def json_line(value: JsonObject) -> str:
    """Return the value as one line of JSON without control characters."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LEFT_BY_JSON)


def visible(text: str) -> str:
    """Return the text on one line. All characters that would control a terminal are escaped."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def clipped(text: str) -> str:
    """Return the text, or its beginning if it is long, with control characters escaped."""
    shown = visible(text[: CELL_LENGTH_MAX + 1])
    return shown if len(shown) <= CELL_LENGTH_MAX else shown[: CELL_LENGTH_MAX - 3] + "..."


def field(name: str, missing: str = "-") -> Callable[[JsonObject], str]:
    """Return a function that returns the cell of a row: the value of the field with this name, or ``missing``."""

    def cell(row: JsonObject) -> str:
        value = row.get(name)
        return missing if value is None else visible(str(value))

    return cell


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units, such as ``2h 5m``, or ``-`` for None."""
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
    """Return whether the reader of standard output has closed it, as in ``popgate tail T | head``. Otherwise only the
    next write would fail."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))
    except OSError:  # standard output has no descriptor, as in a test
        return False


def complain(text: str) -> None:
    """Print a line, or several, on standard error, with the prefix ``popgate: ``. Control characters are escaped.
    Credentials are not shown."""
    shown = "\n".join(map(visible, without_secrets(text).split("\n")))
    print(f"popgate: {shown}", file=sys.stderr)


def without_secrets(text: str) -> str:
    """Return ``text`` without API keys and tokens, and without what may be the user and the password in a URL."""
    return _CREDENTIALS.sub(r"\1...@", without_credentials(text))
