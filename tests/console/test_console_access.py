"""What the console shows to callers with different rights, and how it says that a proxy has no authentication."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support.console import Console, opened_console
from support.console_load import make_group
from support.key_files import Key, KeyFile, everything
from support.proxy import ProxyProcess


class Guarded(ProxyProcess):
    """A proxy with an administrator, a principal that may only look, and one that may use one topic."""

    admin: Key
    reader: Key
    clerk: Key


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = KeyFile(folder / "keys.toml")
    admin = keys.principal("admin", everything())
    reader = keys.principal("reader", {"actions": ["inspect"]})
    clerk = keys.principal("clerk", {"actions": ["inspect", "consume"], "topics": ["orders"], "groups": ["billing"]})
    with Guarded(folder, "--keys-file", str(keys.path)) as proxy:
        proxy.admin, proxy.reader, proxy.clerk = admin, reader, clerk
        proxy.client.headers.update(admin.headers)
        make_group(proxy, "orders", "billing")
        make_group(proxy, "secrets", "default")
        yield proxy


@pytest.fixture
def signed_out(browser: Browser, guarded: Guarded) -> Iterator[Console]:
    with opened_console(browser, guarded.url) as console:
        console.open()
        yield console


def sign_in(console: Console, token: str) -> None:
    console.page.get_by_label("API key or token").fill(token)
    console.page.get_by_role("button", name="Sign in").click()


def test_the_console_asks_for_a_key_and_keeps_it_for_the_tab_only(signed_out: Console, guarded: Guarded) -> None:
    page = signed_out.page
    expect(page.locator("h1")).to_have_text("Sign in")
    assert signed_out.violations() == []
    sign_in(signed_out, "pg_wrong…")  # no header can contain it
    expect(page.get_by_role("alert")).to_contain_text("Copy the whole key again")
    sign_in(signed_out, "pg_wrong_key")
    expect(page.get_by_role("alert")).to_contain_text("does not accept this key")
    sign_in(signed_out, guarded.admin.token)
    expect(page.locator("h1")).to_have_text("Overview")
    expect(page.get_by_role("button", name="admin", exact=True)).to_be_visible()
    assert guarded.admin.token not in str(page.evaluate("() => ({...localStorage})"))
    assert page.context.cookies() == []
    page.reload()
    expect(page.locator("h1")).to_have_text("Overview")
    other = page.context.new_page()
    other.goto(f"{guarded.url}/console")
    expect(other.locator("h1")).to_have_text("Sign in")
    other.close()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("h1")).to_have_text("Sign in")
    assert page.evaluate("() => sessionStorage.length") == 0


def test_what_the_principal_may_not_do_is_disabled_and_explained(signed_out: Console, guarded: Guarded) -> None:
    page = signed_out.page
    sign_in(signed_out, guarded.reader.token)
    expect(
        page.get_by_text("The rates come from the proxies' metrics. reader lacks the action metrics")
    ).to_be_visible()
    signed_out.go("topics/orders/billing", "orders/billing")
    for name in ("Pause", "Switch to pull", "Purge", "Delete the group"):
        expect(page.get_by_role("button", name=name)).to_be_disabled()
    expect(page.get_by_text("reader lacks the action admin on orders/billing.")).to_be_visible()
    signed_out.go("topics/orders/billing/dead-letters", "orders/billing")
    expect(page.get_by_text("The letters can't be read here. reader lacks the action consume")).to_be_visible()
    signed_out.go("topics/orders/billing/policy", "orders/billing")
    expect(page.get_by_text("You can read the policy, but not change it.")).to_be_visible()
    expect(page.get_by_label("Lease, in seconds", exact=True)).not_to_be_editable()
    page.get_by_role("button", name="reader", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("inspect")
    assert signed_out.violations() == []


def test_only_what_the_principal_may_see_is_listed(signed_out: Console, guarded: Guarded) -> None:
    page = signed_out.page
    sign_in(signed_out, guarded.clerk.token)
    signed_out.go("topics", "Topics")
    expect(page.get_by_role("row", name="orders / billing")).to_be_visible()
    expect(page.get_by_text("secrets")).to_have_count(0)
    signed_out.go("cluster", "Cluster")
    expect(page.get_by_text("clerk has no permission 'inspect' on the server")).to_be_visible()
    signed_out.go("topics/orders/billing/dead-letters", "orders/billing")
    expect(page.get_by_text("There are no dead letters.")).to_be_visible()
    expect(page.get_by_role("button", name="Redrive all")).to_be_disabled()


def test_the_interface_says_who_the_caller_is(guarded: Guarded) -> None:
    answer = guarded.client.get("/v1/caller", headers=guarded.clerk.headers).json()
    assert answer == {
        "authenticated": True,
        "insecure": False,
        "principal": "clerk",
        "credential": guarded.clerk.id,
        "expires_at": None,
        "grants": [
            {"actions": ["consume", "inspect"], "topics": ["orders"], "groups": ["billing"], "locks": [], "queues": []}
        ],
    }
    assert guarded.client.get("/v1/caller", headers={"authorization": "Bearer pg_no_key"}).status_code == 401


@pytest.mark.parametrize("flags", [(), ("--host", "0.0.0.0", "--insecure", "true")], ids=["loopback", "insecure"])
def test_a_proxy_without_authentication_says_so(browser: Browser, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with ProxyProcess(tmp_path, *flags) as proxy, opened_console(browser, proxy.url) as console:
        console.open()
        words = "This proxy runs with --insecure." if flags else "No authentication."
        expect(console.page.get_by_role("note")).to_contain_text(words)
        assert console.violations("color-contrast") == []
        assert proxy.client.get("/v1/caller").json()["insecure"] is bool(flags)
