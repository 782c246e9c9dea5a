"""Locks over HTTP whose client disconnects, whose proxy ends or loses its broker, and beside programs on AMQP."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import aio_pika
import pytest

from contract.http_locks import HOLDABLE, NOT_ACQUIRED, HttpLock, lock, pool, wait_for
from contract.http_server import Json, problem
from popgate.amqp_locks import LockKind, Locks
from support.rabbitmq import RabbitNode

__all__ = ["lock", "pool"]


class RawClient:
    """A client whose connection can be cut at any moment."""

    def __init__(self, lock: HttpLock) -> None:
        url = lock.client.base_url
        self.socket = socket.create_connection((url.host, url.port))
        body = json.dumps({"holder": "raw", "ttl_seconds": 60, "wait_seconds": 30}).encode()
        head = f"POST {lock.path}/acquire HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
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
    grants = [lock.here.held("a"), by_use.here.held("b")]
    lock.server.process.kill()
    lock.server.process.start()
    for one, grant in zip((lock, by_use), grants, strict=True):
        one.is_lost(grant, "a restart of the proxy ends all locks")
        after = one.held("c")
        assert after["fencing_token"] > grant["fencing_token"]
        assert one.release(grant) is False
        one.verify(after)
    assert lock.view()["slots"] == 1


def test_what_a_killed_proxy_held_is_lost_through_the_others_at_once(lock: HttpLock) -> None:
    if not lock.has_peers:
        pytest.skip("there is no other proxy")
    other = HttpLock(lock.server)
    lock.define(kind="semaphore", slots=1)
    dying, living = lock.server.process, lock.server.owner
    assert living is not None
    grants = [lock.at(dying).held("a"), other.at(dying).held("b")]
    stays = HttpLock(lock.server)
    kept = stays.at(living).held("c")
    stays.at(dying).verify(kept)
    dying.kill()
    try:
        for one, grant in zip((lock, other), grants, strict=True):
            there = one.at(living)
            there.is_lost(grant, "a restart of the proxy ends all locks")
            assert there.release(grant) is False
            after = there.held("d")
            assert after["fencing_token"] > grant["fencing_token"]
            there.is_lost(grant)
            there.verify(after)
        stays.at(living).verify(kept)
    finally:
        dying.start()
    stays.at(dying).verify(kept)
    lock.at(dying).is_lost(grants[0], "a restart of the proxy ends all locks")


def test_a_proxy_that_stops_answers_who_waits_and_frees_what_it_held(lock: HttpLock, pool: ThreadPoolExecutor) -> None:
    grant = lock.here.held()
    waiting = pool.submit(lambda: lock.here.acquire(wait_seconds=30))
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
