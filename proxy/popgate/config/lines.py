"""Finds the line of a setting in the configuration file, for errors."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def place_in(file: Path | None, key: str) -> str:
    """Return where ``file`` sets ``key``, such as ``line 3: port in popgate.toml``. The line is left out if it is not
    found, for example because the file is a pipe."""
    line = None if file is None else _line_of(file, key)
    return ("" if line is None else f"line {line}: ") + f"{key} in {file}"


def with_places(problems: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return problems that begin with the name of a setting, with the place where the setting was given.

    ``given`` contains the place of each given setting by its name.
    """
    return [_with_place(problem, given) for problem in problems]


def _with_place(problem: str, given: Mapping[str, str]) -> str:
    name, colon, _ = problem.partition(":")
    place = given.get(name, "") if colon else ""
    return f"{problem} [{place}]" if " in " in place else problem


def _line_of(file: Path, key: str) -> int | None:
    sets = re.compile(rf"""\s*(["']?){re.escape(key)}\1\s*[=.]|\s*\[\[?\s*(["']?){re.escape(key)}\2\s*[].]""")
    try:
        if not file.is_file():
            return None
        lines = file.read_text().splitlines()
    except (OSError, ValueError):
        return None
    return next((number for number, line in enumerate(lines, 1) if sets.match(line)), None)
