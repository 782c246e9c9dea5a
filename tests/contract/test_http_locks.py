"""Locks over HTTP, held by a real proxy: on RabbitMQ, and where the proxy arbitrates alone."""

import asyncio
import json
import random
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aio_pika
import msgspec
import pytest

from contract.http_server import HttpServer, Json, answer, problem, put, server
from popgate.amqp_locks import LockKind, Locks
from support.rabbitmq import RabbitNode

__all__ = ["server"]

HOLDABLE: dict[str, dict[str, object]] = {
    "mutex": {"kind": "mutex"},
    "persistent_mutex": {"kind": "persistent_mutex"},
    "semaphore": {"kind": "semaphore"},
}
NOT_ACQUIRED = {"acquired": False, "token": None, "fencing_token": None, "slot": None, "expires_at": None}


class HttpLock:
    """One lock of a server."""

    def __init__(self, server: HttpServer, name: str = "") -> None:
        self.server = server
        self.client = server.client
        self.name = name or f"l-{secrets.token_hex(4)}"
        self.path = f"/v1/locks/{self.name}"

    def define(self, **fields: object) -> Json:
        return put(self.client, self.path, fields)

    def ask(self, verb: str, **fields: object) -> Any:
        return self.client.post(f"{self.path}/{verb}", json=fields)

    def acquire(self, holder: str = "h", ttl_seconds: float = 60, **fields: object) -> Json:
        return answer(self.ask("acquire", holder=holder, ttl_seconds=ttl_seconds, **fields))

    def held(self, holder: str = "h", ttl_seconds: float = 60, wait_seconds: float = 5) -> Json:
        """A grant that must come."""
        grant = self.acquire(holder, ttl_seconds, wait_seconds=wait_seconds)
        assert grant["acquired"] is True
        assert len(grant["token"]) >= 32
        return grant

    def verify(self, grant: Json) -> Json:
        return answer(self.ask("verify", token=grant["token"]))

    def release(self, grant: Json) -> bool:
        return bool(answer(self.ask("release", token=grant["token"]))["released"])

    def is_lost(self, grant: Json, why: str = "") -> None:
        for verb in ("verify", "renew"):
            document = problem(self.ask(verb, token=grant["token"]), 409, "lock_lost")
            assert why in document["detail"]
            assert "acquire it anew" in document["detail"]
            assert grant["token"] not in document["detail"]

    def view(self) -> Json:
        return answer(self.client.get(self.path))

    def wait_for_waiting(self, count: int) -> None:
        wait_for(lambda: self.view()["waiting"] == count)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < deadline, "waited 8 s in vain"
        time.sleep(0.01)


def metric(server: HttpServer, name: str, **labels: str) -> float:
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    lines = server.client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{{shown}}}")), 0.0)


@pytest.fixture
def lock(server: HttpServer) -> HttpLock:
    return HttpLock(server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


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
    assert holder["expires_at"] == first["expires_at"]
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
    view = lock.view()
    assert (view["holders"], view["waiting"]) == ([], 0)


def test_who_waits_is_served_in_order(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
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
        time.sleep(0.35 if lock.server.broker == "rabbitmq" else 0)  # until it stands in the broker's line
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
    grant = lock.held("lister")
    listed = {one["name"]: one for one in answer(lock.client.get("/v1/locks"))["locks"]}
    assert list(listed) == sorted(listed)
    assert listed[lock.name] == lock.view()
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
    grants = {grant["slot"]: grant for grant in (lock.held("a"), lock.held("b"))}
    lock.define(kind="semaphore", slots=1)
    lock.define(kind="semaphore", slots=2)
    assert lock.acquire() == NOT_ACQUIRED, "the slot that is back is still held"
    lock.verify(grants[2])
    lock.define(kind="semaphore", slots=1)
    assert len(lock.view()["holders"]) == 2, "who does not know it yet still holds"
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


# ---------------------------------------------------------------- clients that go, and proxies that end


class RawClient:
    """A client whose connection can be cut at any moment."""

    def __init__(self, lock: HttpLock) -> None:
        url = lock.client.base_url
        self.socket = socket.create_connection((url.host, url.port))
        body = json.dumps({"holder": "raw", "ttl_seconds": 60, "wait_seconds": 30}).encode()
        head = f"POST {lock.path}/acquire HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)


@contextmanager
def raw_client(lock: HttpLock) -> Generator[RawClient]:
    client = RawClient(lock)
    try:
        yield client
    finally:
        client.socket.close()


def test_a_client_that_goes_leaves_the_line_at_once(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    grant = lock.held()
    with raw_client(lock):
        lock.wait_for_waiting(1)
        behind = pool.submit(lambda: lock.held(wait_seconds=20))
        lock.wait_for_waiting(2)
    lock.wait_for_waiting(1)
    lock.release(grant)
    lock.verify(behind.result())


def test_a_grant_that_nobody_learns_of_is_released(lock: HttpLock) -> None:
    lock.define(kind="mutex")
    for _ in range(10):
        grant = lock.held(wait_seconds=10)
        with raw_client(lock) as client:
            lock.wait_for_waiting(1)
            lock.client.post(f"{lock.path}/release", json={"token": grant["token"]})
            client.socket.close()  # its answer is under way, or there, and unread
        wait_for(lambda: lock.view()["holders"] == [])
    assert lock.held()["acquired"]


@pytest.mark.parametrize("kind", ["mutex", "semaphore"])
def test_clients_that_come_and_go_at_any_moment_leave_nothing_behind(
    lock: HttpLock, pool: ThreadPoolExecutor, seed: int, kind: str
) -> None:
    lock.define(**HOLDABLE[kind])
    chance = random.Random(seed)

    def come_and_go(_: int) -> None:
        for _ in range(5):
            with raw_client(lock):
                time.sleep(chance.uniform(0, 0.15))

    def work(number: int) -> None:
        for _ in range(3):
            grant = lock.held(f"h{number}", wait_seconds=30)
            lock.verify(grant)
            assert lock.release(grant)

    working = [pool.submit(come_and_go, number) for number in range(8)]
    working += [pool.submit(work, number) for number in range(6)]
    for one in working:
        one.result()
    wait_for(lambda: lock.view()["holders"] == [])
    lock.held()


def test_a_kill_of_the_proxy_ends_its_locks_and_their_clients_are_told(lock: HttpLock) -> None:
    lock.define(kind="semaphore", slots=1)
    by_use = HttpLock(lock.server)
    grants = [lock.held("a"), by_use.held("b")]
    lock.server.process.kill()
    lock.server.process.start()
    for one, grant in zip((lock, by_use), grants, strict=True):
        one.is_lost(grant, "a restart of the proxy ends all locks")
        after = one.held("c")
        assert after["fencing_token"] > grant["fencing_token"]
        assert one.release(grant) is False
        one.verify(after)
    assert lock.view()["slots"] == 1


def test_a_proxy_that_stops_answers_who_waits_and_frees_what_it_held(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    grant = lock.held()
    waiting = pool.submit(lambda: lock.acquire(wait_seconds=30))
    lock.wait_for_waiting(1)
    began = time.monotonic()
    lock.server.process.stop()
    assert time.monotonic() - began < 3
    assert waiting.result() == NOT_ACQUIRED
    lock.server.process.start()
    lock.is_lost(grant, "a restart of the proxy ends all locks")
    assert lock.held()["fencing_token"] > grant["fencing_token"]


def test_a_connection_to_the_broker_that_is_cut_ends_the_locks_over_it(
    lock: HttpLock, request: pytest.FixtureRequest
) -> None:
    if lock.server.broker != "rabbitmq":
        pytest.skip("there is no connection to cut")
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    lock.define(kind="persistent_mutex")
    grant = lock.held()
    node.close_connections(lock.server.vhost)
    problem(lock.ask("verify", token=grant["token"]), 409, "lock_lost")
    later: list[Json] = []

    def acquired() -> bool:
        response = lock.ask("acquire", holder="h", ttl_seconds=60, wait_seconds=1)
        if response.status_code != 200:
            problem(response, 503, "broker_unavailable")
        later.append(response.json())
        return bool(later[-1].get("acquired"))

    wait_for(acquired)
    assert later[-1]["fencing_token"] > grant["fencing_token"]
    lock.is_lost(grant)


async def test_programs_on_amqp_and_clients_on_http_exclude_each_other(
    lock: HttpLock, request: pytest.FixtureRequest
) -> None:
    if lock.server.broker != "rabbitmq":
        pytest.skip("there is no AMQP")
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    connection = await aio_pika.connect(node.amqp_url(lock.server.vhost))
    locks = Locks(connection, holder="on amqp")
    await locks.administration.set_slots(lock.name, LockKind.SEMAPHORE, 2)
    grant = await locks.semaphore(lock.name).acquire()
    assert grant is not None
    made = await asyncio.to_thread(lock.define, kind="semaphore", slots=2)
    assert [(one["holder"], one["expires_at"]) for one in made["holders"]] == [("on amqp", None)]
    mine = await asyncio.to_thread(lock.held, "on http")
    assert await locks.semaphore(lock.name).acquire() is None
    assert [one["holder"] for one in (await asyncio.to_thread(lock.view))["holders"]] == ["on amqp", "on http"]
    assert (await asyncio.to_thread(lock.ask, "force-release", holder="on amqp")).json()["released"] == 1
    async with asyncio.timeout(5):
        await grant.lost.wait()
    await asyncio.to_thread(lock.verify, mine)
    await locks.close()
    await connection.close()


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
def test_a_wrong_body_is_refused_by_its_field(server: HttpServer, verb: str, body: Json, field: str) -> None:
    response = server.client.post(f"/v1/locks/wrong/{verb}", json=body)
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
def test_a_name_that_is_none_is_refused(server: HttpServer, name: str) -> None:
    path = f"/v1/locks/{name}"
    for response in (
        server.client.get(path),
        server.client.put(path, json={"kind": "mutex"}),
        server.client.delete(path),
        server.client.post(f"{path}/acquire", json={"holder": "h", "ttl_seconds": 5}),
        server.client.post(f"{path}/verify", json={"token": "x"}),
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
    assert grant["token"] not in lock.server.process.output
    assert "Traceback" not in lock.server.process.output
