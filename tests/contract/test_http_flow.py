"""Features that hold messages back, over HTTP and on each broker: filters, max_in_flight, pause; and fairness."""

import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from contract.http_server import HttpServer, Json, Topic, answer, problem
from contract.http_server import lean_server as server
from support.answers import bodies
from support.proxy import plain_client

__all__ = ["server"]


@contextmanager
def parked(topic: Topic, **fields: object) -> Generator[Future[list[Json]]]:
    """A parked pop of another client; yields what it gets."""

    def pop() -> list[Json]:
        with plain_client(str(topic.client.base_url), timeout_seconds=20) as client:
            return Topic(client, topic.name).pop(wait_seconds=10, **fields)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pop)
        time.sleep(0.3)
        yield waiting


# -- filters ----------------------------------------------------------------------------------------------------------


def test_a_pop_with_a_filter_gets_only_what_passes_and_blocks_nothing(topic: Topic) -> None:
    topic.publish("r1", "r2", headers={"color": "red"})
    topic.publish("b1", headers={"color": "blue"})
    topic.publish("plain")
    assert bodies(topic.pop(max_messages=10, wait_seconds=1, filter={"color": "blue"})) == ["b1"]
    assert topic.pop(max_messages=10, filter={"color": "green"}) == []
    assert bodies(topic.pop_all(3)) == ["r1", "r2", "plain"]


def test_a_filter_takes_lists_several_headers_and_null_for_an_absent_one(topic: Topic) -> None:
    topic.publish("1", headers={"color": "red", "size": 1})
    topic.publish("2", headers={"color": "blue", "size": 2.0})
    topic.publish("3", headers={"color": "blue", "size": "2"})
    topic.publish("4", headers={"color": "blue", "size": True})
    topic.publish("5")
    assert bodies(topic.pop(max_messages=9, wait_seconds=1, filter={"color": ["red", "blue"], "size": [1, 2]})) == [
        "1",
        "2",
    ]
    assert bodies(topic.pop(max_messages=9, filter={"color": None})) == ["5"]
    assert bodies(topic.pop(max_messages=9, filter={"size": True})) == ["4"]
    assert bodies(topic.pop(max_messages=9, filter={})) == ["3"]


def test_a_parked_pop_wakes_only_for_what_passes_its_filter(topic: Topic) -> None:
    with parked(topic, filter={"color": "red"}) as waiting:
        topic.publish("no", headers={"color": "blue"})
        assert bodies(topic.pop_all(1)) == ["no"], "other pops get it meanwhile"
        topic.publish("yes", headers={"color": "red"})
        assert bodies(waiting.result()) == ["yes"]


def test_a_filter_finds_what_stands_behind_thousands_of_others(topic: Topic) -> None:
    for _ in range(12):
        topic.publish(*["other"] * 256, headers={"color": "blue"})
    topic.publish("wanted", headers={"color": "red"})
    assert bodies(topic.pop(wait_seconds=10, filter={"color": "red"})) == ["wanted"]
    assert topic.state()["ready"] == 12 * 256


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ("red", "filter"),
        ({"color": []}, "filter[...]"),
        ({"color": {"a": 1}}, "filter[...]"),
        ({f"h{number}": 1 for number in range(17)}, "filter"),
    ],
)
def test_a_bad_filter_is_refused_by_name(topic: Topic, wanted: object, field: str) -> None:
    document = problem(topic.client.post(f"{topic.group_path}/pop", json={"filter": wanted}), 400, "invalid_request")
    assert document["field"].startswith(field.split("[", maxsplit=1)[0])


# -- max_in_flight ----------------------------------------------------------------------------------------------------


def test_no_more_than_max_in_flight_are_leased_and_the_next_pop_is_told_so(topic: Topic) -> None:
    topic.policy(max_in_flight=3)
    topic.publish(*"abcde")
    leased = topic.pop_all(3)
    document = problem(topic.client.post(f"{topic.group_path}/pop", json={}), 429, "too_many_in_flight")
    assert "max_in_flight" in document["detail"]
    response = topic.client.post(f"{topic.group_path}/pop", json={"wait_seconds": 1})
    problem(response, 429, "too_many_in_flight")
    assert int(response.headers["retry-after"]) >= 1
    assert topic.ack(leased[0]) == ["acked"]
    assert len(topic.pop(max_messages=5, wait_seconds=1)) == 1
    topic.policy(max_in_flight=None)
    assert len(topic.pop(max_messages=5, wait_seconds=1)) == 1


def test_a_parked_pop_is_served_when_a_lease_makes_room(topic: Topic) -> None:
    topic.policy(max_in_flight=1)
    topic.publish("a", "b")
    first = topic.pop_one()
    with parked(topic) as waiting:
        acked_at = time.monotonic()
        assert topic.ack(first) == ["acked"]
        assert bodies(waiting.result()) == ["b"]
        assert time.monotonic() - acked_at < 1.0


# -- pause ------------------------------------------------------------------------------------------------------------


def test_a_paused_group_hands_out_nothing_and_settles_what_is_leased(topic: Topic) -> None:
    topic.publish("a", "b", "c")
    leased = topic.pop_one()
    admin = f"{topic.admin_path}/groups/default"
    assert answer(topic.client.post(f"{admin}/pause"))["policy"]["paused"] is True
    assert answer(topic.client.post(f"{admin}/pause"))["policy"]["paused"] is True
    started = time.monotonic()
    assert topic.pop() == []
    assert topic.pop(wait_seconds=1) == []
    assert 0.9 < time.monotonic() - started < 5
    topic.publish("d")
    assert topic.state()["ready"] == 3
    assert (
        topic.settle("extend", [{"receipt_handle": leased["receipt_handle"], "invisibility_seconds": 60}])[0]["status"]
        == "extended"
    )
    assert topic.ack(leased) == ["acked"]
    assert answer(topic.client.post(f"{admin}/resume"))["policy"]["paused"] is False
    assert sorted(bodies(topic.pop_all(3))) == ["b", "c", "d"]


def test_a_resumed_group_serves_the_pops_that_wait(topic: Topic) -> None:
    topic.policy(paused=True)
    topic.publish("a")
    with parked(topic) as waiting:
        topic.policy(paused=False)
        assert bodies(waiting.result()) == ["a"]


def test_a_pause_outlives_a_restart(server: HttpServer) -> None:
    topic = server.topic()
    topic.policy(paused=True)
    topic.publish("a")
    server.process.stop()
    server.process.start()
    topic = Topic(server.client, topic.name)
    assert topic.pop(wait_seconds=1) == []
    topic.policy(paused=False)
    assert topic.pop_one()["body"] == "a"


# -- fairness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{}, {"max_in_flight": 64}], ids=["free", "bounded"])
def test_many_pollers_get_equal_shares(server: HttpServer, full_run: bool, policy: dict[str, object]) -> None:
    """200 pollers and 20,000 messages; a tenth of both in a short run."""
    topic = server.topic(queues=2)
    topic.policy(**policy)
    pollers, total = (200, 20_000) if full_run else (20, 1_000)
    for start in range(0, total, 200):
        topic.publish(*(str(number) for number in range(start, start + 200)))
    shares: Counter[int] = Counter()
    gate = threading.Barrier(pollers)

    def poll(poller: int) -> None:
        with plain_client(str(topic.client.base_url), timeout_seconds=40) as client:
            gate.wait()
            while True:
                response = client.post(f"{topic.group_path}/pop", json={"wait_seconds": 1})
                if response.status_code == 429:
                    continue
                messages = answer(response)["messages"]
                if not messages:
                    return
                handles = [message["receipt_handle"] for message in messages]
                answer(client.post(f"{topic.group_path}/ack", json={"receipt_handles": handles}))
                shares[poller] += len(messages)

    with ThreadPoolExecutor(pollers) as pool:
        list(pool.map(poll, range(pollers)))
    assert sum(shares.values()) == total
    assert max(shares.values()) <= 1.5 * min(shares.values()), shares
