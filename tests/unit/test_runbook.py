"""Each command, flag and metric that the runbook names exists."""

import re
import shlex
from pathlib import Path

import pytest

from popgate.cli.commands import parser
from popgate.config.options import SETTINGS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = " ".join((DOCS / "runbook.md").read_text().split())
COMMANDS = sorted(set(re.findall(r"`(popgate [^`]+)`", TEXT)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_runbook_is_understood(command: str) -> None:
    parsed = parser().parse_args(shlex.split(command)[1:])
    assert callable(parsed.run)


def test_each_metric_of_the_runbook_is_documented() -> None:
    documented = (DOCS / "metrics.md").read_text()
    named = set(re.findall(r"\b(?:popgate|process)_\w+", TEXT))
    assert named
    assert {name for name in named if f"`{name}" not in documented} == set()


def test_each_flag_of_the_runbook_is_a_setting_of_the_proxy_or_belongs_to_every_command() -> None:
    flags = {flag.split()[0] for flag in re.findall(r"`(--[^`]+)`", TEXT)}
    assert flags
    assert flags <= {f"--{setting.name.replace('_', '-')}" for setting in SETTINGS} | {"--url"}
