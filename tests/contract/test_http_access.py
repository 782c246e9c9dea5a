"""Who may do what over HTTP: every operation without a key, with a wrong, expired or revoked one, without the action,
and outside of the patterns.

The cases are made from the table of operations, so that a new operation is tested without a change here.
"""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest

from contract.guarded_server import (
    HIDDEN_TOPIC,
    MESSAGE,
    POP,
    PUBLISH,
    SEEN_TOPIC,
    Guarded,
    audited,
    connected,
    head_of,
    is_refused,
    narrow,
    server,
    status_on,
)
from contract.http_server import problem
from popgate.api.access import TABLE
from popgate.domain.permissions import Action
from support.key_files import Key, KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.redis import RedisServer

__all__ = ["narrow", "server"]


OPERATIONS = sorted(key for key, access in TABLE.items() if not access.is_public)


WITH_ACTION = [key for key in OPERATIONS if TABLE[key].action is not None]


ON_NAMES = [key for key in WITH_ACTION if "{}" in key[1]]


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
    pages = ("/docs", "/docs/{}", "/openapi.json", "/console", "/console/{}")
    not_described = {("GET", path) for path in pages}
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
    server: Guarded, without: Callable[..., Key], operation: tuple[str, str]
) -> None:
    action, or_action = TABLE[operation].action, TABLE[operation].or_action
    assert action is not None
    key = without(*{action, or_action or action})
    for name in (SEEN_TOPIC, "unknown"):  # the answer is the same, whether the resource exists or not
        document = problem(server.send(*request_of(operation, name), key), 403, "forbidden")
        assert document["action"] == action
        assert action in document["detail"]


@pytest.fixture(scope="module")
def without(server: Guarded) -> Callable[..., Key]:
    """Return a key with all actions but some. `admin` includes `inspect`."""
    keys: dict[frozenset[Action], Key] = {}

    def key_without(*actions: Action) -> Key:
        missing = frozenset({*actions, Action.ADMIN} if Action.INSPECT in actions else actions)
        if missing not in keys:
            given = [one.value for one in Action if one not in missing]
            keys[missing] = server.new({"actions": given, "queues": ["*"]})
        return keys[missing]

    return key_without


@pytest.mark.parametrize("operation", ON_NAMES, ids=" ".join)
def test_each_operation_needs_a_pattern_that_matches(server: Guarded, narrow: Key, operation: tuple[str, str]) -> None:
    refused = [
        problem(server.send(*request_of(operation, name), narrow), 403, "forbidden")
        for name in (HIDDEN_TOPIC, "no-such-name")
    ]
    texts = [document["detail"].replace(HIDDEN_TOPIC, "NAME").replace("no-such-name", "NAME") for document in refused]
    assert texts[0] == texts[1], "a refusal does not tell whether the resource exists"


def test_probes_need_no_key(server: Guarded) -> None:
    for path in ("/healthz", "/readyz"):
        assert server.send("GET", path).status_code == server.send("HEAD", path).status_code == 200
        assert server.send("GET", path, Key.new()).status_code == 200


def test_only_known_callers_read_why_a_proxy_is_not_ready(
    tmp_path: Path, amqp_url: str, redis_server: RedisServer
) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    readers = [keys.principal(action, {"actions": [action]}) for action in ("metrics", "inspect", "admin")]
    others: list[Key | None] = [
        keys.principal("worker", {"actions": ["publish", "consume", "create", "lock"]}),
        Key.new(),
        None,
    ]
    with RedisServer(tmp_path / "redis") as redis:
        flags = ["--amqp-url", amqp_url, "--redis-url", redis.url(), "--keys-file", str(keys.path)]
        with ProxyProcess(tmp_path / "proxy", *flags) as proxy:

            def readyz(key: Key | None, method: str = "GET") -> httpx.Response:
                return proxy.client.request(method, "/readyz", headers={} if key is None else key.headers)

            assert [readyz(key).status_code for key in (*readers, *others)] == [200] * 6
            redis.kill()
            wait_until(lambda: readyz(None).status_code == 503, timeout_seconds=10, what="the loss of Redis")
            for reader in readers:
                assert f"Redis at 127.0.0.1:{redis.port}" in problem(readyz(reader), 503, "not_ready")["detail"]
            for key in others:
                document = problem(readyz(key), 503, "not_ready")
                assert document["detail"] == "popgate can't serve requests now; its log says why"
                assert readyz(key, "HEAD").status_code == 503
            assert proxy.client.get("/healthz").status_code == 200
            (line,) = [line for line in proxy.output.splitlines() if "this proxy is not ready" in line]
            assert f"Redis at 127.0.0.1:{redis.port}" in line
            redis.start()
            wait_until(lambda: readyz(None).status_code == 200, timeout_seconds=10, what="the return of Redis")


def test_a_caller_is_refused_before_its_body_is_read(server: Guarded) -> None:
    for headers in ((f"content-length: {64 << 20}",), ("transfer-encoding: chunked",)):
        with connected(server) as connection:
            connection.sendall(head_of("POST", PUBLISH, *headers))
            assert status_on(connection) == 401


def test_a_body_of_unknown_length_is_not_parsed_behind_its_refusal(server: Guarded) -> None:
    with connected(server) as connection:
        connection.settimeout(2)  # shorter than the three seconds for the rest of a body
        connection.sendall(head_of("POST", PUBLISH, "transfer-encoding: chunked"))
        while connection.recv(65_536):
            pass


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


def test_a_redrive_to_another_topic_needs_consume_because_it_shows_the_messages(server: Guarded) -> None:
    path = f"/v1/admin/topics/{HIDDEN_TOPIC}/groups/hidden/dead-letters/redrive"
    grants = {"actions": ["admin"]}, {"actions": ["publish", "consume"], "topics": [SEEN_TOPIC]}
    key = server.new(*grants)
    body = {"target_topic": SEEN_TOPIC, "wait_seconds": 5}
    document = problem(server.send("POST", path, key, body=body), 403, "forbidden")
    assert (document["action"], HIDDEN_TOPIC in document["detail"]) == ("consume", True)
    reader = server.new(*grants, {"actions": ["consume"], "topics": [HIDDEN_TOPIC]})
    assert server.send("POST", path, reader, body=body).is_success


def test_a_redrive_to_all_groups_of_its_own_topic_needs_consume_too(server: Guarded) -> None:
    path = f"/v1/admin/topics/{HIDDEN_TOPIC}/groups/hidden/dead-letters/redrive"
    grants = {"actions": ["admin", "create", "publish"]}, {"actions": ["consume"], "groups": ["seen"]}
    body = {"target_topic": HIDDEN_TOPIC, "wait_seconds": 5}
    document = problem(server.send("POST", path, server.new(*grants), body=body), 403, "forbidden")
    assert document["action"] == "consume"
    assert server.send("POST", path, server.new(*grants), body={"wait_seconds": 5}).is_success, "back to its own group"


def test_a_refused_target_is_in_the_audit_log_of_the_proxy_that_refuses_it(server: Guarded) -> None:
    key = server.new({"actions": ["admin"], "topics": [SEEN_TOPIC]})
    path = f"/v1/admin/topics/{SEEN_TOPIC}/groups/seen/dead-letters/redrive"
    problem(server.send("POST", path, key, body={"target_topic": HIDDEN_TOPIC}), 403, "forbidden")
    if server.forwards:
        return  # the owner in this test writes no audit log
    wanted = {"event": "denied", "key": key.id, "resource": f"topic {HIDDEN_TOPIC}"}
    wait_until(lambda: bool(audited(server, **wanted)), timeout_seconds=5, what="the record")
    assert [one["action"] for one in audited(server, **wanted)] == ["publish"]


def test_publishing_creates_no_group_that_the_key_does_not_cover(server: Guarded) -> None:
    key = server.new({"actions": ["publish", "create"], "groups": ["billing"]})
    path = f"/v1/topics/new-{secrets.token_hex(4)}/messages"
    document = problem(server.send("POST", path, key, body=MESSAGE), 403, "forbidden")
    assert (document["action"], "group default" in document["detail"]) == ("create", True)


def test_an_attempt_id_is_its_principals_own(server: Guarded) -> None:
    first, second = server.new(everything()), server.new(everything())
    group = server.empty_group()
    topic = group.partition("/groups")[0]
    for key in (first, second):
        assert server.send("POST", f"{topic}/messages", key, body=MESSAGE).is_success
    asked = {"attempt_id": "1", "wait_seconds": 5}
    handles = [
        server.send("POST", f"{group}/pop", key, body=asked).json()["messages"][0]["receipt_handle"]
        for key in (first, second, first, second)
    ]
    assert handles[0] == handles[2] != handles[1] == handles[3]


def test_a_line_end_in_a_path_leads_to_no_other_operation(server: Guarded) -> None:
    key = server.new({"actions": ["consume"]})
    path = f"/v1/admin/topics/{SEEN_TOPIC}/groups/seen/dead-letters/redrive"
    problem(server.send("GET", path, key), 403, "forbidden")
    for tail in ("%0A", "%0D", "%00", "%0D%0A"):
        problem(server.send("GET", path + tail, key), 404, "not_found")


def test_who_may_inspect_but_not_consume_sees_no_parts_of_messages(server: Guarded) -> None:
    group = server.empty_group()
    topic = group.split("/")[3]
    admin_group = f"/v1/admin{group.removeprefix('/v1')}"
    messages = [{"body": "secret", "message_id": f"m{n}", "ordering_key": "secret"} for n in (1, 2, 3)]
    assert server.send("POST", f"/v1/topics/{topic}/messages", server.admin, body={"messages": messages}).is_success
    popped = server.send("POST", f"{group}/pop", server.admin, body={"wait_seconds": 5}).json()["messages"]
    rejected = [{"receipt_handle": popped[0]["receipt_handle"], "reason": "secret", "error": {"text": "secret"}}]
    assert server.send("POST", f"{group}/reject", server.admin, body={"entries": rejected}).is_success
    assert server.send("POST", f"{group}/pop", server.admin, body={"wait_seconds": 5}).json()["messages"]
    inspector = server.new({"actions": ["inspect"]})
    for path in (f"{admin_group}/explain", *(f"/v1/admin/topics/{topic}/messages/m{n}" for n in (1, 2, 3))):
        seen, whole = (server.send("GET", path, key) for key in (inspector, server.admin))
        assert (seen.status_code, whole.status_code) == (200, 200)
        assert "secret" not in seen.text
        assert "secret" in whole.text
    assert server.send("GET", f"{admin_group}/messages", inspector).json()["action"] == "consume"
    assert server.send("GET", f"{admin_group}/messages", server.admin).is_success


def test_a_message_is_not_found_in_groups_that_the_caller_may_not_see(server: Guarded, narrow: Key) -> None:
    path = f"/v1/admin/topics/{SEEN_TOPIC}/messages/any"
    assert [one["group"] for one in server.send("GET", path, narrow).json()["groups"]] == ["seen"]
    assert {"hidden", "seen"} <= {one["group"] for one in server.send("GET", path, server.admin).json()["groups"]}
