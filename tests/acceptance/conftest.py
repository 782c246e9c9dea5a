"""Shared fixtures of the acceptance tests: a team's RabbitMQ with a popgate on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.adopting import Site
from support.rabbitmq import RabbitNode


@pytest.fixture(scope="session")
def site(rabbitmq: RabbitNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One proxy for all tests that leave it running."""
    with Site(rabbitmq, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def own_site(rabbitmq: RabbitNode, tmp_path: Path) -> Iterator[Site]:
    """A separate proxy for one test, which may kill it."""
    with Site(rabbitmq, tmp_path / "site") as site:
        yield site
