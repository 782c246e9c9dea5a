"""One browser for all tests of the console in a process, and one proxy for each file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support.console import Console, chromium_browser, opened_console
from support.proxy import ProxyProcess


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with chromium_browser(chromium) as opened:
        yield opened


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy that authenticates no callers, because only this machine reaches it."""
    folder: Path = tmp_path_factory.mktemp("console")
    with ProxyProcess(folder) as process:
        yield process


@pytest.fixture
def console(browser: Browser, proxy: ProxyProcess) -> Iterator[Console]:
    with opened_console(browser, proxy.url) as opened:
        yield opened
