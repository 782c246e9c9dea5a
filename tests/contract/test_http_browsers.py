"""Other sites' pages, by the requests that browsers send for them, on every path that changes something."""

import re
from collections.abc import Iterator

import httpx
import pytest

from contract.http_server import HttpServer, answer, problem
from contract.http_server import lean_server as server

__all__ = ["server"]

FOREIGN = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
READING = {"get", "head", "options"}


def changing_routes(server: HttpServer) -> Iterator[tuple[str, str]]:
    """Return every path with each of its methods that may change something, and paths without a description."""
    for path, operations in answer(server.client.get("/openapi.json"))["paths"].items():
        for method in operations.keys() - READING:
            yield method, re.sub(r"{(queue|epoch)}", "0", re.sub(r"{(?!queue|epoch)\w+}", "x", path))
    yield from (("post", "/v1/peers"), ("post", "/healthz"), ("delete", "/nowhere"))


def send(server: HttpServer, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
    return server.client.request(method, path, content=body, headers=headers)


def test_no_path_takes_from_another_sites_page_what_a_form_could_send(server: HttpServer) -> None:
    routes = set(changing_routes(server))
    assert len(routes) >= 35
    for method, path in sorted(routes):
        for page in ({"origin": "null"}, {"sec-fetch-site": "same-site"}, FOREIGN):
            for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                response = send(server, method, path, {**page, "content-type": kind}, b"{}")
                assert "content-type" in problem(response, 415, "unsupported_media_type")["detail"], (method, path)
            problem(send(server, method, path, page), 415, "unsupported_media_type")
        # The refusal concerns the page, and what it sends.
        assert send(server, method, path, {**FOREIGN, "content-type": "application/json"}).status_code != 415, path
        assert send(server, method, path, {"content-type": "text/plain"}).status_code != 415, path


@pytest.mark.parametrize("verb", ["purge", "pause", "dead-letters/redrive"])
def test_an_empty_post_of_another_sites_page_does_nothing_to_a_group(server: HttpServer, verb: str) -> None:
    topic = server.topic()
    topic.publish("x")
    path = f"{topic.admin_path}/groups/default/{verb}"
    problem(send(server, "post", path, FOREIGN), 415, "unsupported_media_type")
    assert topic.pop_one(wait_seconds=5)["body"] == "x"


def test_the_proxys_own_page_and_curl_need_no_content_type(server: HttpServer) -> None:
    topic = server.topic()
    path = f"{topic.admin_path}/groups/default"
    own = {"origin": str(server.client.base_url).rstrip("/")}
    # If this proxy owns no queues, another one answers the last request, under another name.
    for verb, headers in (("pause", own), ("resume", {"sec-fetch-site": "same-origin"}), ("dead-letters/redrive", own)):
        assert send(server, "post", f"{path}/{verb}", headers).is_success
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer(send(server, "post", f"{topic.path}/messages", form, b'{"messages":[{"body":"x"}]}'))
    assert topic.pop_one(wait_seconds=5)["body"] == "x"


@pytest.mark.parametrize("path", ["/v1", "/healthz", "/metrics", "/openapi.json", "/v1/locks", "/v1/topics/x/groups/x"])
def test_a_page_whose_name_was_pointed_to_this_machine_reads_nothing(server: HttpServer, path: str) -> None:
    document = problem(send(server, "get", path, {"host": "evil.example:8080"}), 403, "host_not_allowed")
    assert "--allowed-hosts evil.example" in document["detail"]
    assert send(server, "get", path, {"host": "localhost:8080"}).status_code != 403


def test_refused_requests_are_counted(server: HttpServer) -> None:
    def refused() -> float:
        return server.metrics().get('popgate_http_requests_total{operation="refused",status="403"}', 0)

    before = refused()
    send(server, "get", "/v1", {"host": "evil.example"})
    assert refused() == before + 1
