"""Defines what several commands have in common: a parser, the flags of every client command, and functions that parse
and check values.

The parsed arguments contain a common flag only if the user gave it. So ``popgate topics --url X list`` and ``popgate
topics list --url X`` mean the same.
"""

import argparse
import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NoReturn, TypeAlias, cast

from popgate.cli.printing import without_secrets

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # pyright: ignore[reportPrivateUsage]  # no public name
Command: TypeAlias = Callable[[argparse.Namespace], int]

TIMEOUT_SECONDS = 5.0
TOKEN_FILE_HELP = (
    "file with an API key or a token (default: the token in POPGATE_TOKEN, or the file in POPGATE_TOKEN_FILE)"
)


class Parser(argparse.ArgumentParser):
    """A parser that accepts flags before, between and after the positional arguments.

    At the first flag, argparse sets an optional positional argument to its default, and then rejects a value that
    follows later. argparse's ``parse_intermixed_args`` does not support subcommands. So this parser first reads the
    flags up to ``--``, and then the positional arguments from the rest. A flag with argparse.REMAINDER receives
    everything that follows, including flags and ``--``.
    """

    _reads_flags = False

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error without credentials, which a user may have given in the wrong place. Exit."""
        super().error(without_secrets(message))

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # one signature for its overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:  # the command's parser reads the words after the command's name
            return super().parse_known_args(words, namespace)
        end = words.index("--") if "--" in words else len(words)
        greedy = self._greedy_actions()
        cut = next((at for at, word in enumerate(words[:end]) if word in greedy), None)
        if cut is not None:
            action, taken = greedy[words[cut]], words[cut + 1 :]
            with _not_required([action]):
                namespace, rest = self._parse_flags_first(words[:cut], cut, namespace)
            setattr(namespace, action.dest, taken)
            return namespace, rest
        return self._parse_flags_first(words, end, namespace)

    def _parse_flags_first(self, words: list[str], end: int, namespace: Any) -> tuple[Any, list[str]]:
        usage, self.usage = self.usage, self.format_usage().removeprefix("usage: ").replace("%", "%%")
        try:
            positionals = self._get_positional_actions()
            self._reads_flags = True
            try:
                with _not_required(positionals):
                    namespace, rest = super().parse_known_args(words[:end], namespace)
            finally:
                self._reads_flags = False
            with _not_required([*self._get_optional_actions(), *self._mutually_exclusive_groups]):
                return super().parse_known_args([*rest, *words[end:]], namespace)
        finally:
            self.usage = usage

    def _greedy_actions(self) -> dict[str, argparse.Action]:
        """Return the actions with REMAINDER, by flag. argparse alone would not let the words after such a flag contain
        ``--``."""
        actions = [action for action in self._get_optional_actions() if action.nargs == argparse.REMAINDER]
        return {flag: action for action in actions for flag in action.option_strings}

    def _get_positional_actions(self) -> list[argparse.Action]:
        return [] if self._reads_flags else super()._get_positional_actions()


@contextmanager
def _not_required(things: Iterable[Any]) -> Generator[None]:
    """Within the context, make the given actions or groups of a parser optional."""
    required = [thing for thing in things if thing.required]
    for thing in required:
        thing.required = False
    try:
        yield
    finally:
        for thing in required:
            thing.required = True


def add_command(commands: Commands, name: str, run: Command, *, help: str, epilog: str) -> Parser:
    """Add a client command with the common flags, and return its parser. The command's help begins with ``help`` and
    ends with ``epilog``."""
    parser = add_plain_command(commands, name, help, epilog, [_common_flags()])
    parser.set_defaults(run=run)
    return parser


def add_plain_command(commands: Commands, name: str, help: str, epilog: str, parents: Sequence[Parser] = ()) -> Parser:
    """Add a command with the flags of ``parents``, and return its parser. The command's help begins with ``help`` and
    ends with ``epilog``."""
    return commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=parents,
    )


def _common_flags() -> Parser:
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common = parser.add_argument_group("flags of every client command")
    common.add_argument("--url", help="URL of popgate (POPGATE_URL; default: http://127.0.0.1:8080)")
    common.add_argument("--token-file", metavar="FILE", help=TOKEN_FILE_HELP)
    common.add_argument(
        "--output",
        choices=("json", "table"),
        help="JSON lines or a table (default: a table on a terminal, JSON lines otherwise)",
    )
    common.add_argument(
        "--timeout",
        type=seconds(0, 86_400),
        metavar="SECONDS",
        help=f"how long to retry while the server is unreachable or not ready (default: {TIMEOUT_SECONDS:g})",
    )
    return parser


def seconds(minimum: float, maximum: float = inf) -> Callable[[str], float]:
    """Return a function that parses a number of seconds between the given limits."""

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
    """Return a function that parses a whole number between the given limits."""

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
    """Parse a header in the form ``name=value``. The value may be empty, and may contain equals signs."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be name=value, not {text!r}")
    return name, value


def header_filter(text: str) -> dict[str, list[Any]]:
    """Parse a header filter in the form of the HTTP interface: a JSON object that maps each header to its permitted
    values.

    The server checks the values.
    """
    try:
        wanted: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON, not {text!r} ({error})") from error
    if not isinstance(wanted, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, header: value or [values], not {text!r}")
    given = cast("dict[str, Any]", wanted)
    return {name: value if isinstance(value, list) else [value] for name, value in given.items()}


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _range(minimum: float, maximum: float) -> str:
    return f"from {minimum:g} to {maximum:.15g}" if maximum < inf else f"of at least {minimum:g}"
