"""Who may do what over HTTP: every operation without a key, with a wrong, expired or revoked one, without the action,
and outside of the patterns.

The cases are made from the table of operations, so that a new operation is tested without a change here.
"""

import contextlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest

from contract.http_server import problem, started_server
from popgate.api.access import TABLE
from popgate.domain.permissions import Action
from support.key_files import Key, KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess

OPERATIONS = sorted(key for key, access in TABLE.items() if not access.is_public)
WITH_ACTION = [key for key in OPERATIONS if TABLE[key].action is not None]
ON_NAMES = [key for key in WITH_ACTION if "{}" in key[1]]
SEEN_TOPIC, HIDDEN_TOPIC = "seen", "hidden"
LOCK_SECONDS = 30


class Guarded:
    """A server that requires keys, and its administrator."""

    def __init__(self, process: ProxyProcess, keys: KeyFile, admin: Key, *, forwards: bool) -> None:
        self.process = process
        self.forwards = forwards
        self.keys = keys
        self.admin = admin

    def send(
        self, method: str, path: str, key: Key | None = None, *, body: object = None, **headers: str
    ) -> httpx.Response:
        given = {**({} if key is None else key.headers), **headers}
        return self.process.client.request(method, path, json=body, headers=given)

    def known(self, key: Key) -> Key:
        """Return the key when the server has read it."""
        wait_until(lambda: self.send("GET", "/v1", key).status_code == 200, timeout_seconds=5, what="the key to count")
        return key

    def empty_group(self) -> str:
        """Return the path of a new group without messages."""
        topic = f"empty-{secrets.token_hex(4)}"
        for path in (f"topics/{topic}", f"topics/{topic}/groups/g"):
            body = None if path.endswith("/g") else {"queues": 1}
            assert self.send("PUT", f"/v1/admin/{path}", self.admin, body=body).status_code == 201
        return f"/v1/topics/{topic}/groups/g"

    def new(self, *grants: Mapping[str, object], **settings: object) -> Key:
        """Return the key of a new principal."""
        return self.known(self.keys.principal(f"p-{secrets.token_hex(4)}", *grants, **settings))


@pytest.fixture(scope="module", params=["embedded", "front"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with keys; as "front" it passes requests on to the proxy that owns the queues."""
    folder = tmp_path_factory.mktemp("access")
    keys = KeyFile(folder / "keys.toml")
    admin = keys.principal("admin", everything())
    flags = ["--keys-file", str(keys.path), "--auto-create", "true", "--audit-log", str(folder / "audit.jsonl")]
    with started_server(request, folder, *flags) as started:
        guarded = Guarded(started.process, keys, admin, forwards=started.owner is not None)
        for topic in (SEEN_TOPIC, HIDDEN_TOPIC):
            assert guarded.send("PUT", f"/v1/admin/topics/{topic}", admin, body={"queues": 1}).status_code == 201
            for group in ("seen", "hidden"):
                path = f"/v1/admin/topics/{topic}/groups/{group}"
                assert guarded.send("PUT", path, admin).status_code == 201
        yield guarded


def path_of(template: str, name: str) -> str:
    """Return a path of the template whose topics, groups and locks are named ``name``."""
    path = template.replace("/topics/{}", f"/topics/{name}").replace("/groups/{}", f"/groups/{name}")
    return path.replace("/locks/{}", f"/locks/{name}").replace("/queues/{}", "/queues/0").replace("{}", "1")


def request_of(operation: tuple[str, str], name: str = SEEN_TOPIC) -> tuple[str, str]:
    return operation[0], path_of(operation[1], name)


def test_the_table_has_every_operation_of_the_application(server: Guarded) -> None:
    described = server.send("GET", "/openapi.json", server.admin).json()["paths"]
    operations = {
        (method.upper(), re.sub(r"\{[^}]*\}", "{}", path)) for path, methods in described.items() for method in methods
    }
    not_described = {("GET", "/docs"), ("GET", "/docs/{}"), ("GET", "/openapi.json")}
    probes = {("HEAD", path) for path in ("/healthz", "/readyz")}
    assert set(TABLE) == operations | not_described | probes


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_no_operation_is_open_without_a_valid_key(server: Guarded, operation: tuple[str, str]) -> None:
    method, path = request_of(operation)
    other = Key.new()
    altered = Key(id=server.admin.id, token=server.admin.token[:-1] + ("A" if server.admin.token[-1] != "A" else "B"))
    for key in (None, other, altered, Key(id="", token=f"pg_{server.admin.id}_")):
        answered = server.send(method, path, key)
        document = problem(answered, 401, "unauthenticated")
        assert answered.headers["www-authenticate"].startswith("Bearer")
        assert server.admin.id not in document["detail"]
    for authorization in ("", "Basic YWRtaW46", f"Bearer{server.admin.token}", "Bearer", server.admin.token):
        problem(server.send(method, path, authorization=authorization), 401, "unauthenticated")


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_an_expired_and_a_revoked_key_open_nothing(
    server: Guarded, dead_keys: list[Key], operation: tuple[str, str]
) -> None:
    for key in dead_keys:
        problem(server.send(*request_of(operation), key), 401, "unauthenticated")


def is_refused(server: Guarded, key: Key) -> bool:
    return server.send("GET", "/v1", key).status_code == 401


@pytest.fixture(scope="module")
def dead_keys(server: Guarded) -> list[Key]:
    """Keys of a principal that may do everything: one expired after the server had accepted it, one was revoked."""
    name = f"p-{secrets.token_hex(4)}"
    server.keys.principal(name, everything())
    expired = server.known(server.keys.key(name, expires=datetime.now(UTC) + timedelta(seconds=2)))
    revoked = server.known(server.keys.key(name))
    server.keys.revoke(revoked)
    for key in (expired, revoked):
        wait_until(partial(is_refused, server, key), timeout_seconds=5, what="the key's end")
    return [expired, revoked]


@pytest.mark.parametrize("operation", WITH_ACTION, ids=" ".join)
def test_each_operation_needs_its_action(
    server: Guarded, without: Callable[[Action], Key], operation: tuple[str, str]
) -> None:
    action = TABLE[operation].action
    assert action is not None
    for name in (SEEN_TOPIC, "unknown"):  # the answer is the same, whether the resource exists or not
        document = problem(server.send(*request_of(operation, name), without(action)), 403, "forbidden")
        assert document["action"] == action
        assert action in document["detail"]


@pytest.fixture(scope="module")
def without(server: Guarded) -> Callable[[Action], Key]:
    """Return a key with all actions but one. `admin` includes `inspect`."""
    keys: dict[Action, Key] = {}

    def key_without(action: Action) -> Key:
        if action not in keys:
            missing = {action, Action.ADMIN} if action is Action.INSPECT else {action}
            actions = [one.value for one in Action if one not in missing]
            keys[action] = server.new({"actions": actions, "queues": ["*"]})
        return keys[action]

    return key_without


@pytest.mark.parametrize("operation", ON_NAMES, ids=" ".join)
def test_each_operation_needs_a_pattern_that_matches(server: Guarded, narrow: Key, operation: tuple[str, str]) -> None:
    refused = [
        problem(server.send(*request_of(operation, name), narrow), 403, "forbidden")
        for name in (HIDDEN_TOPIC, "no-such-name")
    ]
    texts = [document["detail"].replace(HIDDEN_TOPIC, "NAME").replace("no-such-name", "NAME") for document in refused]
    assert texts[0] == texts[1], "a refusal does not tell whether the resource exists"


@pytest.fixture(scope="module")
def narrow(server: Guarded) -> Key:
    actions = [action.value for action in Action if action is not Action.METRICS]
    return server.new({"actions": actions, "topics": ["see*"], "groups": ["see*"], "locks": ["see*"]})


# -- before the body --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(server: Guarded) -> Generator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=10) as connection:
        yield connection


def head_of(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def status_on(connection: socket.socket) -> int:
    """Return the status of the next answer, and read its body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        more = connection.recv(1)
        assert more, f"the connection ended after {head!r}"
        head += more
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    while length:
        length -= len(connection.recv(length))
    return int(head.split()[1])


PUBLISH = f"/v1/topics/{SEEN_TOPIC}/messages"
POP = f"/v1/topics/{SEEN_TOPIC}/groups/seen/pop"
MESSAGE = {"messages": [{"body": "a message"}]}


def test_probes_need_no_key(server: Guarded) -> None:
    for path in ("/healthz", "/readyz"):
        assert server.send("GET", path).status_code == server.send("HEAD", path).status_code == 200
        assert server.send("GET", path, Key.new()).status_code == 200


def test_a_caller_is_refused_before_its_body_is_read(server: Guarded) -> None:
    for headers in ((f"content-length: {64 << 20}",), ("transfer-encoding: chunked",)):
        with connected(server) as connection:
            connection.sendall(head_of("POST", PUBLISH, *headers))
            assert status_on(connection) == 401


def test_two_credentials_in_one_request_are_refused(server: Guarded) -> None:
    other = server.new({"actions": ["inspect"]})
    given = [f"authorization: Bearer {key.token}" for key in (server.admin, other)]
    for pair in (given, given[::-1], [given[0]] * 2):
        with connected(server) as connection:
            connection.sendall(head_of("GET", "/v1", *pair))
            assert status_on(connection) == 401


def test_only_the_socket_for_peers_reads_the_headers_of_peers(server: Guarded) -> None:
    forged = {"popgate-passed-by": "x", "popgate-to": "x", "popgate-caller": "{}", "popgate-wait-seconds": "0"}
    problem(server.send("POST", POP, None, body={}, **forged), 401, "unauthenticated")
    caller = json.dumps({"name": "admin", "credential": "x", "grants": [everything()]})
    problem(
        server.send("GET", "/v1/admin/topics", None, **{**forged, "popgate-caller": caller}), 401, "unauthenticated"
    )


# -- revoked and expired --------------------------------------------------------------------------------


class Parked:
    """A request that waits in a thread."""

    def __init__(self, server: Guarded, path: str, key: Key, body: object) -> None:
        self.seconds = 0.0
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, path, key, body), daemon=True)
        self._thread.start()

    def _run(self, server: Guarded, path: str, key: Key, body: object) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=server.process.url, timeout=40, trust_env=False) as client:
            self.response = client.post(path, json=body, headers=key.headers)
        self.seconds = time.monotonic() - began

    def ended(self, seconds: float) -> httpx.Response:
        self._thread.join(seconds)
        assert self.response is not None, f"it still waits after {seconds} s"
        return self.response


def lock_body(holder: str) -> object:
    return {"holder": holder, "ttl_seconds": LOCK_SECONDS, "wait_seconds": 20}


def test_a_revoked_key_ends_waiting_requests_within_a_second(server: Guarded) -> None:
    key = server.new(everything())
    empty = f"{server.empty_group()}/pop"
    lock = f"/v1/locks/l-{secrets.token_hex(4)}"
    assert server.send("PUT", lock, server.admin, body={"kind": "mutex"}).is_success
    assert server.send("POST", f"{lock}/acquire", server.admin, body=lock_body("one")).json()["acquired"]
    waiting = [
        Parked(server, empty, key, {"wait_seconds": 20}),
        Parked(server, empty, key, {"wait_seconds": 20, "attempt_id": secrets.token_hex(4)}),
        Parked(server, f"{lock}/acquire", key, lock_body("two")),
    ]
    time.sleep(1)
    server.keys.revoke(key)
    for one in waiting:
        problem(one.ended(1.5), 401, "unauthenticated")


def test_a_key_that_expires_ends_waiting_requests_within_a_second(server: Guarded) -> None:
    name = f"p-{secrets.token_hex(4)}"
    server.keys.principal(name, everything())
    key = server.known(server.keys.key(name, expires=datetime.now(UTC) + timedelta(seconds=2.5)))
    waiting = Parked(server, f"{server.empty_group()}/pop", key, {"wait_seconds": 20})
    problem(waiting.ended(5), 401, "unauthenticated")
    assert 1 < waiting.seconds < 3.7


def test_a_grant_that_is_withdrawn_ends_waiting_requests(server: Guarded) -> None:
    name = f"p-{secrets.token_hex(4)}"
    key = server.known(server.keys.principal(name, everything()))
    waiting = Parked(server, f"{server.empty_group()}/pop", key, {"wait_seconds": 20})
    time.sleep(0.7)
    server.keys.principals[name]["grants"] = [{"actions": ["consume"], "topics": ["other"]}]
    server.keys.write()
    problem(waiting.ended(1.5), 403, "forbidden")
    problem(server.send("POST", POP, key, body={}), 403, "forbidden")


@pytest.mark.parametrize("path", [PUBLISH, f"/v1/admin/topics/{HIDDEN_TOPIC}/groups/hidden/purge"])
def test_a_body_that_is_held_back_does_not_outlive_the_key(server: Guarded, path: str) -> None:
    key = server.new(everything())
    body = b'{"messages":[{"body":"late"}]}' if path == PUBLISH else b"{}"
    with connected(server) as connection:
        authorization = f"authorization: Bearer {key.token}"
        connection.sendall(head_of("POST", path, authorization, f"content-length: {len(body)}") + body[:1])
        time.sleep(0.5)
        server.keys.revoke(key)
        wait_until(lambda: server.send("GET", "/v1", key).status_code == 401, timeout_seconds=5, what="the key's end")
        time.sleep(0.5)
        connection.sendall(body[1:])
        assert status_on(connection) == 401


def test_a_lease_outlives_its_key_and_another_key_settles_it(server: Guarded) -> None:
    name = f"p-{secrets.token_hex(4)}"
    first = server.known(server.keys.principal(name, everything()))
    second = server.known(server.keys.key(name))
    assert server.send("POST", PUBLISH, first, body={"messages": [{"body": "kept"}]}).is_success
    popped = server.send("POST", POP, first, body={"wait_seconds": 5}).json()["messages"]
    assert [message["body"] for message in popped] == ["kept"]
    server.keys.revoke(first)
    wait_until(lambda: server.send("GET", "/v1", first).status_code == 401, timeout_seconds=5, what="the key's end")
    assert server.send("POST", POP, second, body={}).json()["messages"] == []
    handles = {"receipt_handles": [popped[0]["receipt_handle"]]}
    answered = server.send("POST", POP.replace("pop", "ack"), second, body=handles).json()
    assert answered["results"] == [{"status": "acked"}]


def test_a_bad_keys_file_keeps_the_old_keys(server: Guarded) -> None:
    key = server.new(everything())
    good = server.keys.path.read_text()
    for bad in ("principals = 3", good + "\n[principals.x]\nwrong = 1\n", "\0", ""):
        server.keys.path.write_text(bad)
        time.sleep(0.6)
        assert server.send("GET", "/v1", key).status_code == 200
    server.keys.write()
    server.known(key)
    server.keys.path.chmod(0o644)
    time.sleep(0.6)
    assert server.send("GET", "/v1", key).status_code == 200
    server.keys.path.chmod(0o600)
    assert "chmod 600" in server.process.output
    assert key.token not in server.process.output


def test_a_new_key_with_the_same_id_does_not_keep_the_requests_of_the_old_one(server: Guarded) -> None:
    name = f"p-{secrets.token_hex(4)}"
    key = server.known(server.keys.principal(name, everything()))
    waiting = Parked(server, f"{server.empty_group()}/pop", key, {"wait_seconds": 20})
    time.sleep(0.7)
    server.keys.principals[name]["keys"][key.id] = ("0" * 64, None)
    server.keys.write()
    problem(waiting.ended(1.5), 401, "unauthenticated")


def test_a_revoked_key_ends_the_wait_for_a_redrive(server: Guarded) -> None:
    group = server.empty_group()
    for _ in range(3):
        assert server.send("POST", f"{group.partition('/groups')[0]}/messages", server.admin, body=MESSAGE).is_success
        popped = server.send("POST", f"{group}/pop", server.admin, body={"wait_seconds": 5}).json()["messages"]
        rejected = {"entries": [{"receipt_handle": popped[0]["receipt_handle"]}]}
        assert server.send("POST", f"{group}/reject", server.admin, body=rejected).is_success
    key = server.new(everything())
    path = f"/v1/admin{group.removeprefix('/v1')}/dead-letters/redrive"
    waiting = Parked(server, path, key, {"wait_seconds": 20, "rate_per_second": 0.1})
    time.sleep(0.7)
    server.keys.revoke(key)
    problem(waiting.ended(1.5), 401, "unauthenticated")
    assert server.send("DELETE", path, server.admin).is_success
    if not server.forwards:  # the proxy that forwards a request does not know that it will wait
        limited_key = server.new(everything(), limits={"parked_pops": 0})
        limited(server.send("POST", path, limited_key, body={"wait_seconds": 1}), "parked_pops")


def test_a_revoked_key_cuts_off_a_streamed_answer(server: Guarded) -> None:
    group = server.empty_group()
    topic = group.partition("/groups")[0]
    body = {"messages": [{"body": "x" * 1_000_000}] * 8}
    for _ in range(5):  # more than both kernels buffer
        assert server.send("POST", f"{topic}/messages", server.admin, body=body).is_success
    key = server.new(everything())
    stream = f"{group}/lease-groups/s/1"
    formed = {"max_messages": 40, "slices": 1, "invisibility_seconds": 600}
    wait_until(
        lambda: server.send("GET", group, server.admin).json()["ready"] == 40, timeout_seconds=10, what="the messages"
    )
    count = server.send("PUT", stream, key, body=formed).json()["count"]
    assert count == 40
    with connected(server) as connection:
        connection.sendall(head_of("GET", f"{stream}/messages?slice=0", f"authorization: Bearer {key.token}"))
        received = len(connection.recv(4_096))
        assert received
        time.sleep(0.3)
        server.keys.revoke(key)
        wait_until(lambda: is_refused(server, key), timeout_seconds=5, what="the key's end")
        time.sleep(0.5)
        with contextlib.suppress(ConnectionError):
            while more := len(connection.recv(1 << 20)):
                received += more
    assert received < 30_000_000


# -- what depends on what exists --------------------------------------------------------------------------------


def test_lists_show_what_the_caller_may_see(server: Guarded, narrow: Key) -> None:
    for lock in ("seen-lock", "other-lock"):
        assert server.send("PUT", f"/v1/locks/{lock}", server.admin, body={"kind": "mutex"}).is_success
    topics = server.send("GET", "/v1/admin/topics", narrow).json()["topics"]
    assert [(one["topic"], one["groups"]) for one in topics] == [(SEEN_TOPIC, ["seen"])]
    assert server.send("GET", f"/v1/admin/topics/{SEEN_TOPIC}", narrow).json()["groups"] == ["seen"]
    assert [one["name"] for one in server.send("GET", "/v1/locks", narrow).json()["locks"]] == ["seen-lock"]


def test_use_does_not_create_without_the_permission_to_create(server: Guarded) -> None:
    key = server.new({"actions": ["publish", "consume", "inspect"]})
    topic = f"/v1/topics/new-{secrets.token_hex(4)}"
    requests: list[tuple[str, str, object]] = [
        ("POST", f"{topic}/messages", {"messages": [{"body": "x"}]}),
        ("POST", f"{topic}/groups/g/pop", {}),
        ("POST", f"{topic}/groups/g/assignment", {"client_id": "c", "supports": ["pull"]}),
        ("PUT", f"{topic}/groups/g/lease-groups/s/1", {"max_messages": 1}),
    ]
    for method, path, body in requests:
        document = problem(server.send(method, path, key, body=body), 403, "forbidden")
        assert document["action"] == "create"
    problem(server.send("GET", f"/v1/admin{topic.removeprefix('/v1')}", server.admin), 404, "topic_not_found")
    creator = server.new({"actions": ["publish", "create"]})
    assert server.send(*requests[0][:2], creator, body=requests[0][2]).is_success


def test_the_permission_to_create_does_not_change_what_exists(server: Guarded) -> None:
    key = server.new({"actions": ["create", "inspect"]})
    topic = f"/v1/admin/topics/new-{secrets.token_hex(4)}"
    group = f"{topic}/groups/g"
    assert server.send("PUT", topic, key, body={"queues": 2}).status_code == 201
    assert server.send("PUT", topic, key, body={"queues": 2}).status_code == 200
    assert server.send("PUT", group, key, body={"max_deliveries": 7}).status_code == 201
    assert server.send("PUT", group, key, body={"max_deliveries": 7}).status_code == 200
    assert server.send("PUT", group, key).status_code == 200
    assert server.send("POST", f"{group}/pause", server.admin).is_success
    for method, path, body in (
        ("PUT", topic, {"queues": 3}),
        ("PUT", group, {"max_deliveries": 8}),
        ("PUT", group, {"paused": False}),
    ):
        document = problem(server.send(method, path, key, body=body), 403, "forbidden")
        assert document["action"] == "admin"
    assert server.send("GET", group, key).json()["policy"]["paused"]


def test_a_creator_at_the_same_moment_can_not_undo_a_pause(server: Guarded) -> None:
    key = server.new({"actions": ["create", "inspect"]})
    group = f"/v1/admin/topics/{SEEN_TOPIC}/groups/g-{secrets.token_hex(4)}"
    assert server.send("PUT", group, key, body={"max_deliveries": 7}).status_code == 201
    stop = threading.Event()

    def put_again() -> None:
        with httpx.Client(base_url=server.process.url, timeout=20, trust_env=False) as client:
            while not stop.is_set():
                client.put(group, json={"max_deliveries": 7}, headers=key.headers)

    threads = [threading.Thread(target=put_again, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            assert server.send("POST", f"{group}/pause", server.admin).is_success
            time.sleep(0.02)
            assert server.send("GET", group, server.admin).json()["policy"]["paused"]
            assert server.send("POST", f"{group}/resume", server.admin).is_success
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_adopting_needs_a_pattern_of_broker_queues(server: Guarded) -> None:
    actions = [action.value for action in Action]
    for grant, code in (({}, "forbidden"), ({"queues": ["billing.*"]}, "forbidden"), ({"queues": ["orders.*"]}, "")):
        key = server.new({"actions": actions, **grant})
        path = f"/v1/admin/topics/adopted-{secrets.token_hex(4)}"
        answered = server.send("PUT", path, key, body={"adopt": ["orders.eu"]})
        if code:
            assert "orders.eu" in problem(answered, 403, code)["detail"]
        else:
            assert answered.status_code in (400, 409), "permitted, but there is no such queue"


def test_a_redrive_needs_publish_on_its_target(server: Guarded) -> None:
    admin_only = {"actions": ["admin"], "topics": [SEEN_TOPIC]}
    path = f"/v1/admin/topics/{SEEN_TOPIC}/groups/seen/dead-letters/redrive"
    key = server.new(admin_only)
    for body in ({}, {"target_topic": HIDDEN_TOPIC}):
        assert problem(server.send("POST", path, key, body=body), 403, "forbidden")["action"] == "publish"
    own = server.new(admin_only, {"actions": ["publish"], "topics": [SEEN_TOPIC]})
    problem(server.send("POST", path, own, body={"target_topic": HIDDEN_TOPIC}), 403, "forbidden")
    assert server.send("POST", path, own, body={"wait_seconds": 5}).is_success


def test_a_line_end_in_a_path_leads_to_no_other_operation(server: Guarded) -> None:
    key = server.new({"actions": ["consume"]})
    path = f"/v1/admin/topics/{SEEN_TOPIC}/groups/seen/dead-letters/redrive"
    problem(server.send("GET", path, key), 403, "forbidden")
    for tail in ("%0A", "%0D", "%00", "%0D%0A"):
        problem(server.send("GET", path + tail, key), 404, "not_found")


# -- limits --------------------------------------------------------------------------------


def limited(response: httpx.Response, limit: str) -> None:
    assert limit in problem(response, 429, "limit_exceeded")["detail"]
    assert int(response.headers["retry-after"]) >= 1


def test_requests_beyond_the_rate_of_a_principal_are_refused(server: Guarded) -> None:
    key = server.new(everything(), limits={"requests_per_second": 20})
    time.sleep(1.5)
    began = time.monotonic()
    answers = [server.send("GET", "/v1", key) for _ in range(80)]
    seconds = time.monotonic() - began
    served = sum(one.is_success for one in answers)
    assert 20 <= served <= 20 + 20 * seconds + 1
    limited(next(one for one in answers if not one.is_success), "requests_per_second")
    assert server.send("GET", "/v1", server.admin).is_success


def test_more_waiting_pops_than_a_principal_may_have_are_refused(server: Guarded) -> None:
    key = server.new(everything(), limits={"parked_pops": 2})
    path = f"{server.empty_group()}/pop"
    waiting = [Parked(server, path, key, {"wait_seconds": 3}) for _ in range(2)]
    time.sleep(1)
    limited(server.send("POST", path, key, body={"wait_seconds": 3}), "parked_pops")
    assert server.send("POST", path, key, body={}).is_success
    for one in waiting:
        assert one.ended(5).is_success
    assert server.send("POST", path, key, body={"wait_seconds": 0.1}).is_success


def test_pulls_count_as_waiting_requests_whoever_owns_the_queue(server: Guarded) -> None:
    group = server.empty_group()
    admin_path = f"/v1/admin{group.removeprefix('/v1')}"
    assert server.send("PUT", f"{admin_path}/consume-mode", server.admin, body={"mode": "pull"}).is_success
    key = server.new(everything(), limits={"parked_pops": 1})

    def assigned() -> dict[str, Any]:
        asked = {"client_id": "c", "supports": ["pull"]}
        return dict(server.send("POST", f"{group}/assignment", server.admin, body=asked).json())

    wait_until(lambda: assigned().get("queues") == [0], timeout_seconds=10, what="the assignment")
    pull = {"client_id": "c", "generation": assigned()["generation"], "wait_seconds": 4}
    first = Parked(server, f"{group}/queues/0/pull", key, pull)
    time.sleep(1)
    limited(server.send("POST", f"{group}/queues/0/pull", key, body=pull), "parked_pops")
    first.ended(8)


def test_more_connections_than_a_principal_may_have_are_refused(server: Guarded) -> None:
    key = server.new(everything(), limits={"connections": 3})
    authorization = f"authorization: Bearer {key.token}"
    wait_until(lambda: server.send("GET", "/v1", server.admin).is_success, timeout_seconds=5, what="the admin")
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(server)) for _ in range(4)]
        statuses: list[int] = []
        for connection in connections:
            connection.sendall(head_of("GET", "/v1", authorization))
            statuses.append(status_on(connection))
        assert sorted(statuses) == [200, 200, 200, 429]
    with connected(server) as connection:
        wait_until(
            lambda: server.send("GET", "/v1", key).status_code == 200, timeout_seconds=5, what="the connections' end"
        )


def test_bodies_beyond_the_bytes_of_a_principal_are_refused(server: Guarded) -> None:
    key = server.new(everything(), limits={"bytes_in_flight": 100_000})
    authorization = f"authorization: Bearer {key.token}"
    with connected(server) as first, connected(server) as second, connected(server) as third:
        first.sendall(head_of("POST", PUBLISH, authorization, "content-length: 60000"))
        time.sleep(0.3)
        second.sendall(head_of("POST", PUBLISH, authorization, "content-length: 60000"))
        assert status_on(second) == 429
        third.sendall(head_of("POST", PUBLISH, authorization, "transfer-encoding: chunked"))
        assert status_on(third) == 429
    wait_until(
        lambda: server.send("POST", PUBLISH, key, body={"messages": [{"body": "x" * 60_000}]}).is_success,
        timeout_seconds=5,
        what="the bytes to be free",
    )


def test_a_principal_creates_no_more_topics_than_its_limit(server: Guarded) -> None:
    prefix = f"mine-{secrets.token_hex(4)}."
    key = server.new({"actions": ["create", "publish"], "topics": [f"{prefix}*"]}, limits={"topics": 2})
    for name in "ab":
        path = f"/v1/admin/topics/{prefix}{name}"
        assert server.send("PUT", path, key, body={"queues": 1}).status_code == 201
    limited(server.send("PUT", f"/v1/admin/topics/{prefix}c", key, body={"queues": 1}), "topics")
    publish = f"/v1/topics/{prefix}c/messages"
    limited(server.send("POST", publish, key, body={"messages": [{"body": "x"}]}), "topics")


# -- the audit log --------------------------------------------------------------------------------


def audited(server: Guarded, **wanted: object) -> list[dict[str, Any]]:
    records = map(json.loads, (server.keys.path.parent / "audit.jsonl").read_text().splitlines())
    return [one for one in records if all(one.get(field) == value for field, value in wanted.items())]


def test_a_change_whose_client_disconnects_is_recorded(server: Guarded) -> None:
    group = server.empty_group()
    path = f"/v1/admin{group.removeprefix('/v1')}/dead-letters/purge"
    resource = f"topic {group.split('/')[3]} group g"
    for pause in (0.0, 0.003, 0.01):
        with connected(server) as connection:
            authorization = f"authorization: Bearer {server.admin.token}"
            connection.sendall(head_of("POST", path, authorization, "content-length: 2") + b"{}")
            time.sleep(pause)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(
        lambda: len(audited(server, operation="dead_letters_purge", resource=resource)) == 3,
        timeout_seconds=5,
        what="the records",
    )


def test_the_audit_log_has_what_is_created_by_use_and_what_the_body_asks_for(server: Guarded) -> None:
    topic = f"by-use-{secrets.token_hex(4)}"
    creator = server.new({"actions": ["publish", "create"]})
    publisher = server.new({"actions": ["publish"]})
    path = f"/v1/topics/{topic}/messages"
    problem(server.send("POST", path, publisher, body=MESSAGE), 403, "forbidden")
    assert server.send("POST", path, creator, body=MESSAGE).is_success
    resource = f"topic {topic}"
    denied = {"event": "denied", "key": publisher.id, "action": "create", "resource": resource}
    made = {"event": "admin", "key": creator.id, "action": "create", "resource": resource}
    wait_until(
        lambda: bool(audited(server, **denied) and audited(server, **made)), timeout_seconds=5, what="both records"
    )


def test_the_audit_log_tells_who_changed_what_and_who_was_refused(server: Guarded) -> None:
    key = server.new({"actions": ["inspect"]})
    topic = f"audited-{secrets.token_hex(4)}"
    assert server.send("PUT", f"/v1/admin/topics/{topic}", server.admin, body={"queues": 1}).is_success
    problem(server.send("DELETE", f"/v1/admin/topics/{topic}", key), 403, "forbidden")
    log = server.keys.path.parent / "audit.jsonl"

    def records() -> list[dict[str, Any]]:
        return [one for one in map(json.loads, log.read_text().splitlines()) if topic in str(one.get("resource"))]

    wait_until(lambda: len(records()) == 2, timeout_seconds=5, what="both records")
    made, refused = records()
    assert (made["event"], made["principal"], made["key"], made["outcome"]) == ("admin", "admin", server.admin.id, 201)
    assert (refused["event"], refused["key"], refused["action"], refused["outcome"]) == ("denied", key.id, "admin", 403)
    assert made["address"] == refused["address"] == "127.0.0.1"
    assert log.stat().st_mode & 0o777 == 0o600
    for one in (server.admin, key):
        assert one.token not in log.read_text()
