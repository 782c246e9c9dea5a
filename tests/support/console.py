"""The console in a tab of a real Chromium. Each error that the browser reports there fails the test."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, NamedTuple, cast

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Page,
    ViewportSize,
    expect,
    sync_playwright,
)

WAIT_SECONDS = 30
"""Maximum seconds for one step, on a machine that does other work."""
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
# Chromium reports each answer that is not a success, and each refused connection. The console handles both.
_EXPECTED = re.compile(
    r"Failed to load resource: (the server responded with a status of (4\d\d|503)|net::ERR_CONNECTION)"
)
_AXE = files("axe_playwright_python") / "axe.min.js"
_RUN_AXE = """async (only) => {
  const options = { resultTypes: ["violations"], ...(only.length ? { runOnly: { type: "rule", values: only } } : {}) }
  const found = await axe.run(document, options)
  const words = (rule, node) => `${rule.id}: ${node.html.slice(0, 200)} ${node.failureSummary}`
  return found.violations.flatMap((rule) => rule.nodes.map((node) => words(rule, node)))
}"""


class Transfer(NamedTuple):
    """One answer of the network: its path, and the bytes that it took, with its head."""

    path: str
    size: int


class Console:
    """The console of the proxy at ``url``, in one tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", self._note_error)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _EXPECTED.match(message.text):
            self.errors.append(message.text)

    def _note_error(self, error: Error) -> None:
        self.errors.append(error.stack or error.message)

    def open(self, place: str = "") -> None:
        """Load the console anew, at a place such as ``topics/orders``."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/console#/{place}")
        expect(self.page.locator("h1")).to_be_visible()

    def go(self, place: str, heading: str) -> None:
        """Go to another place, as a link does. ``heading``: the heading of its page."""
        self.page.evaluate("place => { location.hash = place }", f"#/{place}")
        expect(self.page.locator("h1")).to_have_text(heading)
        expect(self.page.locator("[aria-busy=true]")).to_have_count(0)

    def said(self, text: str | re.Pattern[str]) -> None:
        """Wait until the console has told this to a screen reader."""
        expect(self.page.get_by_role("status")).to_have_text(text)

    def violations(self, *rules: str) -> list[str]:
        """Return what axe-core finds wrong on the page as it is now. ``rules``: look for these only."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(_AXE.read_text())
        return cast("list[str]", self.page.evaluate(_RUN_AXE, list(rules)))

    @contextmanager
    def transfers(self) -> Generator[list[Transfer]]:
        """Collect what the page transfers within the context."""
        paths: dict[str, str] = {}
        found: list[Transfer] = []
        session = self.page.context.new_cdp_session(self.page)

        def answered(event: dict[str, Any]) -> None:
            paths[event["requestId"]] = event["response"]["url"].removeprefix(self.url)

        def finished(event: dict[str, Any]) -> None:
            if event["requestId"] in paths:
                found.append(Transfer(paths[event["requestId"]], int(event["encodedDataLength"])))

        session.on("Network.responseReceived", answered)
        session.on("Network.loadingFinished", finished)
        session.send("Network.enable")  # pyright: ignore[reportUnknownMemberType]  # Playwright types it so
        yield found
        session.detach()


@contextmanager
def chromium_browser(program: str) -> Generator[Browser]:
    """A headless Chromium."""
    expect.set_options(timeout=WAIT_SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_console(browser: Browser, url: str, **settings: Any) -> Generator[Console]:
    """A console in a browser without any history. ``settings`` are those of a context of Playwright."""
    context: BrowserContext = browser.new_context(viewport=settings.pop("viewport", DESKTOP), **settings)
    context.set_default_timeout(WAIT_SECONDS * 1000)
    try:
        console = Console(context.new_page(), url)
        yield console
        assert console.errors == []
    finally:
        context.close()
