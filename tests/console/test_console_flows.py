"""What an operator does in the console, with real messages: each test checks the result at the proxy."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from support.console import Console, opened_console
from support.console_load import bury, counts, lease, make_group, publish
from support.processes import wait_until
from support.proxy import ProxyProcess


@pytest.fixture(scope="module")
def tab(browser: Browser, proxy: ProxyProcess) -> Iterator[Console]:
    with opened_console(browser, proxy.url) as opened:
        opened.open()
        yield opened


def button(tab: Console, name: str | re.Pattern[str]) -> None:
    """Press the button of this name. In a dialog, only buttons of the dialog can be pressed."""
    dialog = tab.page.get_by_role("dialog")
    place = dialog if dialog.count() else tab.page
    place.get_by_role("button", name=name).first.click()


def confirm(tab: Console, name: str, verb: str) -> None:
    """Type the name of what is destroyed, and confirm. Until the name is complete, this is not possible."""
    dialog = tab.page.get_by_role("dialog")
    field = dialog.get_by_label("To confirm, type")
    field.fill(name[:-1])
    expect(dialog.get_by_role("button", name=verb)).to_be_disabled()
    field.fill(name)
    button(tab, verb)
    expect(dialog).to_have_count(0)


def test_selected_dead_letters_are_redriven_at_a_rate_and_the_others_purged(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "redriven")
    bury(proxy, "redriven", [f"declined {number}" for number in range(4)], "card declined")
    bury(proxy, "redriven", [f"broken {number}" for number in range(3)], "ValueError: no total")
    tab.go("topics/redriven/default/dead-letters", "redriven/default")
    tab.page.get_by_label("Text in the reason").fill("valueerror")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text("3 letters match, 7 of 7 letters searched")).to_be_visible()
    tab.page.get_by_label("Select the 3 letters that match").check()
    button(tab, "Redrive the 3 selected")
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 selected letters go to the end of their queues, for this group only")
    dialog.get_by_label("Rate, in letters per second").fill("5")
    button(tab, "Redrive 3 letters")
    expect(tab.page.get_by_text("The latest redrive")).to_be_visible()
    assert counts(proxy, group) == {"ready": 3, "in_flight": 0, "dead": 4}
    progress = proxy.client.get("/v1/admin/topics/redriven/groups/default/dead-letters/redrive").json()
    assert (progress["state"], progress["moved"], progress["rate_per_second"]) == ("done", 3, 5)
    expect(tab.page.get_by_text("No letter matches.")).to_be_visible()
    button(tab, "Show all")
    expect(tab.page.get_by_text("4 letters, the oldest first")).to_be_visible()
    button(tab, "Purge all")
    expect(tab.page.get_by_role("dialog")).to_contain_text("permanently deletes all 4 dead letters of redriven/default")
    confirm(tab, "redriven/default", "Purge permanently")
    tab.said("4 dead letters purged, 0 left.")
    assert counts(proxy, group) == {"ready": 3, "in_flight": 0, "dead": 0}


def test_what_a_search_finds_is_counted_and_purged_or_redriven(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "searched")
    bury(proxy, "searched", [f"declined {number}" for number in range(3)], "card declined")
    bury(proxy, "searched", ["late", "later"], "timeout")
    tab.go("topics/searched/default/dead-letters", "searched/default")
    tab.page.get_by_text("More conditions").click()
    tab.page.get_by_label("Reason or error contains").fill("TIMEOUT")
    tab.page.get_by_label("A header contains").fill("kind: test")
    tab.page.get_by_label("Dead since, from").fill("2020-02-02T02:02:02")
    button(tab, "Search")
    expect(tab.page.get_by_text("2 letters match, 5 of 5 letters searched")).to_be_visible()
    assert tab.violations() == []
    button(tab, "Redrive all that match")
    expect(tab.page.get_by_role("dialog")).to_contain_text("2 letters that match, the oldest first, go to the end")
    tab.page.get_by_role("dialog").get_by_label("At most this many letters").fill("1")
    button(tab, "Redrive 1 letter")
    expect(tab.page.get_by_text("1 letter matches, 4 of 4 letters searched")).to_be_visible()
    button(tab, "Purge all that match")
    expect(tab.page.get_by_role("dialog")).to_contain_text("permanently deletes 1 dead letter that matches of searched")
    assert tab.violations() == []
    confirm(tab, "searched/default", "Purge permanently")
    tab.said("1 dead letter purged, 3 left.")
    assert counts(proxy, group) == {"ready": 1, "in_flight": 0, "dead": 3}


def test_a_running_redrive_shows_its_progress_and_can_be_cancelled(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "cancelled")
    bury(proxy, "cancelled", [f"dead {number}" for number in range(30)], "no")
    tab.go("topics/cancelled/default/dead-letters", "cancelled/default")
    button(tab, "Redrive all")
    tab.page.get_by_role("dialog").get_by_label("Rate, in letters per second").fill("1")
    button(tab, "Redrive 30 letters")
    expect(tab.page.get_by_role("progressbar", name="Progress of the redrive")).to_be_visible()
    button(tab, "Cancel the redrive")
    expect(tab.page.get_by_text("The latest redrive")).to_be_visible()
    assert counts(proxy, group)["dead"] > 0


def test_a_letter_is_shown_whole_and_its_markup_is_only_text(tab: Console, proxy: ProxyProcess) -> None:
    make_group(proxy, "hostile")
    body = "<img src=x onerror=alert(1)><script>alert(2)</script>" + "x" * 500
    bury(proxy, "hostile", [body], "<b>bold</b>")
    tab.go("topics/hostile/default/dead-letters", "hostile/default")
    expect(tab.page.get_by_role("cell", name="<b>bold</b>")).to_be_visible()
    tab.page.locator("table button.link").click()
    expect(tab.page.get_by_role("dialog").get_by_label("Body", exact=True)).to_have_text(body)
    expect(tab.page.get_by_role("dialog")).to_contain_text("kind: test")
    assert tab.page.locator("main img, main script, main b, dialog img").count() == 0
    button(tab, "Close")


def test_a_group_is_paused_purged_and_resumed(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "purged")
    publish(proxy, "purged", [f"message {number}" for number in range(5)])
    lease(proxy, group, 2)
    tab.go("topics/purged/default", "purged/default")
    button(tab, "Pause")
    tab.said("purged/default is paused.")
    assert proxy.client.get(group).json()["policy"]["paused"] is True
    button(tab, "Purge")
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("about 3 messages")
    expect(dialog).to_contain_text("It keeps what is leased (2)")
    confirm(tab, "purged/default", "Purge the messages")
    tab.said("3 messages purged.")
    assert counts(proxy, group) == {"ready": 0, "in_flight": 2, "dead": 0}
    button(tab, "Resume")
    expect(tab.page.get_by_role("button", name="Pause")).to_be_visible()
    assert proxy.client.get(group).json()["policy"]["paused"] is False


def test_a_topic_is_created_and_deleted(tab: Console, proxy: ProxyProcess) -> None:
    tab.go("topics", "Topics")
    button(tab, "Create a topic")
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("consumer")
    button(tab, "Create")
    expect(dialog.get_by_role("alert")).to_contain_text("popgate uses the name 'consumer' itself")
    dialog.get_by_label("Name").fill("made.here")
    dialog.get_by_label("Number of queues").fill("3")
    button(tab, "Create")
    expect(tab.page.locator("h1")).to_have_text("made.here")
    assert proxy.client.get("/v1/admin/topics/made.here").json()["queues"] == 3
    button(tab, "Create a group")
    tab.page.get_by_role("dialog").get_by_label("Name").fill("workers")
    button(tab, "Create")
    expect(tab.page.get_by_role("link", name="workers")).to_be_visible()
    publish(proxy, "made.here", ["one", "two"])
    expect(tab.page.get_by_role("row", name=re.compile("^made.here . workers (ok|no clients) 2"))).to_be_visible()
    button(tab, "Delete the topic")
    expect(tab.page.get_by_role("dialog")).to_contain_text("1 group, and permanently 2 messages")
    confirm(tab, "made.here", "Delete the topic")
    expect(tab.page.locator("h1")).to_have_text("Topics")
    assert proxy.client.get("/v1/admin/topics/made.here").status_code == 404


def test_a_group_is_switched_to_pull_and_back_after_a_preview(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "switched")
    publish(proxy, "switched", ["one"])
    receipts = lease(proxy, group, 1)
    tab.go("topics/switched/default", "switched/default")
    button(tab, "Switch to pull")
    dialog = tab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("draining: no new leases")
    expect(dialog).to_contain_text("1 lease in 1 queue")
    button(tab, "Switch to pull")
    expect(tab.page.get_by_text("This group changes to pull mode.")).to_be_visible()
    expect(tab.page.get_by_text("1 lease left; they are cut off in")).to_be_visible()
    assert proxy.client.post(f"{group}/ack", json={"receipt_handles": receipts}).is_success
    expect(tab.page.get_by_text("pull mode", exact=True)).to_be_visible()
    expect(tab.page.get_by_text("This group changes to")).to_have_count(0)
    button(tab, "Switch to pop")
    expect(dialog).to_contain_text("pop: every client takes messages from all queues")
    button(tab, "Switch to pop")
    expect(tab.page.get_by_text("pop mode", exact=True)).to_be_visible()


def test_the_policy_is_changed_field_by_field(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "policies", invisibility_seconds=30, max_deliveries=4)
    tab.go("topics/policies/default/policy", "policies/default")
    lease_field = tab.page.get_by_label("Lease, in seconds", exact=True)
    expect(lease_field).to_have_value("30")
    lease_field.fill("soon")
    button(tab, "Save the policy")
    expect(lease_field).to_have_attribute("aria-invalid", "true")
    lease_field.fill("45")
    tab.page.get_by_label("Deliveries before a message is dead-lettered").fill("")
    button(tab, "Save the policy")
    tab.said("The policy is changed.")
    policy = proxy.client.get(group).json()["policy"]
    assert (policy["invisibility_seconds"], policy["max_deliveries"]) == (45, None)


def test_a_lock_is_taken_from_its_holder(tab: Console, proxy: ProxyProcess) -> None:
    proxy.client.put("/v1/locks/stuck", json={"kind": "mutex"})
    proxy.client.post("/v1/locks/stuck/acquire", json={"holder": "a dead worker", "ttl_seconds": 600})
    tab.go("locks", "Locks")
    expect(tab.page.get_by_role("row", name="stuck")).to_contain_text("a dead worker")
    button(tab, "Force-release stuck")
    expect(tab.page.get_by_role("dialog")).to_contain_text("takes the lock from a dead worker")
    confirm(tab, "stuck", "Force-release")
    tab.said("1 holder has lost the lock stuck.")
    assert proxy.client.get("/v1/locks/stuck").json()["holders"] == []


def test_everything_can_be_reached_with_the_keyboard(tab: Console, proxy: ProxyProcess) -> None:
    make_group(proxy, "keyboard")
    publish(proxy, "keyboard", ["one"])
    tab.go("topics", "Topics")
    page, press = tab.page, tab.page.keyboard.press
    focused = page.locator(":focus")
    expect(focused).to_have_text("Topics")  # the heading: a screen reader begins there
    press("Tab")
    expect(focused).to_have_text("Create a topic")
    press("Tab")
    page.keyboard.type("keyboard")
    row = page.get_by_role("row", name="keyboard / default")
    expect(page.get_by_text(re.compile("^1 row of"))).to_be_visible()
    for _ in range(12):
        press("Tab")
        if focused.inner_text() == "default":
            break
    press("Enter")
    expect(page.locator("h1")).to_have_text("keyboard/default")
    expect(row).to_have_count(0)
    expect(page.get_by_role("button", name="Purge")).to_be_enabled()
    for _ in range(3):
        press("Tab")
    expect(focused).to_have_text("Purge")
    press("Enter")
    expect(page.get_by_role("dialog", name="Purge keyboard/default?")).to_be_visible()
    press("Escape")
    expect(focused).to_have_text("Purge")
    press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(focused).to_have_attribute("autocomplete", "off")
    page.keyboard.type("keyboard/default")
    press("Enter")
    tab.said("1 message purged.")
    page.reload()
    press("Tab")
    expect(focused).to_have_text("Skip to the content")
    press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_a_proxy_that_is_away_is_shown_and_tried_again(tab: Console, proxy: ProxyProcess) -> None:
    group = make_group(proxy, "away")
    publish(proxy, "away", ["one"])
    tab.go("topics/away/default", "away/default")
    proxy.stop()
    expect(tab.page.get_by_role("alert")).to_contain_text("The proxy does not answer")
    expect(tab.page.get_by_text("Next try in")).to_be_visible()
    assert tab.page.locator(".figure dd").first.inner_text() == "1", "what was known before stays"
    proxy.start()
    expect(tab.page.get_by_role("alert")).to_have_count(0)
    tab.said("The proxy answers again.")
    publish(proxy, "away", ["two"])
    wait_until(lambda: counts(proxy, group)["ready"] == 2, timeout_seconds=10, what="the message")
    expect(tab.page.locator(".figure dd").first).to_have_text("2")


def test_the_flows_have_left_no_error_in_the_browser(tab: Console) -> None:
    assert tab.errors == []
