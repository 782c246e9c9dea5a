"""Which unpacked release of RabbitMQ a test run takes."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import rabbitmq_releases
from support.processes import ServerMissingError
from support.rabbitmq_releases import find_release, series_to_test

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run unpacked releases")


def _finds_nothing(_: str) -> None:
    """No RabbitMQ is installed."""


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Create a release as `.ci/unpack-rabbitmq` does."""

    def unpacked(version: str) -> None:
        scripts = (
            tmp_path / "popgate" / "rabbitmq" / version / "usr/lib/rabbitmq/lib" / f"rabbitmq_server-{version}/sbin"
        )
        scripts.mkdir(parents=True)
        rabbitmq_releases.releases.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RABBITMQ", raising=False)
    monkeypatch.setattr(shutil, "which", _finds_nothing)
    rabbitmq_releases.releases.cache_clear()
    yield unpacked
    rabbitmq_releases.releases.cache_clear()


def test_the_newest_release_of_the_series_is_taken(unpack: Callable[[str], None]) -> None:
    for version in ("4.3.5", "4.3.10", "4.0.5", "3.10.8"):
        unpack(version)
    assert str(find_release("4.3")) == "4.3.10"
    assert {series: str(release) for series, release in series_to_test().items()} == {
        "4.3": "4.3.10",
        "4.0": "4.0.5",
        "3.10": "3.10.8",
    }


def test_a_series_that_is_missing_is_replaced_by_a_later_one_and_then_by_any(unpack: Callable[[str], None]) -> None:
    unpack("4.0.5")
    assert str(find_release("3.10")) == "4.0.5"
    assert str(find_release("4.3")) == "4.0.5"
    assert [*series_to_test()] == ["4.3"], "each release is tested once"
    unpack("4.4.1")
    assert str(find_release("4.3")) == "4.4.1"


def test_without_any_release_one_line_says_so(unpack: Callable[[str], None]) -> None:
    with pytest.raises(ServerMissingError, match="not installed"):
        find_release("4.3")
    assert series_to_test() == {}


def test_a_run_may_ask_for_one_series(unpack: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.3.6", "4.0.5"):
        unpack(version)
    monkeypatch.setenv("RABBITMQ", "4.0")
    assert [str(release) for release in series_to_test().values()] == ["4.0.5"]
    monkeypatch.setenv("RABBITMQ", "newest")
    with pytest.raises(ValueError, match="must be a version"):
        series_to_test()
