"""Defines what several commands have in common: a parser, the flags of every client command, and functions that parse
and check values.

The parsed arguments contain a common flag only if the user gave it. So ``popgate topics --url X list`` and ``popgate
topics list --url X`` mean the same.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NoReturn, TypeAlias, cast

from popgate.cli.former_flags import FormerFlag, add_former
from popgate.cli.printing import Output, without_secrets
from popgate.cli.suggestions import closest, closest_flag, did_you_mean

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # pyright: ignore[reportPrivateUsage]  # no public name
Command: TypeAlias = Callable[[argparse.Namespace], int]

COMMANDS = argparse._SubParsersAction  # pyright: ignore[reportPrivateUsage]  # no public name
TIMEOUT_SECONDS = 5.0
USAGE_LINES_MAX = 5
"""Maximum number of lines of a usage that is printed with an error."""
_NEGATIVE = re.compile(r"-\d+(\.\d*)?$")
TOKEN_FILE_HELP = (
    "file with an API key or a token (default: the token in POPGATE_TOKEN, or the file in POPGATE_TOKEN_FILE)"
)


class Parser(argparse.ArgumentParser):
    """A parser that accepts flags before, between and after the positional arguments.

    At the first flag, argparse sets an optional positional argument to its default, and then rejects a value that
    follows later. argparse's ``parse_intermixed_args`` does not support subcommands. So this parser first reads the
    flags up to ``--``, and then the positional arguments from the rest. A flag with argparse.REMAINDER receives
    everything that follows, including flags and ``--``.

    It suggests a command, a flag or a value in place of an unknown one. Without a required subcommand, it prints its
    help.
    """

    _reads_flags = False

    def error(self, message: str) -> NoReturn:
        """Print the error without credentials, which a user may have given in the wrong place. Exit.

        The usage is printed too, unless it is long.
        """
        usage = self.format_usage()
        shown = usage if usage.count("\n") <= USAGE_LINES_MAX else ""
        self.exit(2, f"{shown}{self.prog}: error: {without_secrets(message)}\nsee: {self.prog} --help\n")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # one signature for its overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        required = [action for action in self._actions if action.required]
        try:
            return self._parse_known(words, namespace)
        finally:
            for action in required:  # a former flag may have changed it
                action.required = True

    def _parse_known(self, words: list[str], namespace: Any) -> tuple[Any, list[str]]:
        if self._subparsers is not None:  # the command's parser reads the words after the command's name
            self._check_before_command(words)
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
            self._refuse_unknown_flags(rest)
            with _not_required([*self._get_optional_actions(), *self._mutually_exclusive_groups]):
                namespace, rest = super().parse_known_args([*rest, *words[end:]], namespace)
            if rest and not self.subcommands():
                self.error(f"unrecognized arguments: {' '.join(rest)}")
            return namespace, rest
        finally:
            self.usage = usage

    def _check_before_command(self, words: list[str]) -> None:
        """Print the help and exit if a required subcommand is missing. Refuse unknown flags before the subcommand.

        argparse would take the value of an unknown flag for the subcommand.
        """
        if not words and self.needs_subcommand():
            self.print_help(sys.stderr)
            self.exit(2)
        waiting = iter(words)
        for word in waiting:
            if not word.startswith("-") or word == "--":
                return
            action = self._option_string_actions.get(word.partition("=")[0])
            if action is None and word.startswith("--"):
                self._refuse_unknown_flags([word])
            elif action is not None and action.nargs is None and "=" not in word:
                next(waiting, None)

    def _refuse_unknown_flags(self, words: list[str]) -> None:
        """Exit if ``words``, which no flag of this parser has taken, contain a flag."""
        flags = [at for at, one in enumerate(words) if len(one) > 1 and one[0] == "-" and not _NEGATIVE.match(one)]
        if flags:
            found = closest_flag(words[flags[0]], self.known_flags())
            self.error(f"unrecognized arguments: {' '.join(words[flags[0] :])}{did_you_mean(found)}")

    def all_actions(self) -> Sequence[argparse.Action]:
        """Return the actions of all flags and positional arguments."""
        return self._actions

    def action_of(self, flag: str) -> argparse.Action | None:
        """Return the action of a flag, or None if there is no such flag."""
        return self._option_string_actions.get(flag)

    def subcommands(self) -> dict[str, "Parser"]:
        """Return the parsers of the commands below this one, by name."""
        for action in self._actions:
            if isinstance(action, COMMANDS):
                return dict(cast("Commands", action).choices)
        return {}

    def needs_subcommand(self) -> bool:
        """Return whether this command can't be run itself."""
        return any(isinstance(action, COMMANDS) and action.required for action in self._actions)

    def known_flags(self) -> dict[str, str]:
        """Return the flags of this parser, each with the flag to suggest in its place: a former flag has a new one, and
        other flags that the help does not show are left out."""
        known: dict[str, str] = {}
        for action in self._actions:
            if isinstance(action, FormerFlag):
                known |= dict.fromkeys(action.option_strings, action.spelling)
            elif action.help != argparse.SUPPRESS:
                known |= {flag: flag for flag in action.option_strings}
        return known

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error that names the closest of the permitted values. argparse would only list all of them."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(one) for one in action.choices]
        found = closest(str(value), choices)
        if isinstance(action, COMMANDS):
            hint = did_you_mean(found) or f"; there are: {', '.join(choices)}"
            raise argparse.ArgumentError(None, f"unknown {str(action.metavar).lower()} {value!r}{hint}")
        raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}, not {value!r}{did_you_mean(found)}")

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
        "--timeout-seconds",
        dest="timeout",
        type=seconds(0, 86_400),
        metavar="SECONDS",
        help=f"how long to retry while the server is unreachable or not ready (default: {TIMEOUT_SECONDS:g})",
    )
    add_former(common, "--timeout", "--timeout-seconds")
    add_output_flags(common)
    return parser


def add_output_flags(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]  # no public name
    default: str = "table on a terminal, json otherwise",
) -> None:
    """Add ``-o`` and ``-q``, which ``printing`` reads. ``default`` describes the output without ``-o``."""
    parser.add_argument(
        "-o",
        "--output",
        choices=[one.value for one in Output],
        default=argparse.SUPPRESS,
        help=f"json (an object in each line), table, wide (a table with everything), or name (default: {default})",
    )
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print no notes, and nothing about a change that succeeded",
    )


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
