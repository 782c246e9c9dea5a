"""One browser and one proxy for each file of tests.

A browser that stayed open would leave an event loop running, in which no other test could start its own.
"""

import json
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


def report_in(folder: Path) -> Path:
    """Write a report as the pipeline does. Return the folder of reports."""
    audit = folder / "reports/audit"
    audit.mkdir(parents=True)
    (audit / "report.html").write_text("<!doctype html><title>Report</title><p>2 messages are lost</p>")
    told = {"verdict": "FAULTS: 2 lost", "text": "10 deliveries.", "faults": {"lost": 2}, "not_certain": {}}
    more = {"journal_events_missing": 0, "end": "2026-11-27T10:00:00+00:00"}
    (audit / "verdict.json").write_text(json.dumps(told | more))
    return audit.parent


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy that authenticates no callers, because only this machine reaches it."""
    folder: Path = tmp_path_factory.mktemp("console")
    with ProxyProcess(folder, "--report-folder", str(report_in(folder))) as process:
        yield process


@pytest.fixture
def console(browser: Browser, proxy: ProxyProcess) -> Iterator[Console]:
    with opened_console(browser, proxy.url) as opened:
        yield opened
