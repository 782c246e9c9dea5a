"""The verdict of a soak: growth is found, and noise, outliers and the warm-up are not taken for it."""

import random

import pytest

from soak.plot import drawn
from soak.verdict import BOUNDS, judged, slope_of

MIB = 1 << 20
SAMPLES = 200


def samples(memory: float = 0.0, outliers: bool = False, warm_up: float = 0.0) -> list[dict[str, float]]:
    """Samples over two hours, with noise. `memory` is the growth in bytes over the whole time."""
    chance = random.Random(7)
    found: list[dict[str, float]] = []
    for number in range(SAMPLES):
        share = number / SAMPLES
        bytes_used = 100 * MIB + memory * share + chance.uniform(-2, 2) * MIB + warm_up * min(share / 0.2, 1)
        if outliers and chance.random() < 0.2:
            bytes_used += 200 * MIB * share
        found.append({"at": share * 7_200, "memory_bytes": bytes_used, "threads": 4.0, "pop_p99_seconds": 0.01})
    return found


@pytest.mark.parametrize(
    ("series", "is_flat"),
    [
        (samples(), True),
        (samples(memory=60 * MIB), False),
        (samples(memory=-60 * MIB), True),
        (samples(outliers=True), True),
        (samples(warm_up=60 * MIB), True),
    ],
    ids=["noise", "growth", "shrinking", "outliers", "warm-up"],
)
def test_memory_is_flat_or_not(series: list[dict[str, float]], is_flat: bool) -> None:
    findings = {finding.name: finding for finding in judged(series)}
    assert findings["memory_bytes"].is_flat is is_flat
    assert findings["threads"].is_flat
    assert findings["pop_p99_seconds"].is_flat
    assert set(findings) <= set(BOUNDS)


def test_the_slope_is_that_of_the_line_and_of_nothing_without_points() -> None:
    assert slope_of([(float(at), 3.0 * at + 1) for at in range(1_000)]) == pytest.approx(3)
    assert slope_of([(1.0, 2.0)]) == 0
    assert judged([]) == []


def test_the_plot_has_a_line_for_each_proxy() -> None:
    plot = drawn({"embedded": samples(), "rabbitmq": samples(memory=60 * MIB)})
    assert plot.startswith("<svg")
    assert plot.count('fill="none"') == 6, "three series have samples, on each of two proxies"
    assert "NaN" not in plot
