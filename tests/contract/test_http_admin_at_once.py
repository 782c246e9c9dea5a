"""Concurrent administrators, publishers and consumers: no request waits forever, and none gets a 500."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.http_server import HttpServer
from contract.http_server import lean_server as server
from support.proxy import plain_client

__all__ = ["server"]

ROUNDS = 15
SECONDS_MAX = 20
PUBLISH = {"messages": [{"body": "x"}] * 8}


@pytest.fixture
def at_once(server: HttpServer) -> Iterator[Callable[..., list[int]]]:
    """Runs requests (method, path, body) at the same moment; returns their statuses, in order."""
    with plain_client(server.process.url, timeout_seconds=SECONDS_MAX) as client:
        client.get("/healthz")

        def send(*requests: tuple[str, str, object]) -> list[int]:
            barrier = threading.Barrier(len(requests))

            def one(request: tuple[str, str, object]) -> int:
                method, path, body = request
                barrier.wait()
                return client.request(method, path, json=body).status_code

            with ThreadPoolExecutor(len(requests)) as threads:
                return list(threads.map(one, requests))

        yield send


def new_topic() -> str:
    return f"t-{secrets.token_hex(4)}"


def test_publishers_and_a_change_of_the_queue_count_do_not_wait_for_each_other(
    at_once: Callable[..., Sequence[int]],
) -> None:
    for queues in range(2, 2 + ROUNDS):
        name = new_topic()
        admin, messages = f"/v1/admin/topics/{name}", f"/v1/topics/{name}/messages"
        statuses = at_once(
            *[("POST", messages, PUBLISH)] * 3,
            ("PUT", admin, {"queues": queues}),
            ("PUT", admin, {"queues": queues + 1}),
            ("POST", f"/v1/topics/{name}/groups/default/pop", {"wait_seconds": 0}),
        )
        assert set(statuses[:3]) == {200}
        assert set(statuses[3:5]) <= {200, 201, 409}, "409: the queues are not drained"
        assert statuses[5] == 200


def test_a_group_that_is_deleted_twice_at_once_is_gone_the_second_time(at_once: Callable[..., Sequence[int]]) -> None:
    for _ in range(ROUNDS):
        path = f"/v1/admin/topics/{new_topic()}"
        assert at_once(("PUT", path, {"queues": 1})) == [201]
        assert at_once(("PUT", f"{path}/groups/g", None)) == [201]
        assert sorted(at_once(*[("DELETE", f"{path}/groups/g", None)] * 3)) == [204, 404, 404]


def test_a_group_of_a_topic_that_is_being_deleted_is_created_before_or_not_at_all(
    at_once: Callable[..., Sequence[int]],
) -> None:
    for _ in range(ROUNDS):
        path = f"/v1/admin/topics/{new_topic()}"
        assert at_once(("PUT", path, {"queues": 1})) == [201]
        deleted, put = at_once(("DELETE", path, None), ("PUT", f"{path}/groups/g", None))
        assert (deleted, put) in {(204, 201), (204, 404)}
