"""What ends when a key is revoked or expires, or a grant is withdrawn: waiting requests, bodies and streams."""

import contextlib
import secrets
import time
from datetime import UTC, datetime, timedelta

import pytest

from contract.guarded_server import (
    HIDDEN_TOPIC,
    MESSAGE,
    POP,
    PUBLISH,
    Guarded,
    Parked,
    connected,
    head_of,
    is_refused,
    limited,
    lock_body,
    server,
    status_on,
)
from contract.http_server import problem
from support.key_files import everything
from support.processes import wait_until

__all__ = ["server"]


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


def test_a_body_that_never_arrives_does_not_outlive_the_key(server: Guarded) -> None:
    key = server.new(everything())
    with connected(server) as connection:
        connection.sendall(head_of("POST", PUBLISH, f"authorization: Bearer {key.token}", "content-length: 9") + b"{")
        time.sleep(0.5)
        began = time.monotonic()
        server.keys.revoke(key)
        assert status_on(connection) == 401
        assert time.monotonic() - began < 1.5


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
        before = server.send("GET", path, server.admin).json()["id"]
        limited(server.send("POST", path, limited_key, body={"wait_seconds": 1}), "parked_pops")
        assert server.send("GET", path, server.admin).json()["id"] == before, "the refused one was not started"


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
