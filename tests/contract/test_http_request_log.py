"""What a real proxy logs of requests, denials and changes, with their ids, and how its level changes meanwhile."""

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.http_server import started_server
from support.key_files import Key, KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command
from support.redis import RedisServer

SLOW_SECONDS = 0.4
LEVEL = "/v1/admin/log-level"


class Logging:
    """A proxy whose log is JSON, behind it the owner of the queues, and a key for each."""

    def __init__(self, front: ProxyProcess, owner: ProxyProcess, admin: Key, stranger: Key, key_file: Path) -> None:
        self.front, self.owner, self.admin, self.stranger, self.key_file = front, owner, admin, stranger, key_file

    def send(self, method: str, path: str, *, body: object = None, **headers: str) -> httpx.Response:
        return self.front.client.request(method, path, json=body, headers={**self.admin.headers, **headers})

    def topic(self) -> str:
        """Return the name of a new topic with the group ``g``."""
        topic = f"t-{secrets.token_hex(4)}"
        assert self.send("PUT", f"/v1/admin/topics/{topic}", body={"queues": 2}).status_code == 201
        assert self.send("PUT", f"/v1/admin/topics/{topic}/groups/g").status_code == 201
        return topic

    @contextlib.contextmanager
    def level(self, level: str) -> Generator[None]:
        assert self.send("PUT", LEVEL, body={"level": level}).status_code == 200
        yield
        assert self.send("PUT", LEVEL, body={"level": "info"}).status_code == 200


@pytest.fixture(scope="module", params=["front"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logging]:
    folder = tmp_path_factory.mktemp("log")
    keys = KeyFile(folder / "keys.toml")
    admin, stranger = keys.principal("admin", everything()), keys.principal("stranger", {"actions": ["publish"]})
    key_file = folder / "admin.key"
    key_file.write_text(admin.token)
    key_file.chmod(0o600)
    flags = ["--keys-file", str(keys.path), "--log-format", "json", "--slow-request-seconds", str(SLOW_SECONDS)]
    with started_server(request, folder, *flags) as started:
        assert started.owner is not None
        yield Logging(started.process, started.owner, admin, stranger, key_file)


def lines(proxy: ProxyProcess, message: str, **wanted: object) -> list[dict[str, Any]]:
    """Return the lines of the log with this message and these fields. All lines but the banner's must be JSON."""
    found = [json.loads(line) for line in proxy.output.splitlines() if line.startswith("{")]
    return [one for one in found if one["message"] == message and all(one.get(k) == v for k, v in wanted.items())]


def line(proxy: ProxyProcess, message: str, **wanted: object) -> dict[str, Any]:
    """Wait for the one line with this message and these fields."""
    wait_until(lambda: bool(lines(proxy, message, **wanted)), timeout_seconds=5, what=f"{message!r} {wanted}")
    (found,) = lines(proxy, message, **wanted)
    return found


def test_at_debug_each_request_is_one_line_at_each_proxy_with_one_id(server: Logging) -> None:
    topic = server.topic()
    with server.level("debug"):
        path = f"/v1/topics/{topic}"
        published = server.send("POST", f"{path}/messages", body={"messages": [{"body": "a"}, {"body": "b"}]})
        popped = server.send(
            "POST", f"{path}/groups/g/pop", body={"max_messages": 2, "wait_seconds": 5}, **{"x-request-id": "pop-1"}
        )
        wrong = server.send("POST", f"{path}/groups/g/acknowledge", body={})
    request = line(server.front, "request", operation="publish", topic=topic)
    assert request["level"] == "debug"
    assert (request["status"], request["count"], request["principal"]) == (200, 2, "admin")
    assert (request["key"], request["address"]) == (server.admin.id, "127.0.0.1")
    assert 0 < request["seconds"] < 5
    assert published.headers["x-request-id"] == request["request_id"]

    assert popped.headers.get_list("x-request-id") == ["pop-1"]
    count = len(popped.json()["messages"])
    assert line(server.front, "request", request_id="pop-1")["count"] == count > 0
    at_owner = lines(server.owner, "request", request_id="pop-1", operation="pop", topic=topic, group="g")
    assert at_owner[-1]["count"] == count
    assert at_owner[-1]["principal"] == "admin"
    assert "forwarded_by" in at_owner[-1]

    unknown = line(server.front, "request", path=f"{path}/groups/g/acknowledge")
    assert (unknown["status"], unknown["request_id"]) == (404, wrong.headers["x-request-id"])


def test_what_a_proxy_asks_the_owner_for_a_request_has_the_id_of_the_request(server: Logging) -> None:
    topic = server.topic()
    path, admin = f"/v1/topics/{topic}/groups/g", f"/v1/admin/topics/{topic}/groups"
    messages = [{"body": "a"}, {"body": "b"}]
    assert server.send("POST", f"/v1/topics/{topic}/messages", body={"messages": messages}).status_code == 200
    handles: list[str] = []
    while len(handles) < 2:
        popped = server.send("POST", f"{path}/pop", body={"max_messages": 2, "wait_seconds": 5}).json()["messages"]
        handles += [one["receipt_handle"] for one in popped]
    first, second = ([{"receipt_handle": handle}] for handle in handles)
    asked: list[tuple[str, str, str, object]] = [  # what the owner is asked, and for which request
        ("SettleAtOwner", "POST", f"{path}/reject", {"entries": first}),
        ("SettleAtOwner", "POST", f"{path}/pop", {"reject": second}),
        ("PurgeAtOwner", "POST", f"{admin}/g/purge", None),
        ("CountMessages", "GET", path, None),
        ("Follow", "PUT", f"{admin}/h", None),
        ("request", "GET", f"{admin}/g/consume-mode", None),
        ("request", "GET", f"{admin}/g/explain", None),
    ]
    with server.level("debug"):
        for number, (_, method, where, body) in enumerate(asked):
            answer = server.send(method, where, body=body, **{"x-request-id": f"asks-{number}"})
            assert answer.is_success, answer.text
    for number, (what, *_) in enumerate(asked):
        assert line(server.front, "request", request_id=f"asks-{number}")
        if what == "request":
            assert lines(server.owner, "request", request_id=f"asks-{number}")[0]["forwarded_by"]
        else:
            assert lines(server.owner, "a message of another proxy", request_id=f"asks-{number}", message_type=what)
    assert all("request_id" in one for one in lines(server.owner, "a message of another proxy"))


def test_at_info_a_request_is_not_logged_but_its_id_is_answered(server: Logging) -> None:
    path = f"/v1/topics/{server.topic()}/messages"
    usual = server.send("POST", path, body={"messages": [{"body": "a"}]})
    assert "x-request-id" not in usual.headers
    asked: list[tuple[str, str, object]] = [
        ("POST", path, {"messages": [{"body": "a"}]}),
        ("GET", "/v1/admin/topics", None),
        ("GET", "/v1/nothing", None),
        ("GET", "/metrics", None),
    ]
    for method, where, body in asked:
        for given in ("id-7/a", "id-7/a", "no id", "x" * 200):
            answer = server.send(method, where, body=body, **{"x-request-id": given})
            (found,) = answer.headers.get_list("x-request-id")
            assert (found == given) is (given == "id-7/a")
    refused = server.front.client.get("/v1/admin/topics", headers={"x-request-id": "r-9"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "r-9")
    assert line(server.front, "a request was denied", request_id="r-9")["status"] == 401
    assert not lines(server.front, "request", request_id="id-7/a")


def test_an_open_connection_is_logged_from_the_change_of_the_level_on(server: Logging) -> None:
    path = f"/v1/topics/{server.topic()}/messages"
    with httpx.Client(base_url=server.front.url, headers=server.admin.headers, trust_env=False) as client:

        def publish() -> httpx.Response:
            return client.post(path, json={"messages": [{"body": "x"}]})

        assert "x-request-id" not in publish().headers
        with server.level("debug"):
            during = [publish().headers["x-request-id"] for _ in range(3)]
        assert "x-request-id" not in publish().headers
    assert [one["request_id"] for one in lines(server.front, "request", operation="publish")][-3:] == during


def test_changes_are_logged_at_info(server: Logging) -> None:
    topic = server.topic()
    group = f"/v1/admin/topics/{topic}/groups/g"
    assert line(server.front, "a topic was created", topic=topic)["queues"] == 2
    assert line(server.front, "a group was created", topic=topic)["group"] == "g"
    assert line(server.owner, "this proxy owns queues of a group now", topic=topic)["queues"] == [0, 1]
    assert server.send("POST", f"{group}/pause", **{"x-request-id": "pause-1"}).status_code == 200
    assert line(server.front, "a group was paused", topic=topic)["request_id"] == "pause-1"
    switch = {"mode": "pull", "drain_timeout_seconds": 0}
    assert server.send("PUT", f"{group}/consume-mode", body=switch).status_code == 200
    switched: list[Callable[[], bool]] = [
        lambda proxy=proxy: bool(lines(proxy, "the consume mode of a group was switched", topic=topic, mode="pull"))  # type: ignore[misc]
        for proxy in (server.front, server.owner)
    ]
    wait_until(lambda: any(one() for one in switched), timeout_seconds=10, what="the switch in the log")
    assert server.send("DELETE", f"/v1/admin/topics/{topic}").status_code == 204
    assert line(server.front, "a topic was deleted", topic=topic)["level"] == "info"


def test_a_flood_of_denials_leaves_few_lines(server: Logging) -> None:
    before = len(server.front.output)
    for _ in range(100):
        answer = server.front.client.get("/v1/admin/cluster", headers=server.stranger.headers)
        assert answer.status_code == 403
    denied = lines(server.front, "a request was denied", principal="stranger")
    assert 1 <= len(denied) <= 10
    assert denied[0] | {"operation": "cluster", "status": 403, "key": server.stranger.id} == denied[0]
    assert len(server.front.output) - before < 5_000


def test_a_slow_request_is_logged_while_it_is_in_progress(server: Logging, redis_server: RedisServer) -> None:
    topic = server.topic()
    pop = {"max_messages": 1, "wait_seconds": 3 * SLOW_SECONDS}
    assert server.send("POST", f"/v1/topics/{topic}/groups/g/pop", body=pop).json() == {"messages": []}
    assert not lines(server.front, "a request takes long", topic=topic)
    path, body = f"/v1/topics/{topic}/messages", {"messages": [{"body": "a", "dedup_id": "1"}]}
    redis_server.pause()
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.front.url}{path}", json=body, headers=server.admin.headers, timeout=3 * SLOW_SECONDS)
        found = lines(server.front, "a request takes long", topic=topic)
    finally:
        redis_server.resume()
    assert found
    assert (found[0]["level"], found[0]["operation"], found[0]["principal"]) == ("warning", "publish", "admin")
    assert found[0]["seconds"] >= SLOW_SECONDS


def command(server: Logging, *arguments: str) -> list[dict[str, Any]]:
    flags = ["--url", server.front.url, "--token-file", str(server.key_file)]
    done = subprocess.run(
        popgate_command("log-level", *arguments, *flags), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(row) for row in done.stdout.splitlines()]


def test_the_command_changes_the_level_of_all_proxies_or_of_one(server: Logging) -> None:
    shown = command(server)
    assert [(row["level"], row["configured"], row["seconds_left"]) for row in shown] == [("info", "info", None)] * 2
    owner = next(row["proxy"] for row in shown[1:])
    command(server, "warning", "--proxy", owner)
    assert {row["proxy"]: row["level"] for row in command(server)} == {shown[0]["proxy"]: "info", owner: "warning"}
    began = time.monotonic()
    for row in command(server, "debug", "--duration-seconds", "1"):
        assert (row["level"], 0 < row["seconds_left"] <= 1) == ("debug", True)

    def levels() -> set[str]:
        return {row["level"] for row in server.send("GET", LEVEL).json()["proxies"]}

    wait_until(lambda: levels() == {"info"}, timeout_seconds=10, what="the level to be the configured one again")
    assert time.monotonic() - began >= 1
    assert line(server.front, "the level of the log has changed", to="debug", seconds=1)["was"] == "info"


def test_only_an_administrator_changes_the_level(server: Logging) -> None:
    refused = server.front.client.put(LEVEL, json={"level": "debug"}, headers=server.stranger.headers)
    assert refused.status_code == 403
    assert server.send("PUT", LEVEL, body={"level": "loud"}).status_code == 400
    assert server.send("PUT", f"{LEVEL}?proxy=unknown", body={"level": "debug"}).status_code == 404
    assert {row["level"] for row in server.send("GET", LEVEL).json()["proxies"]} == {"info"}
