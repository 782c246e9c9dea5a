"""What a run measured, as its JSON file has it, and the medians and ratios that the page shows."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One drain of one round. Processor times are in microseconds a message."""

    round: int
    system: str
    batch: int
    rate: float
    client_us: float
    server_us: float


@dataclass(slots=True, kw_only=True)
class Figures:
    """All drains and latencies of a run, and the conditions under which they were measured."""

    machine: str
    command: str
    date: str
    sync_ms: float
    """Median milliseconds that a synced write of 4 KiB takes beside the servers' files."""
    load: float = 0.0
    """Mean number of running processes in the minute before the start, without those of the benchmark."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    skipped: list[str] = field(default_factory=list[str])
    drains: list[Measured] = field(default_factory=list[Measured])
    latencies: list[dict[str, dict[str, float]]] = field(default_factory=list[dict[str, dict[str, float]]])
    """Percentiles of each round in milliseconds, by way."""

    @property
    def rounds(self) -> int:
        return len({one.round for one in self.drains})

    def has(self, system: str, batch: int) -> bool:
        return any(one.system == system and one.batch == batch for one in self.drains)

    def rate(self, system: str, batch: int) -> float:
        """Return the median rate a second."""
        return self._median(system, batch, lambda one: one.rate)

    def client_us(self, system: str, batch: int) -> float:
        """Return the median processor time of the clients a message."""
        return self._median(system, batch, lambda one: one.client_us)

    def server_us(self, system: str, batch: int) -> float:
        """Return the median processor time of the servers a message."""
        return self._median(system, batch, lambda one: one.server_us)

    def ratio(self, system: tuple[str, int], other: tuple[str, int]) -> float:
        """Return the median of the rounds' ratios of two rates."""
        bases = {one.round: one.rate for one in self._of(*other)}
        return statistics.median(one.rate / bases[one.round] for one in self._of(*system))

    def latency(self, way: str, percentile: str) -> float:
        """Return the median of a percentile, in milliseconds."""
        return statistics.median(one[way][percentile] for one in self.latencies)

    def latency_ratio(self, way: str, other: str, percentile: str) -> float:
        """Return the median of the rounds' ratios of two percentiles."""
        return statistics.median(one[way][percentile] / one[other][percentile] for one in self.latencies)

    def _of(self, system: str, batch: int) -> list[Measured]:
        return [one for one in self.drains if one.system == system and one.batch == batch]

    def _median(self, system: str, batch: int, figure: Callable[[Measured], float]) -> float:
        return statistics.median(figure(one) for one in self._of(system, batch))

    def write(self, file: Path) -> None:
        """Write the figures, one drain a line."""
        plain = asdict(self)
        lines = ",\n  ".join(json.dumps(_rounded(one)) for one in plain.pop("drains"))
        head = json.dumps(_rounded(plain), indent=1).removesuffix("\n}")
        file.write_text(head + ',\n "drains": [\n  ' + lines + "\n ]\n}\n")

    @staticmethod
    def read(file: Path) -> "Figures":
        """Return the figures that ``write`` wrote."""
        plain: dict[str, Any] = json.loads(file.read_text())
        drains = [Measured(**one) for one in plain.pop("drains")]
        return Figures(**plain, drains=drains)


def _rounded(value: Any) -> Any:
    """Return the plain value with its floats rounded: one decimal from 100 up, and three below."""
    text = json.dumps(value)
    return json.loads(text, parse_float=lambda digits: round(float(digits), 1 if float(digits) >= 100 else 3))
