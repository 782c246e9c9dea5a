"""Limits of a principal, and the audit log."""

import contextlib
import json
import secrets
import socket
import time
from typing import Any

from contract.guarded_server import (
    MESSAGE,
    PUBLISH,
    Guarded,
    Parked,
    audited,
    connected,
    head_of,
    limited,
    server,
    status_on,
)
from contract.http_server import problem
from support.key_files import everything
from support.processes import wait_until

__all__ = ["server"]


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
        assert status_on(third) == 413, "it may be larger than the limit, which no repetition changes"
    wait_until(
        lambda: server.send("POST", PUBLISH, key, body={"messages": [{"body": "x" * 60_000}]}).is_success,
        timeout_seconds=5,
        what="the bytes to be free",
    )


def test_a_body_that_is_larger_than_the_bytes_of_a_principal_is_not_to_be_repeated(server: Guarded) -> None:
    key = server.new(everything(), limits={"bytes_in_flight": 1 << 20})
    document = problem(
        server.send("POST", PUBLISH, key, body={"messages": [{"body": "x" * (1 << 20)}]}), 413, "message_too_large"
    )
    assert "bytes_in_flight = 1048576" in document["detail"]


def test_a_principal_creates_no_more_topics_than_its_limit(server: Guarded) -> None:
    prefix = f"mine-{secrets.token_hex(4)}."
    key = server.new({"actions": ["create", "publish"], "topics": [f"{prefix}*"]}, limits={"topics": 2})
    for name in "ab":
        path = f"/v1/admin/topics/{prefix}{name}"
        assert server.send("PUT", path, key, body={"queues": 1}).status_code == 201
    limited(server.send("PUT", f"/v1/admin/topics/{prefix}c", key, body={"queues": 1}), "topics")
    publish = f"/v1/topics/{prefix}c/messages"
    limited(server.send("POST", publish, key, body={"messages": [{"body": "x"}]}), "topics")


def test_a_change_whose_client_disconnects_is_recorded(server: Guarded) -> None:
    group = server.empty_group()
    path = f"/v1/admin{group.removeprefix('/v1')}/dead-letters/purge"
    resource = f"topic {group.split('/')[3]} group g"
    for pause, next_request in (
        (0.0, b""),
        (0.003, b""),
        (0.01, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"),
    ):
        with connected(server) as connection:
            authorization = f"authorization: Bearer {server.admin.token}"
            connection.sendall(head_of("POST", path, authorization, "content-length: 2") + b"{}" + next_request)
            time.sleep(pause)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(
        lambda: len(audited(server, operation="dead_letters_purge", resource=resource)) == 3,
        timeout_seconds=5,
        what="the records",
    )


def test_a_request_that_changes_nothing_does_not_flood_the_audit_log(server: Guarded) -> None:
    key = server.new({"actions": ["create", "inspect"]})
    id = key.token.split("_")[1]
    path = f"/v1/admin/topics/new-{secrets.token_hex(4)}"
    assert server.send("PUT", path, key, body={"queues": 1}).status_code == 201
    for _ in range(40):
        assert server.send("PUT", path, key, body={"queues": 1}).status_code == 200
        with connected(server) as connection:  # its body never arrives
            connection.sendall(head_of("PUT", path, f"authorization: Bearer {key.token}", "content-length: 9") + b"{")
    time.sleep(1.2)
    outcomes = [one.get("outcome") for one in audited(server, key=id, operation="topic_put")]
    assert outcomes.count(201) == 1
    assert 1 <= outcomes.count(200) <= 20
    assert len(outcomes) <= 21


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


def test_the_audit_log_does_not_have_what_could_not_be_created(server: Guarded) -> None:
    prefix = f"full-{secrets.token_hex(4)}."
    creator = server.new({"actions": ["consume", "create"], "topics": [f"{prefix}*"]}, limits={"topics": 1})
    assert server.send("POST", f"/v1/topics/{prefix}0/groups/g/pop", creator, body={}).is_success
    for number in range(1, 40):
        limited(server.send("POST", f"/v1/topics/{prefix}{number}/groups/g/pop", creator, body={}), "topics")
    wait_until(lambda: len(audited(server, key=creator.id)) >= 2, timeout_seconds=5, what="the records")
    time.sleep(0.5)
    assert {one["resource"] for one in audited(server, key=creator.id)} == {
        f"topic {prefix}0",
        f"topic {prefix}0 group g",
    }


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
