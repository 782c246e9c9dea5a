"""The whole command line, command by command: help with examples, ``-o``, and one spelling for each flag.

docs/cli.md lists the flags. A new command's flags belong there.
"""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from popgate.cli.commands import parser
from popgate.cli.flags import Parser
from popgate.cli.former_flags import FormerFlag, former_notes
from popgate.config.options import SETTINGS
from popgate.config.setting import Setting

DOCUMENTATION = Path(__file__).parents[2] / "docs/cli.md"
WITHOUT_OUTPUT = {"serve", "replicas watch", "completion", "config sample"}
"""Commands whose output is not data: log lines, a script, or a file of settings."""
TWO_MEANINGS = {"--queues", "--min-replicas"}
"""Flags of two commands with different values: the names are those of the key file and of a setting."""


@cache
def leaves() -> dict[str, Parser]:
    """Return the parsers of all commands that can be run, by their names. A list is also its command's default action:
    ``topics`` is a leaf, as ``topics list``."""
    return dict(_leaves("", parser()))


def _leaves(name: str, one: Parser) -> Iterator[tuple[str, Parser]]:
    below = one.subcommands()
    if not below or (name and not one.needs_subcommand()):
        yield name, one
    for word, other in below.items():
        yield from _leaves(f"{name} {word}".strip(), other)


def flags_of(one: Parser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the flags that the help shows, without those of settings."""
    settings = {flag for setting in SETTINGS for flag in _setting_flags(setting)}
    for action in one.all_actions():
        for flag in action.option_strings:
            if action.help != argparse.SUPPRESS and flag not in {"-h", "--help", *settings}:
                yield flag, action


def _setting_flags(setting: Setting) -> tuple[str, str]:
    return setting.flag, "--" + setting.flag.removeprefix("--replica-")


def documented(table: str) -> set[str]:
    """Return the flags in the first cells of a table in docs/cli.md."""
    text = DOCUMENTATION.read_text(encoding="utf-8").partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in text.splitlines()]
    return {flag for cell in cells for flag in re.findall(r"`(--?[a-z][a-z-]*)`", cell)}


def former_flags() -> list[tuple[str, FormerFlag]]:
    return [
        (name, action)
        for name, one in leaves().items()
        for action in one.all_actions()
        if isinstance(action, FormerFlag)
    ]


@pytest.mark.parametrize("name", leaves())
def test_every_command_has_a_help_with_an_example_of_itself(name: str) -> None:
    text = leaves()[name].format_help()
    assert f"popgate {name}" in text.partition("examples:\n")[2]
    assert "==SUPPRESS==" not in text


@pytest.mark.parametrize("name", sorted(leaves().keys() - WITHOUT_OUTPUT))
def test_every_command_takes_o_and_q(name: str) -> None:
    flags = dict(flags_of(leaves()[name]))
    assert flags["-o"].choices == ["json", "table", "wide", "name"]
    assert {"-o", "--output", "-q", "--quiet"} <= flags.keys()


def test_docs_cli_lists_every_flag_in_its_one_spelling() -> None:
    known = {flag for one in leaves().values() for flag, _ in flags_of(one)}
    listed = documented("flags")
    assert known - listed == set()
    assert listed - known - {setting.flag for setting in SETTINGS} == set()


def test_docs_cli_lists_every_former_flag() -> None:
    assert {flag for _, action in former_flags() for flag in action.option_strings} == documented("former flags")


def test_a_flag_means_the_same_in_all_commands() -> None:
    forms: dict[str, set[tuple[Any, ...]]] = {}
    for one in leaves().values():
        for flag, action in flags_of(one):
            form = (action.metavar, None if action.nargs == "+" else action.nargs, type(action).__name__)
            forms.setdefault(flag, set()).add(form if flag != "--kind" else form[:2])
    repeated = {"_AppendAction", "_StoreAction"}
    different = {
        flag: found
        for flag, found in forms.items()
        if (len(found) > 1 and not {form[-1] for form in found} <= repeated) or len({form[0] for form in found}) > 1
    }
    assert different.keys() - TWO_MEANINGS == set()


def test_a_flag_with_a_number_of_seconds_says_so() -> None:
    flags = {flag for one in leaves().values() for flag, action in flags_of(one) if action.metavar == "SECONDS"}
    assert {flag for flag in flags if not flag.endswith("-seconds")} == set()


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (
            "pop t --wait 5 --max=3 --invisibility 60",
            "pop t --wait-seconds 5 --max-messages 3 --invisibility-seconds 60",
        ),
        ("release t g h --delay 5", "release t g h --delay-seconds 5"),
        ("extend t g h --invisibility 5", "extend t g h --invisibility-seconds 5"),
        ("publish t b --delay 1 --ttl 2", "publish t b --delay-seconds 1 --ttl-seconds 2"),
        ("stats --watch 2 --timeout 1", "stats --interval-seconds 2 --timeout-seconds 1"),
        ("topics --timeout 1 list", "topics --timeout-seconds 1 list"),
        ("cluster --queues", "cluster --show queues"),
        ("mode t g pull --drain-timeout 3", "mode t g pull --drain-timeout-seconds 3"),
        ("lease-groups ack t g s --through 3", "lease-groups ack t g s --through-epoch 3"),
        ("lease-groups release t g s --after -1", "lease-groups release t g s --after-epoch -1"),
        ("lease-groups extend t g s --invisibility 9", "lease-groups extend t g s --invisibility-seconds 9"),
        ("dead-letters list t g --max 2 --body-bytes 3", "dead-letters list t g --max-messages 2 --body-bytes-max 3"),
        (
            "dead-letters redrive t g --to x --rate 2 --detach --max 5",
            "dead-letters redrive t g --target-topic x --rate-per-second 2 --no-wait --max-messages 5",
        ),
        ("dead-letters purge t g --older-than 5 --yes", "dead-letters purge t g --older-than-seconds 5 --yes"),
        (
            "groups create t g --max-lease 9 --retry-initial 1 --retry-max 2",
            "groups create t g --max-lease-seconds 9 --retry-initial-seconds 1 --retry-max-seconds 2",
        ),
        ("replicas status --nodes", "replicas status --show nodes"),
        ("keys revoke --all app", "keys revoke --principal app"),
        ("doctor --json", "doctor -o json"),
        ("prove locks --duration 2 --json x", "prove locks --duration-seconds 2 --report-file x"),
    ],
)
def test_a_former_flag_means_the_same_as_the_present_one(former: str, now: str) -> None:
    present = parser().parse_args(now.split())
    parsed = parser().parse_args(former.split())
    notes = former_notes(parsed)
    flags = [word for word in former.split() if word.startswith("--") and word not in now.split()]
    assert [note.split()[0] for note in notes] == [flag.partition("=")[0] for flag in flags]
    left_out = {"former_flags", "run"}
    assert {name: value for name, value in vars(parsed).items() if name not in left_out} == {
        name: value for name, value in vars(present).items() if name not in left_out
    }


def test_a_required_flag_is_still_required_after_its_former_spelling_was_used() -> None:
    whole = parser()
    whole.parse_args(["extend", "t", "g", "h", "--invisibility", "5"])
    with pytest.raises(SystemExit):
        whole.parse_args(["extend", "t", "g", "h"])
