"""Pages that show single messages. The interfaces that they use answer as documented; a proxy may lack them."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from support.console import Console, opened_console
from support.console_load import make_group
from support.proxy import ProxyProcess

LEASE_SECONDS = 50


def message(number: int, state: str, **fields: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "id": f"copy-{number}",
        "message_id": f"message-{number}",
        "queue": 0,
        "state": state,
        "place": number,
        "attempt": 1,
        "published_at": now - 60,
        "visible_at": now + 30 if state == "delayed" else None,
        "lease": None,
        "blocked_by": None,
        "ordering_key": "customer-7",
        "headers": {"region": "eu"},
        "body_preview": "<i>hello</i>",
        "body_bytes": 12,
        **fields,
    }


def answer(route: Route) -> None:
    """Answer as the interfaces do."""
    url = route.request.url
    leased = message(1, "leased", lease={"client": "worker-1", "deadline": time.time() + LEASE_SECONDS})
    first = {"id": "copy-1", "message_id": "message-1", "state": "leased", "client": None, "until": None, "ahead": 1}
    blocked = message(2, "blocked", blocked_by=first)
    if url.endswith("/explain"):
        reason = {"code": "blocked_by_key", "detail": "One key blocks all messages.", "remedy": "Settle message-1."}
        explained = {"would_get": False, "summary": "A pop gets nothing.", "reasons": [reason]}
        route.fulfill(body=json.dumps(explained), content_type="application/json")
        return
    if "/groups/" in url:
        shown = [leased] if "state=leased" in url else [blocked] if "key=customer-7" in url else [leased, blocked]
        page: dict[str, Any] = {
            "messages": shown,
            "next": None,
            "not_shown": 0 if "fetch=true" in url else 3,
            "unreachable": [],
        }
        route.fulfill(body=json.dumps(page), content_type="application/json")
        return
    copy: dict[str, Any] = {
        "id": "copy-1",
        "state": "leased",
        "detail": "It is leased.",
        "source": "memory",
        "queue": 0,
    }
    groups: list[dict[str, Any]] = [
        {"group": "default", "state": "leased", "copies": [{**copy, "message": leased}], "because": []},
        {"group": "other", "state": "unknown", "copies": [], "because": ["It may be settled."]},
    ]
    event: dict[str, Any] = {
        "at": time.time(),
        "event": "dead_lettered",
        "group": "other",
        "client": "worker-9",
        "held_seconds": None,
    }
    story: dict[str, Any] = {"events": [event], "is_complete": True, "trouble": None}
    found: dict[str, Any] = {"message_id": "message-1", "groups": groups, "unreachable": [], "story": story}
    route.fulfill(body=json.dumps(found), content_type="application/json")


def absent(route: Route) -> None:
    problem = {"status": 404, "code": "not_found", "title": "There is nothing at this path", "detail": "nothing"}
    route.fulfill(status=404, body=json.dumps(problem), content_type="application/problem+json")


PATHS = re.compile(r"/v1/admin/topics/[^/]+(/groups/[^/]+)?/(messages|explain)")


@pytest.fixture(scope="module")
def tab(browser: Browser, proxy: ProxyProcess) -> Iterator[Console]:
    make_group(proxy, "browsed")
    with opened_console(browser, proxy.url) as opened:
        opened.page.route(PATHS, answer)
        yield opened


def test_leases_are_shown_with_their_clients_and_the_time_that_is_left(tab: Console) -> None:
    tab.open("topics/browsed/default")
    row = tab.page.get_by_role("row", name="message-1")
    expect(row).to_contain_text("worker-1")
    expect(row).to_contain_text(re.compile(r"4\d s"))
    expect(tab.page.get_by_role("row", name="worker-1 1")).to_be_visible()
    expect(tab.page.get_by_text("One key blocks all messages.")).to_be_visible()
    expect(tab.page.get_by_text("Settle message-1.")).to_be_visible()
    assert tab.violations() == []


def test_messages_are_searched_without_leasing_them(tab: Console) -> None:
    tab.open("topics/browsed/default/messages")
    expect(tab.page.get_by_text("2 messages", exact=True)).to_be_visible()
    expect(tab.page.get_by_text("3 messages wait at the broker")).to_be_visible()
    assert tab.violations() == []
    tab.page.get_by_role("button", name="Read some from the broker").click()
    expect(tab.page.get_by_text("3 messages wait at the broker")).to_have_count(0)
    tab.page.get_by_label("Ordering key").fill("customer-7")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text("1 message", exact=True)).to_be_visible()
    tab.page.get_by_role("button", name="message-2").click()
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("behind message-1")
    expect(dialog.get_by_label("Body")).to_have_text("<i>hello</i>")
    assert tab.violations() == []
    dialog.get_by_role("link", name="Where is it in each group?").click()
    expect(tab.page.locator("h1")).to_have_text("Find a message")
    expect(tab.page.get_by_role("dialog")).to_have_count(0)


def test_a_message_is_found_in_each_group(tab: Console) -> None:
    tab.open("find")
    tab.page.get_by_label("Topic").fill("browsed")
    tab.page.get_by_label("Message id").fill("message-1")
    tab.page.get_by_role("button", name="Find").click()
    expect(tab.page.get_by_text("worker-1")).to_be_visible()
    expect(tab.page.get_by_text("It may be settled.")).to_be_visible()
    expect(tab.page.get_by_role("row", name="dead lettered")).to_contain_text("worker-9")
    assert tab.violations() == []


def test_a_proxy_that_lacks_these_interfaces_is_explained_in_a_sentence(browser: Browser, proxy: ProxyProcess) -> None:
    make_group(proxy, "browsed")
    with opened_console(browser, proxy.url) as console:
        console.page.route(PATHS, absent)
        console.open("topics/browsed/default")
        expect(console.page.get_by_text("does not list leases")).to_be_visible()
        expect(console.page.get_by_text("What does a pop get?")).to_have_count(0)
        console.go("topics/browsed/default/messages", "browsed/default")
        expect(console.page.get_by_text("does not list messages")).to_be_visible()
        console.go("find/browsed/message-1", "Find a message")
        expect(console.page.get_by_text("can't look for a message by its id")).to_be_visible()


def test_rates_come_from_the_counters_of_the_group_if_it_has_them(tab: Console, proxy: ProxyProcess) -> None:
    state = proxy.client.get("/v1/topics/browsed/groups/default").json()
    began = time.time()

    def counted(route: Route) -> None:
        count = int((time.time() - began) * 100)
        counters = dict.fromkeys(
            ("published_count", "delivered_count", "settled_count", "expired_count", "redelivered_count"), count
        )
        more = {**state, **counters, "dead_lettered_count": 0, "pollers": 2}
        route.fulfill(body=json.dumps(more), content_type="application/json")

    tab.page.route("**/v1/topics/browsed/groups/default", counted)
    tab.open("topics/browsed/default")
    expect(tab.page.get_by_role("img", name=re.compile("^Settled: now (8|9|1[012])"))).to_be_visible()
    expect(tab.page.get_by_role("term").filter(has_text="Pollers")).to_be_visible()
    tab.page.unroute("**/v1/topics/browsed/groups/default")
