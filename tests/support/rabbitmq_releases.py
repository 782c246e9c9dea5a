"""The releases of RabbitMQ to test with, and how to run a program of one.

`.ci/install-test-servers` unpacks releases into a cache, each with the whole `/usr` that it needs; only root can run
them. Otherwise the installed release is used. A missing series is replaced by the next best release, and the last lines
of the run say so.
"""

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.processes import ServerMissingError

NEWEST = "4.3"
"""The series that all tests use."""
SERIES = (NEWEST, "4.0", "3.10")
"""The series for tests that depend on the broker's version (the marker `rabbitmq_versions`)."""
WITH_USR = Path(__file__).parents[2] / ".ci" / "with-usr"
# Debian's wrappers in /usr/sbin change the user and can't reach a private node; the scripts that they call can.
SCRIPTS_PATTERN = "lib/rabbitmq/lib/rabbitmq_server-*/sbin"


@dataclass(frozen=True, slots=True)
class RabbitRelease:
    """`usr` is mounted over /usr for each program; None for the installed release."""

    version: tuple[int, ...]
    scripts: Path
    """The folder of RabbitMQ's own scripts, as its programs see it."""
    usr: Path | None = None

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command line that runs a program of this release; a name without a slash is found in PATH."""
        return [*([] if self.usr is None else [str(WITH_USR), str(self.usr)]), program, *arguments]

    def script(self, name: str, *arguments: str) -> list[str]:
        """Return the command line that runs one of RabbitMQ's own scripts, such as `rabbitmqctl`."""
        return self.command(str(self.scripts / name), *arguments)


def find_release(series: str | None = None) -> RabbitRelease:
    """Return the newest release of a series, or else of a later series, or else of any.

    The series is the one that the run requests (``RABBITMQ=4.0``), or `NEWEST`. Raises: ServerMissingError.
    """
    found = releases()
    if not found:
        raise ServerMissingError("rabbitmq-server is not installed")
    wanted = tuple(map(int, (series or series_asked_for() or NEWEST).split(".")))
    exact = [release for release in found if release.version[: len(wanted)] == wanted]
    later = [release for release in found if release.version > wanted]
    return (exact or later or found)[-1]


def series_asked_for() -> str | None:
    """Return the only series to test with, which ``make test RABBITMQ=4.0`` puts into the environment. Raises:
    ValueError.
    """
    series = os.environ.get("RABBITMQ") or None
    if series is not None and not re.fullmatch(r"\d+(\.\d+)*", series):
        raise ValueError(f"RABBITMQ must be a version, such as 4.0, not {series!r}")
    return series


def series_to_test() -> dict[str, RabbitRelease]:
    """Return the releases that a run tests, each once, by series: the requested one, or those of `SERIES`.

    The first is for every test, the others for tests marked `rabbitmq_versions`. Empty if RabbitMQ is missing.
    """
    asked_for = series_asked_for()
    found: dict[str, RabbitRelease] = {}
    for series in SERIES if asked_for is None else [asked_for]:
        try:
            release = find_release(series)
        except ServerMissingError:
            break
        if release not in found.values():
            found[series] = release
    return found


@cache
def releases() -> list[RabbitRelease]:
    """Return all releases that can be run here, the oldest first."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popgate" / "rabbitmq"
    unpacked = sorted(cache_folder.glob(f"*/usr/{SCRIPTS_PATTERN}")) if os.geteuid() == 0 else []
    found: list[RabbitRelease] = []
    for scripts in unpacked:
        usr = scripts.parents[4]
        found.append(RabbitRelease(_version(scripts), Path("/usr") / scripts.relative_to(usr), usr))
    if not found and shutil.which("epmd") is not None:
        found = [RabbitRelease(_version(scripts), scripts) for scripts in Path("/usr").glob(SCRIPTS_PATTERN)]
    return sorted(found, key=lambda release: release.version)


def _version(scripts: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in scripts.parent.name.partition("-")[2].split(".") if part.isdigit())
