"""Every page of the console is accessible in light, dark and on a phone, small, and free of errors in the browser."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from support.console import DESKTOP, PHONE, Console, Transfer, opened_console
from support.console_load import bury, lease, make_group, publish
from support.proxy import ProxyProcess

TRANSFER_BYTES_MAX = 100 * 1024
FIRST_BYTES_MAX = 60 * 1024
# Each page, and its heading.
PAGES = {
    "": "Overview",
    "topics": "Topics",
    "topics/orders": "orders",
    "topics/orders/billing": "orders/billing",
    "topics/orders/billing/messages": "orders/billing",
    "topics/orders/billing/dead-letters": "orders/billing",
    "topics/orders/billing/policy": "orders/billing",
    "find": "Find a message",
    "locks": "Locks",
    "cluster": "Cluster",
    "replicas": "Replicas",
    "checks": "Checks",
    "journal": "Journal",
    "nothing/of/this": "Not found",
}


@pytest.fixture(scope="module")
def filled(proxy: ProxyProcess) -> ProxyProcess:
    """The proxy, with something to see on each page."""
    group = make_group(proxy, "orders", "billing", queues=2, max_deliveries=5)
    make_group(proxy, "invoices", "archive", paused=True)
    bury(proxy, "orders", ["dead one", "dead two"], "card declined", "billing")
    publish(proxy, "orders", [f"message {number}" for number in range(6)])
    publish(proxy, "invoices", ["waits"])
    lease(proxy, group, 3)
    proxy.client.put("/v1/locks/nightly", json={"kind": "mutex"})
    proxy.client.post("/v1/locks/nightly/acquire", json={"holder": "cron", "ttl_seconds": 600})
    return proxy


@pytest.fixture(scope="module")
def tab(browser: Browser, filled: ProxyProcess) -> Iterator[Console]:
    """One tab for all pages, as a user has it."""
    with opened_console(browser, filled.url) as opened:
        opened.open()
        yield opened


@pytest.mark.parametrize("place", PAGES)
def test_a_page_is_accessible_in_light_and_dark_and_on_a_phone(tab: Console, place: str) -> None:
    tab.page.emulate_media(color_scheme="light")
    tab.page.set_viewport_size(DESKTOP)
    tab.go(place, PAGES[place])
    assert tab.violations() == []
    tab.page.emulate_media(color_scheme="dark")
    assert tab.violations("color-contrast") == []
    tab.page.set_viewport_size(PHONE)
    assert tab.violations() == []
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    assert tab.errors == []


def test_the_latest_report_is_shown_and_opened_in_a_tab_of_its_own(tab: Console) -> None:
    tab.go("journal", "Journal")
    expect(tab.page.get_by_text("FAULTS: 2 lost")).to_be_visible()
    with tab.page.context.expect_page() as opened:
        tab.page.get_by_role("link", name="Open the report audit").click()
    expect(opened.value.get_by_text("2 messages are lost")).to_be_visible()
    opened.value.close()


DIALOGS = {
    "topics": "Create a topic",
    "topics/orders": "Delete the topic",
    "topics/orders/billing": "Switch to pull",
    "topics/orders/billing/dead-letters": "Redrive all",
    "locks": "Force-release nightly",
}


@pytest.mark.parametrize("place", DIALOGS)
def test_a_dialog_is_accessible(tab: Console, place: str) -> None:
    tab.page.emulate_media(color_scheme="light")
    tab.page.set_viewport_size(DESKTOP)
    tab.go(place, PAGES[place])
    tab.page.get_by_role("button", name=DIALOGS[place]).click()
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    assert tab.violations() == []
    tab.page.emulate_media(color_scheme="dark")
    assert tab.violations("color-contrast") == []
    tab.page.keyboard.press("Escape")
    expect(tab.page.get_by_role("dialog")).to_have_count(0)


def of_console(transfers: list[Transfer]) -> int:
    """Return how many bytes the files of the console took."""
    return sum(one.size for one in transfers if one.path.startswith("/console"))


def test_the_whole_console_is_transferred_in_100_kb(console: Console, filled: ProxyProcess) -> None:
    with console.transfers() as transfers:
        console.open()
        expect(console.page.get_by_text("paused, with 1 message waiting")).to_be_visible()
        first = list(transfers)
        for place, heading in PAGES.items():
            console.go(place, heading)
    assert of_console(first) < FIRST_BYTES_MAX, "the files of the first page"
    assert sum(one.size for one in first) < TRANSFER_BYTES_MAX, "the first page, with the answers of the interface"
    assert of_console(transfers) < TRANSFER_BYTES_MAX, "all files of the console, for all pages"


def test_the_files_of_the_console_are_not_transferred_again(console: Console, filled: ProxyProcess) -> None:
    console.open()
    console.page.wait_for_load_state("networkidle")
    with console.transfers() as transfers:
        console.open()
        expect(console.page.get_by_text("paused, with 1 message waiting")).to_be_visible()
    assert of_console(transfers) < 20 * 1024, "only heads of answers"


def test_no_page_allows_scripts_or_styles_from_elsewhere(filled: ProxyProcess) -> None:
    for path in ("/console", "/console/app.js", "/console/console.css"):
        answer = filled.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert filled.client.get("/console/README.md").status_code == 404
    assert filled.client.get("/console/index.html").status_code == 404


def test_a_slash_behind_the_address_leads_to_the_console(filled: ProxyProcess) -> None:
    answer = filled.client.get("/console/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (308, "../console")
    assert filled.client.get("/console/", follow_redirects=True).url.path == "/console"


def test_the_theme_can_be_chosen_and_is_kept(console: Console) -> None:
    console.page.emulate_media(color_scheme="light")
    console.open()
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = console.page.evaluate(background)
    console.page.get_by_label("Theme").select_option("dark")
    dark = console.page.evaluate(background)
    console.open()
    assert light != dark == console.page.evaluate(background)


def test_live_charts_show_rates_of_successive_polls(console: Console, filled: ProxyProcess) -> None:
    console.open()
    published = console.page.get_by_role("img", name="Published: now")
    expect(published).to_be_visible()
    publish(filled, "invoices", [f"invoice {number}" for number in range(200)])
    expect(published).to_have_attribute("aria-label", re.compile("at most [1-9]"))
    expect(console.page.locator(".chart-line").first).to_have_attribute("d", re.compile(r"^M.*L"))
