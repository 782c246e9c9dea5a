"""The console with 1,000 topics: it stays quick, and its table stays small."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, expect

from support.console import Console, opened_console
from support.console_load import bury
from support.proxy import ProxyProcess

TOPICS = 1_000
ROWS_MAX = 50
GROUP_EACH = 3
"""Every third topic has a group."""
SECONDS_MAX = 0.3
"""Maximum seconds from a key press until the browser has drawn the result."""
_TYPE = """async (text) => {
  const field = document.querySelector("input[type=search]")
  const began = performance.now()
  field.value = text
  field.dispatchEvent(new InputEvent("input", { bubbles: true }))
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)))
  return (performance.now() - began) / 1000
}"""


@pytest.fixture(scope="module")
def crowded(proxy: ProxyProcess) -> ProxyProcess:
    """The proxy with 1,000 topics, of which a third have a group. One group has a dead letter."""

    def make(number: int) -> None:
        path = f"/v1/admin/topics/topic-{number:04}"
        assert proxy.client.put(path, json={"queues": 1}).is_success
        if number % GROUP_EACH == 0:
            assert proxy.client.put(f"{path}/groups/default").is_success

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(TOPICS)))
    bury(proxy, "topic-0333", ["dead"], "no")
    return proxy


@pytest.fixture(scope="module")
def tab(browser: Browser, crowded: ProxyProcess) -> Iterator[Console]:
    with opened_console(browser, crowded.url) as opened:
        yield opened


def test_a_thousand_topics_are_shown_page_by_page_and_filtered_at_once(tab: Console) -> None:
    tab.open("topics")
    page = tab.page
    expect(page.get_by_text(re.compile("^1.50 of 1,000$"))).to_be_visible()
    assert page.locator("tbody tr").count() == ROWS_MAX
    texts = ["topic-0", "topic-07", "topic-077", "topic-0777", ""]
    assert sorted(page.evaluate(_TYPE, text) for text in texts)[len(texts) // 2] < SECONDS_MAX
    page.get_by_role("button", name="Last page").click()
    expect(page.get_by_role("link", name="topic-0999")).to_be_visible()
    page.get_by_role("button", name="Topic / group").click()
    page.get_by_role("button", name="First page").click()
    expect(page.locator("tbody th").first).to_contain_text("topic-0999")


def test_the_one_group_of_a_thousand_that_needs_attention_is_found(tab: Console) -> None:
    tab.open()
    expect(tab.page.get_by_role("row", name="topic-0333/default")).to_contain_text("1 dead letter", timeout=60_000)
    tab.go("topics", "Topics")
    tab.page.get_by_role("button", name="Dead").click()
    expect(tab.page.locator("tbody th").first).to_contain_text("topic-0333")
    assert tab.page.locator("tbody tr").count() == ROWS_MAX
