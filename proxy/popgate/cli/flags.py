"""What the commands' flags have in common: the flags of every client command, and checked kinds of values.

The common flags stand in the parsed arguments only where they were given, so that ``popgate topics --url X list`` and
``popgate topics list --url X`` mean the same.
"""

import argparse
from collections.abc import Callable
from math import inf
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]  # it has no public name
Command: TypeAlias = Callable[[argparse.Namespace], int]

TIMEOUT_SECONDS = 5.0


def add_command(commands: Commands, name: str, run: Command, *, help: str, epilog: str) -> argparse.ArgumentParser:
    """A client command with the common flags; the first line of its help is ``help``, its end ``epilog``."""
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[_common_flags()],
    )
    parser.set_defaults(run=run)
    return parser


def _common_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common = parser.add_argument_group("flags of every client command")
    common.add_argument("--url", help="where popgate is (POPGATE_URL; default: http://127.0.0.1:8080)")
    common.add_argument(
        "--output",
        choices=("json", "table"),
        help="JSON lines or a table (default: a table on a terminal, JSON lines otherwise)",
    )
    common.add_argument(
        "--timeout",
        type=seconds(0, 86_400),
        metavar="SECONDS",
        help=f"keep trying that long while the server is away or not ready (default: {TIMEOUT_SECONDS:g})",
    )
    return parser


def seconds(minimum: float, maximum: float = inf) -> Callable[[str], float]:
    """Seconds within these limits."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum or value == inf:
            raise argparse.ArgumentTypeError(f"must be seconds {_range(minimum, maximum)}, not {text!r}")
        return value

    return parse


def number(minimum: float, maximum: float = inf) -> Callable[[str], int]:
    """A whole number within these limits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number {_range(minimum, maximum)}, not {text!r}")
        return value

    return parse


def header(text: str) -> tuple[str, str]:
    """A header as ``name=value``; the value may be empty and may hold more equals signs."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be name=value, not {text!r}")
    return name, value


def _range(minimum: float, maximum: float) -> str:
    return f"from {minimum:g} to {maximum:.15g}" if maximum < inf else f"of at least {minimum:g}"
