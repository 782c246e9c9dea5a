"""The requests that a browser may send for each page, and the names of the proxy: heads of requests alone."""

import pytest

from popgate.api.browsers import BrowserGuard
from popgate.api.formats import REMEMBERED_MAX
from popgate.api.problems import HostNotAllowed, UnsupportedMediaType

ANY = BrowserGuard()
FORMS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", ""]


def headers(**given: str | None) -> dict[bytes, bytes]:
    named = {"host": "127.0.0.1:8080", **given}
    return {name.replace("_", "-").encode(): value.encode() for name, value in named.items() if value is not None}


@pytest.mark.parametrize("kind", [*FORMS, None])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "page",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://127.0.0.1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "origin": "http://127.0.0.1:8080"},
        {"sec_fetch_site": "nonsense"},
        {"origin": "http://", "host": ""},
        {"origin": "http://", "host": None},
    ],
)
def test_another_sites_page_changes_nothing_with_what_a_form_could_send(
    method: str, page: dict[str, str], kind: str | None
) -> None:
    with pytest.raises(UnsupportedMediaType, match=r"content-type: .*application/json"):
        ANY.check(method, headers(**page, content_type=kind))
    ANY.check(method, headers(**page, content_type="application/vnd.msgpack"))
    ANY.check(method, headers(**page, content_type="application/json; charset=utf-8"))


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"origin": "http://127.0.0.1:8080"},
        {"origin": "https://Popgate.example", "host": "popgate.example"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "same-origin", "origin": "https://popgate.example"},
        {"sec_fetch_site": "none"},
    ],
)
@pytest.mark.parametrize("kind", [*FORMS, None])
def test_the_proxys_own_page_and_what_is_no_browser_may_leave_the_type_out(
    page: dict[str, str], kind: str | None
) -> None:
    ANY.check("POST", headers(**page, content_type=kind))


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_browser_that_reads_needs_no_content_type(method: str) -> None:
    ANY.check(method, headers(origin="https://evil.example", sec_fetch_site="cross-site"))


LOCAL = ["localhost", "LOCALHOST:8080", "a.localhost.", "127.0.0.1", "[::1]:8080", "10.0.0.7:80", "[fd00::7]", None]


@pytest.mark.parametrize("host", LOCAL)
def test_a_proxy_is_always_known_as_localhost_and_by_addresses(host: str | None) -> None:
    BrowserGuard([]).check("GET", headers(host=host))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "", "x", "["]
)
def test_a_name_that_is_not_the_proxys_is_refused_with_the_remedy(method: str, host: str) -> None:
    guarded = BrowserGuard(["popgate.example"])
    guarded.check(method, headers(host="POPGATE.example:8080"))
    with pytest.raises(HostNotAllowed, match="--allowed-hosts"):
        guarded.check(method, headers(host=host))
    ANY.check(method, headers(host=host))


def test_ever_new_names_take_no_memory() -> None:
    guarded = BrowserGuard([])
    for number in range(2 * REMEMBERED_MAX):
        guarded.check("GET", headers(host=f"a{number}.localhost"))
    assert len(guarded._remembered) <= REMEMBERED_MAX  # pyright: ignore[reportPrivateUsage]  # what is tested
