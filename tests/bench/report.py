"""The table of the benchmarks: rows with their ratios, and the rates from which they are computed."""

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure. ``ratio`` is against ``against``, plus or minus ``ratio_error`` if it is given;
    ``target`` is what it has to reach, if anything.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    ratio_error: float | None = None
    target: str = ""
    reached: bool | None = None


class Report:
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        error = "" if row.ratio_error is None else f" +- {row.ratio_error:.3f}"
        ratio = f"{row.ratio:6.2f}x{error} {row.against}" if row.ratio is not None else ""
        verdict = "" if row.reached is None else ("reached" if row.reached else "MISSED")
        print(f"  {row.name:<52} {row.value:>12,.2f} {row.unit:<8} {ratio:<42} {row.target:<10} {verdict}", flush=True)


class Rates:
    """Rates a second of each measured thing, one figure a round. Baselines and popgate take turns, because machines
    vary.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, list[float]] = {}

    def note(self, name: str, rate: float) -> None:
        self._by_name.setdefault(name, []).append(rate)

    def median(self, name: str) -> float:
        return statistics.median(self._by_name[name])

    def ratio(self, name: str, baseline: str) -> float:
        """Return the median of the rounds' ratios."""
        return statistics.median(self._ratios(name, baseline))

    def ratio_error(self, name: str, baseline: str) -> float:
        """Return the standard error of the rounds' mean ratio."""
        ratios = self._ratios(name, baseline)
        return statistics.stdev(ratios) / math.sqrt(len(ratios))

    def _ratios(self, name: str, baseline: str) -> list[float]:
        return [rate / base for rate, base in zip(self._by_name[name], self._by_name[baseline], strict=True)]
