"""Keeps the former spelling of a flag working. The help and the completion show only the new spelling.

The command line collects the former flags that the user gave, and ``commands`` prints a note about each of them.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, cast

NOTES = "former_flags"
"""Name of the parsed list of notes about former flags."""


class FormerFlag(argparse.Action):
    """The former spelling of another flag. It acts like the other flag, and adds a note to the parsed arguments."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        current: argparse.Action,
        spelling: str,
        fixed: Any,
        default: Any = None,
    ) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=0 if fixed is not None else current.nargs,
            const=current.const,
            default=argparse.SUPPRESS,
            type=None if fixed is not None else cast("Callable[[str], Any] | None", current.type),
            choices=None if fixed is not None else current.choices,
            help=argparse.SUPPRESS,
        )
        self.current = current
        self.spelling = spelling
        self._fixed = fixed

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the value of the current flag, which then does not need to be given."""
        self.current.required = False  # `Parser` restores it
        value = values if self._fixed is None else self._fixed
        self.current(parser, namespace, value, self.spelling.partition(" ")[0])
        note = f"{option_string} is now {self.spelling}; the former flag still works"
        setattr(namespace, NOTES, [*getattr(namespace, NOTES, ()), note])


def add_former(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]  # no public name
    former: str,
    spelling: str,
    *,
    value: Any = None,
) -> None:
    """Let ``former`` mean the flag ``spelling``, which ``parser`` already has.

    ``spelling`` may be a flag with a value, such as ``--show queues``, which a former flag without a value stands for;
    ``value`` is that value in its parsed form.
    """
    flag = spelling.partition(" ")[0]
    actions = parser._actions  # pyright: ignore[reportPrivateUsage]  # argparse has no public way
    current = next(one for one in actions if flag in one.option_strings)
    parser.add_argument(former, action=FormerFlag, dest=current.dest, current=current, spelling=spelling, fixed=value)


def former_notes(parsed: argparse.Namespace) -> list[str]:
    """Return one note about each different former flag that the user gave."""
    return list(dict.fromkeys(getattr(parsed, NOTES, ())))
