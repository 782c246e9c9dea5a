"""A second of each fuzzer, with the run's seed, and all earlier finds. `make fuzz` runs them for an hour."""

from pathlib import Path

import pytest

from fuzz.run import Find, fuzz, keep, kept
from fuzz.targets import TARGETS

SECONDS = 1.0


@pytest.mark.parametrize("name", TARGETS)
async def test_nothing_is_found_in_a_second(name: str, tmp_path: Path, seed: int) -> None:
    await fuzz(TARGETS[name], tmp_path, seed=seed, seconds=SECONDS)


async def test_a_forged_receipt_handle_that_passes_is_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def same(*_: object) -> bool:
        return True

    monkeypatch.setattr("popgate.domain.receipt.compare_digest", same)
    target = TARGETS["receipts"]
    with pytest.raises(Find, match="receipts") as found:
        await fuzz(target, tmp_path, seed=seed, seconds=SECONDS, corpus=tmp_path)
    keep(found.value, target.name, tmp_path)
    assert kept(target, tmp_path) == [found.value.data]


async def test_a_decoder_that_fails_unexpectedly_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("popgate.adapters.rabbitmq.properties.read_value", fail)
    with pytest.raises(Find, match="KeyError"):
        await fuzz(TARGETS["amqp-frames"], tmp_path, seed=seed, seconds=SECONDS)


async def test_a_server_that_fails_on_a_request_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("popgate.api.browsers.BrowserGuard.check", fail)
    with pytest.raises(Find, match="http-requests"):
        await fuzz(TARGETS["http-requests"], tmp_path, seed=seed, seconds=SECONDS)
