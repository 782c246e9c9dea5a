"""Prints to standard output: JSON lines for programs, a table for human readers, or names for shell scripts.

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
from enum import StrEnum
from typing import Any, TextIO, TypeAlias

from popgate import config
from popgate.auth.keys import without_credentials

JsonObject: TypeAlias = Mapping[str, Any]

CELL_LENGTH_MAX = 60
_CREDENTIALS = re.compile(r"(:/{1,2})[^\s'\"]*@")
_LEFT_BY_JSON = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


class Output(StrEnum):
    """A form of the output, as ``-o`` names it."""

    JSON = "json"
    """One JSON object in each line."""
    TABLE = "table"
    WIDE = "wide"
    """A table with all columns, in which nothing is shortened."""
    NAME = "name"
    """Only the name of each row."""

    @property
    def is_table(self) -> bool:
        return self in (Output.TABLE, Output.WIDE)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and a function that reads the column's cell from a row.

    If it ``clips``, long cells are shortened. Only ``-o wide`` shows whole cells, and the columns that are ``is_wide``.
    """

    title: str
    cell: Callable[[JsonObject], str]
    clips: bool = False
    is_wide: bool = False


class Printer:
    """Prints rows in one form. The header of a table is printed once, before the first row.

    ``name`` returns the name of a row for ``-o name``. By default, it is the cell in the first column, if there is one.
    A command that knows only tables and JSON lines may give ``as_table`` in place of ``output``.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        output: Output = Output.JSON,
        *,
        as_table: bool = False,
        name: Callable[[JsonObject], str] | None = None,
    ) -> None:
        self._output = Output.TABLE if as_table else output
        self._columns = [column for column in columns if self._output is Output.WIDE or not column.is_wide]
        self._name = name or (columns[0].cell if columns else json_line)
        self._widths: list[int] = []
        self.count = 0
        """Number of printed rows."""

    @property
    def as_table(self) -> bool:
        return self._output.is_table

    def print(self, rows: Iterable[JsonObject]) -> None:
        """Write the rows and flush. When this returns, the rows have left the process. Raises: BrokenPipeError."""
        if self.as_table:
            self._print_table([self._cells(row) for row in rows])
        else:
            for row in rows:
                self.count += 1
                print(self._name(row) if self._output is Output.NAME else json_line(row))
        sys.stdout.flush()

    def start_again(self) -> None:
        """Print the header again before the next row."""
        self._widths = []

    def _cells(self, row: JsonObject) -> list[str]:
        clips = self._output is not Output.WIDE
        return [clipped(column.cell(row)) if clips and column.clips else column.cell(row) for column in self._columns]

    def _print_table(self, cells: Sequence[Sequence[str]]) -> None:
        if not cells:
            return
        self.count += len(cells)
        titles = [column.title for column in self._columns]
        lines = cells if self._widths else [titles, *cells]
        known = self._widths or [0] * len(titles)
        self._widths = [max(width, *(len(line[at]) for line in lines)) for at, width in enumerate(known)]
        for line in lines:
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, self._widths, strict=True)).rstrip()
            print(bold(text) if line is titles else text)


def output_of(arguments: argparse.Namespace) -> Output:
    """Return the form that ``-o`` requests. Without it, this is a table on a terminal, and JSON lines elsewhere."""
    output: str | None = getattr(arguments, "output", None)
    if output is not None:
        return Output(output)
    return Output.TABLE if sys.stdout.isatty() else Output.JSON


def wants_table(arguments: argparse.Namespace) -> bool:
    """Return whether to print a table, as ``-o`` requests."""
    return output_of(arguments).is_table


def is_quiet(arguments: argparse.Namespace) -> bool:
    """Return whether ``-q`` was given."""
    return getattr(arguments, "quiet", False)


def print_list(
    arguments: argparse.Namespace,
    columns: Sequence[Column],
    rows: Iterable[JsonObject],
    *,
    nothing: str = "",
    name: Callable[[JsonObject], str] | None = None,
) -> None:
    """Print the rows that the user asked for. If there are none, say ``nothing`` on standard error."""
    printer = Printer(columns, output_of(arguments), name=name)
    printer.print(rows)
    if nothing and not printer.count:
        note(arguments, nothing)


def print_change(
    arguments: argparse.Namespace,
    columns: Sequence[Column],
    rows: Iterable[JsonObject],
    *,
    name: Callable[[JsonObject], str] | None = None,
) -> None:
    """Print the result of a command that changed something. With ``-q``, print nothing."""
    if not is_quiet(arguments):
        Printer(columns, output_of(arguments), name=name).print(rows)


def bold(text: str, stream: TextIO | None = None) -> str:
    """Return the text in bold print if the stream, by default standard output, shows colours."""
    return f"\x1b[1m{text}\x1b[0m" if has_colours(stream or sys.stdout) else text


def has_colours(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that shows colours, and the user has not refused them with NO_COLOR
    (https://no-color.org)."""
    known = config.environment()
    return stream.isatty() and not known.get("NO_COLOR") and known.get("TERM", "dumb") != "dumb"


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


def note(arguments: argparse.Namespace, text: str) -> None:
    """Print a line, or several, on standard error about a command that succeeds. With ``-q``, print nothing."""
    if not is_quiet(arguments):
        complain(text)


def complain(text: str) -> None:
    """Print a line, or several, on standard error, with the prefix ``popgate: ``. Control characters are escaped.
    Credentials are not shown."""
    shown = "\n".join(map(visible, without_secrets(text).split("\n")))
    print(f"popgate: {shown}", file=sys.stderr)


def without_secrets(text: str) -> str:
    """Return ``text`` without API keys and tokens, and without what may be the user and the password in a URL."""
    return _CREDENTIALS.sub(r"\1...@", without_credentials(text))
