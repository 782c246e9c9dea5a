"""One browser and one proxy for each file of tests.

A browser that stayed open would leave an event loop running, in which no other test could start its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from support.console import Console, chromium_browser, opened_console
from support.proxy import ProxyProcess


@pytest.fixture(scope="module")
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
