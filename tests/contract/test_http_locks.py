"""Locks over HTTP, held by a real proxy: on RabbitMQ, and with the proxy as the only arbiter."""

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from contract.http_locks import HOLDABLE, NOT_ACQUIRED, HttpLock, lock, metric, pool, wait_for, wait_for_line
from contract.http_server import HttpServer, Json, answer, problem
from support.rabbitmq import RabbitNode

__all__ = ["lock", "pool"]


# ---------------------------------------------------------------- holding


@pytest.mark.parametrize("kind", HOLDABLE)
def test_one_holds_it_and_the_next_gets_it_with_a_higher_token(lock: HttpLock, kind: str) -> None:
    lock.define(**HOLDABLE[kind])
    before = time.time()
    first = lock.held("billing-1", 30)
    assert first["slot"] == 1
    assert before + 29 < first["expires_at"] < time.time() + 31
    assert lock.acquire() == NOT_ACQUIRED
    view = lock.view()
    (holder,) = view.pop("holders")
    assert view == {"name": lock.name, "kind": kind, "slots": 1, "enabled": True, "waiting": 0}
    assert holder["holder"] == "billing-1"
    assert holder["fencing_token"] == first["fencing_token"]
    assert holder["expires_at"] in ([first["expires_at"], None] if lock.has_peers else [first["expires_at"]])
    assert before - 1 < holder["acquired_at"] < time.time() + 1
    held = lock.verify(first)
    assert held == {"held": True, "fencing_token": first["fencing_token"], "expires_at": first["expires_at"]}
    assert lock.release(first) is True
    assert lock.release(first) is False
    lock.is_lost(first, "released")
    second = lock.held("billing-2")
    assert second["fencing_token"] > first["fencing_token"]
    assert second["token"] != first["token"]
    assert lock.release(first) is False
    lock.verify(second)


def test_twenty_clients_at_once_never_hold_it_together(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    lock.define(kind="semaphore", slots=2)
    inside: list[int] = []
    tokens: dict[int, list[int]] = {1: [], 2: []}

    def work(number: int) -> None:
        grant = lock.held(f"h{number}", wait_seconds=30)
        inside.append(number)
        assert len(inside) <= 2
        tokens[grant["slot"]].append(grant["fencing_token"])
        time.sleep(0.01)
        lock.verify(grant)
        inside.remove(number)
        assert lock.release(grant)

    list(pool.map(work, range(20)))
    assert len(tokens[1]) + len(tokens[2]) == 20
    for given in tokens.values():
        assert given == sorted(set(given)), "a fencing token only grows"
    # RabbitMQ counts the messages returned by a closed channel a moment later.
    wait_for(lambda: [lock.view()[what] for what in ("holders", "waiting")] == [[], 0])


@pytest.mark.parametrize("kind", ["mutex", "semaphore"])
def test_a_released_slot_is_free_for_the_next_client(lock: HttpLock, kind: str) -> None:
    """Through any proxy, and immediately: RabbitMQ closes a holder's channel before it has the token back."""
    lock.define(**HOLDABLE[kind])
    for _ in range(8):
        for holding, asking in itertools.product(map(lock.at, lock.processes), repeat=2):
            assert holding.release(holding.held())
            assert asking.view()["holders"] == []
            assert holding.release(holding.held())
            grant = asking.acquire()
            assert grant["acquired"], "it was refused though no client holds it"
            assert asking.release(grant)


def test_who_waits_is_served_in_order(lock: HttpLock, pool: ThreadPoolExecutor, request: pytest.FixtureRequest) -> None:
    first = lock.held()
    order: list[int] = []

    def work(number: int) -> None:
        grant = lock.held(f"h{number}", wait_seconds=20)
        order.append(number)
        lock.release(grant)

    waiting: list[Future[None]] = []
    for number in range(6):
        waiting.append(pool.submit(work, number))
        lock.wait_for_waiting(number + 1)
        if lock.server.broker == "rabbitmq":
            node: RabbitNode = request.getfixturevalue("rabbitmq")
            wait_for_line(node.amqp_url(lock.server.vhost), lock.name, number + 1)
    assert metric(lock.server, "popgate_locks_waiting", kind="mutex") == 6
    lock.release(first)
    for one in waiting:
        one.result()
    assert order == list(range(6))


def test_a_wait_ends_with_nothing_when_its_time_is_over(lock: HttpLock) -> None:
    lock.held()
    before = time.monotonic()
    assert lock.acquire(wait_seconds=0.5) == NOT_ACQUIRED
    assert 0.4 < time.monotonic() - before < 3
    assert lock.view()["waiting"] == 0


def test_a_lock_that_is_not_renewed_goes_to_the_next_at_its_ttl(lock: HttpLock) -> None:
    expired = metric(lock.server, "popgate_lock_events_total", event="expired", kind="mutex")
    began = time.monotonic()
    first = lock.held(ttl_seconds=1)
    second = lock.held(wait_seconds=5)
    assert 0.95 < time.monotonic() - began < 3
    assert second["fencing_token"] > first["fencing_token"]
    lock.is_lost(first, "not renewed within")
    assert metric(lock.server, "popgate_lock_events_total", event="expired", kind="mutex") == expired + 1


def test_a_lock_that_is_renewed_stays_and_its_token_never_falls(lock: HttpLock) -> None:
    grant = lock.held(ttl_seconds=1)
    token = grant["fencing_token"]
    for _ in range(4):
        time.sleep(0.4)
        renewed = answer(lock.ask("renew", token=grant["token"]))
        assert renewed["held"] is True
        assert renewed["expires_at"] > grant["expires_at"]
        assert renewed["fencing_token"] >= token
        token = renewed["fencing_token"]
    longer = answer(lock.ask("renew", token=grant["token"], ttl_seconds=100))
    assert longer["expires_at"] > time.time() + 90
    assert lock.acquire() == NOT_ACQUIRED
    lock.release(grant)
    assert lock.held()["fencing_token"] > token


def test_a_token_is_of_its_lock_only(lock: HttpLock) -> None:
    other = HttpLock(lock.server)
    grant = lock.held()
    other.held()
    other.is_lost(grant, "nothing is held under this token")
    assert other.release(grant) is False
    lock.verify(grant)


# ---------------------------------------------------------------- administration


def test_a_lock_is_defined_listed_changed_and_deleted(lock: HttpLock) -> None:
    made = lock.define(kind="semaphore", slots=3)
    assert made == {
        "name": lock.name,
        "kind": "semaphore",
        "slots": 3,
        "enabled": True,
        "holders": [],
        "waiting": 0,
    }
    assert lock.define(kind="semaphore", enabled=False) == {**made, "enabled": False}
    assert lock.define(kind="semaphore", slots=2) == {**made, "enabled": False, "slots": 2}
    assert lock.acquire() == NOT_ACQUIRED
    assert lock.define(kind="semaphore", enabled=True) == {**made, "slots": 2}
    grant = lock.here.held("lister")
    listed = {one["name"]: one for one in answer(lock.here.client.get("/v1/locks"))["locks"]}
    assert list(listed) == sorted(listed)
    assert listed[lock.name] == lock.here.view()
    assert listed[lock.name]["holders"][0]["holder"] == "lister"
    problem(lock.client.put(lock.path, json={"kind": "mutex"}), 409, "conflict")
    problem(lock.client.put(lock.path, json={"kind": "persistent_mutex"}), 409, "conflict")
    assert answer(lock.client.delete(lock.path)) == {"deleted": True}
    lock.is_lost(grant, "deleted")
    assert lock.release(grant) is False
    problem(lock.client.get(lock.path), 404, "lock_not_found")
    problem(lock.client.delete(lock.path), 404, "lock_not_found")
    problem(lock.ask("force-release"), 404, "lock_not_found")
    problem(lock.ask("verify", token="x"), 404, "lock_not_found")
    for _ in lock.processes:
        assert lock.name not in {one["name"] for one in answer(lock.client.get("/v1/locks"))["locks"]}
    lock.define(kind="persistent_mutex")
    assert lock.held()["acquired"], "under another kind"


def test_who_waits_for_a_lock_that_is_deleted_is_told(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    lock.define(kind="persistent_mutex")
    lock.held()
    waiting = pool.submit(lambda: lock.ask("acquire", holder="w", ttl_seconds=5, wait_seconds=20))
    lock.wait_for_waiting(1)
    assert answer(lock.client.delete(lock.path)) == {"deleted": True}
    problem(waiting.result(), 404, "lock_not_found")


def test_who_waits_for_a_disabled_lock_gets_it_once_it_is_enabled(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    assert lock.define(kind="persistent_mutex", enabled=False)["enabled"] is False
    assert lock.acquire() == NOT_ACQUIRED
    waiting = pool.submit(lambda: lock.held(wait_seconds=15))
    lock.wait_for_waiting(1)
    assert lock.define(kind="persistent_mutex", enabled=True)["enabled"] is True
    lock.verify(waiting.result())


def test_a_holder_of_a_removed_slot_learns_it_and_nobody_has_the_slot_before(lock: HttpLock) -> None:
    lock.define(kind="semaphore", slots=2)
    grants = {grant["slot"]: grant for grant in (lock.here.held("a"), lock.here.held("b"))}
    lock.define(kind="semaphore", slots=1)
    lock.define(kind="semaphore", slots=2)
    assert lock.acquire() == NOT_ACQUIRED, "the slot that is back is still held"
    lock.verify(grants[2])
    lock.define(kind="semaphore", slots=1)
    assert len(lock.here.view()["holders"]) == 2, "who does not know it yet still holds"
    assert lock.acquire() == NOT_ACQUIRED
    lock.is_lost(grants[2], "the slot was removed")
    assert metric(lock.server, "popgate_lock_events_total", event="lost", kind="semaphore") >= 1
    lock.verify(grants[1])
    assert lock.acquire() == NOT_ACQUIRED
    lock.define(kind="semaphore", slots=2)
    again = lock.held()
    assert again["slot"] == 2
    assert again["fencing_token"] > grants[2]["fencing_token"]


def test_a_disabled_lock_is_lost_with_the_next_renewal(lock: HttpLock) -> None:
    lock.define(kind="persistent_mutex")
    grant = lock.held()
    lock.define(kind="persistent_mutex", enabled=False)
    problem(lock.ask("renew", token=grant["token"]), 409, "lock_lost")
    lock.is_lost(grant, "the slot was removed")
    assert lock.view()["holders"] == []


def test_an_operator_takes_it_away_from_whom_he_means(lock: HttpLock) -> None:
    lock.define(kind="semaphore", slots=3)
    first, second, third = lock.held("a"), lock.held("b"), lock.held("c")
    assert answer(lock.ask("force-release", holder="nobody")) == {"released": 0, "holders": []}
    released = answer(lock.ask("force-release", holder="b"))
    assert (released["released"], released["holders"][0]["slot"]) == (1, second["slot"])
    lock.is_lost(second, "an operator released it")
    asked = {"holder": "c", "fencing_token": third["fencing_token"]}
    assert answer(lock.ask("force-release", **asked))["released"] == 1
    lock.verify(first)
    assert lock.held("d")["acquired"]
    assert answer(lock.client.post(f"{lock.path}/force-release"))["released"] == 2, "all of them"
    lock.is_lost(first, "an operator released it")
    assert lock.view()["holders"] == []


# ---------------------------------------------------------------- what is asked wrongly


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("acquire", {"ttl_seconds": 5}, "holder"),
        ("acquire", {"holder": "", "ttl_seconds": 5}, "holder"),
        ("acquire", {"holder": "x" * 129, "ttl_seconds": 5}, "holder"),
        ("acquire", {"holder": 5, "ttl_seconds": 5}, "holder"),
        ("acquire", {"holder": "h"}, "ttl_seconds"),
        ("acquire", {"holder": "h", "ttl_seconds": 0}, "ttl_seconds"),
        ("acquire", {"holder": "h", "ttl_seconds": 43_201}, "ttl_seconds"),
        ("acquire", {"holder": "h", "ttl_seconds": 5, "wait_seconds": 31}, "wait_seconds"),
        ("acquire", {"holder": "h", "ttl_seconds": 5, "wait": 1}, "wait"),
        ("verify", {}, "token"),
        ("verify", {"token": None}, "token"),
        ("verify", {"token": "x", "ttl_seconds": 1}, "ttl_seconds"),
        ("renew", {"token": "x", "ttl_seconds": "long"}, "ttl_seconds"),
        ("release", {"token": "x" * 200}, "token"),
        ("force-release", {"fencing_token": 1.5}, "fencing_token"),
        ("force-release", {"slot": 1}, "slot"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(lock_server: HttpServer, verb: str, body: Json, field: str) -> None:
    response = lock_server.client.post(f"/v1/locks/wrong/{verb}", json=body)
    assert problem(response, 400, "invalid_request")["field"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "kind"),
        ({"kind": "spin"}, "kind"),
        ({"kind": "mutex", "slots": 2}, "slots"),
        ({"kind": "mutex", "enabled": False}, "enabled"),
        ({"kind": "persistent_mutex", "slots": 0}, "slots"),
        ({"kind": "semaphore", "slots": 65}, "slots"),
        ({"kind": "semaphore", "slots": -1}, "slots"),
        ({"kind": "semaphore", "slots": 1.5}, "slots"),
        ({"kind": "semaphore", "slots": "2"}, "slots"),
        ({"kind": "semaphore", "enabled": 1}, "enabled"),
        ({"kind": "semaphore", "holders": []}, "holders"),
    ],
)
def test_a_wrong_definition_is_refused_by_its_field(lock: HttpLock, body: Json, field: str) -> None:
    assert problem(lock.client.put(lock.path, json=body), 400, "invalid_request")["field"] == field
    problem(lock.client.get(lock.path), 404, "lock_not_found")


@pytest.mark.parametrize("name", ["a b", "x" * 65, "x" * 5_000, "ä", "a:b", "a%0Ab"])
def test_a_name_that_is_none_is_refused(lock_server: HttpServer, name: str) -> None:
    path = f"/v1/locks/{name}"
    for response in (
        lock_server.client.get(path),
        lock_server.client.put(path, json={"kind": "mutex"}),
        lock_server.client.delete(path),
        lock_server.client.post(f"{path}/acquire", json={"holder": "h", "ttl_seconds": 5}),
        lock_server.client.post(f"{path}/verify", json={"token": "x"}),
    ):
        assert problem(response, 400, "invalid_request")["field"] == "name"


def test_paths_methods_and_queries_that_are_not_there(lock: HttpLock) -> None:
    problem(lock.client.post(f"{lock.path}/steal", json={}), 404, "not_found")
    problem(lock.client.post(f"{lock.path}/verify/x", json={}), 404, "not_found")
    assert lock.client.post(lock.path).headers["allow"] == "DELETE, GET, PUT"
    problem(lock.client.get(f"{lock.path}/acquire"), 405, "method_not_allowed")
    problem(lock.client.get(f"{lock.path}?x=1"), 400, "invalid_request")
    problem(lock.client.post("/v1/locks", json={}), 405, "method_not_allowed")


def test_locks_speak_messagepack_too(lock: HttpLock) -> None:
    def ask(verb: str, fields: object) -> Json:
        response = lock.client.post(
            f"{lock.path}/{verb}",
            content=msgspec.msgpack.encode(fields),
            headers={"content-type": "application/msgpack"},
        )
        assert response.headers["content-type"] == "application/msgpack"
        return msgspec.msgpack.decode(response.content)

    grant = ask("acquire", {"holder": "h", "ttl_seconds": 60})
    assert grant["acquired"] is True
    assert ask("acquire", {"holder": "h", "ttl_seconds": 60}) == NOT_ACQUIRED
    assert ask("renew", {"token": grant["token"], "ttl_seconds": 60})["held"] is True
    assert ask("release", {"token": grant["token"]}) == {"released": True}
    assert "locks" in answer(lock.client.get("/v1"))["features"]


def test_no_token_is_ever_logged(lock: HttpLock) -> None:
    grant = lock.held()
    lock.release(grant)
    lock.is_lost(grant)
    for process in lock.processes:
        assert grant["token"] not in process.output
        assert "Traceback" not in process.output


def test_the_lock_of_the_replica_keepers_is_not_for_clients(lock_server: HttpServer) -> None:
    for method, path, body in (
        ("POST", "/v1/locks/replica-keeper/acquire", {"holder": "h", "ttl_seconds": 30}),
        ("PUT", "/v1/locks/replica-keeper", {"kind": "mutex"}),
    ):
        refused = problem(lock_server.client.request(method, path, json=body), 400, "invalid_request")
        assert "replica keepers" in refused["detail"]
