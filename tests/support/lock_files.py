"""Reads the lock files of the images, and compares them with the ranges in pyproject.toml."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
LOCKS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "requirements.lock": ("server", "journal", "fast", "oidc"),
        "pipeline.lock": ("journal", "spark"),
        "build.lock": (),
    }
)
"""The extras of popgate in each lock file of ``deploy``. The lock file without extras has what builds popgate."""
IMAGES = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "os_name": "posix"}
"""The environment of the images, as far as a marker in pyproject.toml may ask for it."""

_PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==([0-9a-z.+!]+)(?: ; ([ a-zA-Z0-9_.'<>=!()]+))? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package of a lock file: the only version that may be installed, and the number of its files."""

    version: str
    hashes: int


def read_lock(text: str) -> Mapping[str, Pin]:
    """Return the pins of a lock file by the names of the packages.

    Raises: ValueError for a line that is neither a comment, a pin nor a hash. So a lock file can't name an index, a URL
    or a path.
    """
    pins: dict[str, Pin] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        if pin := _PIN.fullmatch(line):
            name = pin[1]
            if name in pins:
                raise ValueError(f"line {number}: {name} has two pins")
            pins[name] = Pin(version=pin[2], hashes=0)
        elif name and _HASH.fullmatch(line):
            pins[name] = Pin(version=pins[name].version, hashes=pins[name].hashes + 1)
        else:
            raise ValueError(f"line {number} is neither a pin nor a hash")
    return pins


@cache
def _pyproject() -> Mapping[str, Any]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())


def wanted(extras: Sequence[str]) -> Iterator[Requirement]:
    """Yield what popgate with these extras needs itself. Without extras: what builds popgate."""
    if not extras:
        yield from map(Requirement, _pyproject()["build-system"]["requires"])
        return
    project = _pyproject()["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            yield from wanted(sorted(requirement.extras))
        elif requirement.marker is None or requirement.marker.evaluate(IMAGES):
            yield requirement


def misfits(pins: Mapping[str, Pin], requirements: Iterator[Requirement]) -> Sequence[str]:
    """Return one line for each requirement that the pins don't meet, and for each pin without a hash."""
    found: list[str] = []
    for requirement in requirements:
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None:
            found.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(pin.version, prereleases=True):
            found.append(f"{requirement.name} {pin.version} is not in the range {requirement.specifier}")
    found += [f"{name} has no hash" for name, pin in pins.items() if not pin.hashes]
    return list(dict.fromkeys(found))  # several extras need the same package


def lock_problems() -> Sequence[str]:
    """Return one line for each place in which a lock file does not fit pyproject.toml."""
    problems: list[str] = []
    for file, extras in LOCKS.items():
        try:
            pins = read_lock((PROJECT / "deploy" / file).read_text())
        except (OSError, ValueError) as error:
            problems.append(f"deploy/{file}: {error}")
        else:
            problems += [f"deploy/{file}: {misfit}" for misfit in misfits(pins, wanted(extras))]
    return problems
