"""Ordering keys over HTTP, on each broker: in order, one at a time, and other keys flow on."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.http_server import HttpServer, Topic, answer
from contract.http_server import lean_server as server
from support.answers import bodies

__all__ = ["server"]

pytestmark = pytest.mark.slow

MANY = 10_000


def publish_buffered(topic: Topic, *bodies: str, **fields: object) -> None:
    """Publish, and return when one pop can get everything: popgate prefetches little from a queue of unknown sizes."""
    topic.publish(*["warm"] * 64)
    assert set(topic.ack(*topic.pop_all(64))) == {"acked"}
    topic.publish(*bodies, **fields)
    time.sleep(0.5)


def publish_many(topic: Topic, numbered: list[str], **fields: object) -> None:
    for start in range(0, len(numbered), 256):
        topic.publish(*numbered[start : start + 256], **fields)


def test_one_pop_may_return_several_messages_of_a_key_in_order(topic: Topic) -> None:
    publish_buffered(topic, "1", "2", "3", ordering_key="k")
    assert bodies(topic.pop(max_messages=3)) == ["1", "2", "3"]


def test_while_one_of_a_key_is_leased_no_later_one_comes_and_other_keys_flow_on(topic: Topic) -> None:
    topic.publish("a1", "a2", ordering_key="a")
    topic.publish("b1", ordering_key="b")
    topic.publish("free")
    first = topic.pop_one()
    assert first["body"] == "a1"
    assert sorted(bodies(topic.pop_all(2))) == ["b1", "free"]
    assert topic.pop(max_messages=10) == []
    state = topic.state()
    assert state["blocked"] == 1
    assert state["ready"] == 1
    assert topic.ack(first) == ["acked"]
    assert topic.pop_one()["body"] == "a2"
    assert topic.state()["blocked"] == 0


def test_what_was_released_comes_before_later_ones_of_its_key(topic: Topic) -> None:
    """The issue's own example: of 1, 2, 3 the second is released, the others are acked; then comes 2, then 4."""
    publish_buffered(topic, "1", "2", "3", "4", ordering_key="k")
    one, two, three = topic.pop(max_messages=3)
    assert topic.ack(one, three) == ["acked", "acked"]
    topic.settle("release", [{"receipt_handle": two["receipt_handle"]}])
    again = topic.pop_one()
    assert again["body"] == "2"
    assert again["delivery_count"] == 2
    assert topic.pop() == []
    assert topic.ack(again) == ["acked"]
    assert topic.pop_one()["body"] == "4"


def test_a_key_waits_for_the_delay_of_a_release(topic: Topic) -> None:
    topic.publish("1", "2", ordering_key="k")
    topic.publish("x", ordering_key="other")
    one = topic.pop_one()
    assert one["body"] == "1"
    topic.settle("release", [{"receipt_handle": one["receipt_handle"], "delay_seconds": 2}])
    released_at = time.monotonic()
    assert bodies(topic.pop(max_messages=5)) == ["x"]
    again = topic.pop_one(wait_seconds=5)
    assert again["body"] == "1"
    assert time.monotonic() - released_at >= 1.9
    assert topic.pop() == []


def test_a_key_goes_on_when_a_lease_expires_with_the_same_message(topic: Topic) -> None:
    topic.publish("1", "2", ordering_key="k")
    assert topic.pop_one(invisibility_seconds=1)["body"] == "1"
    again = topic.pop_one(wait_seconds=5)
    assert again["body"] == "1"
    assert topic.ack(again) == ["acked"]
    assert topic.pop_one()["body"] == "2"


def test_a_rejected_message_makes_way(topic: Topic) -> None:
    topic.publish("1", "2", ordering_key="k")
    one = topic.pop_one()
    assert topic.settle("reject", [{"receipt_handle": one["receipt_handle"]}])[0]["status"] == "rejected"
    assert topic.pop_one()["body"] == "2"


def test_the_next_eligible_message_comes_from_behind_10_000_blocked_ones_within_a_second(server: HttpServer) -> None:
    topic = server.topic()
    publish_many(topic, [f"b{number}" for number in range(MANY)], ordering_key="busy")
    topic.publish("eligible", ordering_key="idle")
    assert topic.pop_one(wait_seconds=5)["body"] == "b0"
    started = time.monotonic()
    (found,) = topic.pop(wait_seconds=20)
    elapsed = time.monotonic() - started
    assert found["body"] == "eligible"
    assert elapsed < 1.0, f"it took {elapsed:.2f} s"
    assert topic.state()["blocked"] == MANY - 1


def test_many_clients_never_see_a_key_out_of_order(server: HttpServer, full_run: bool) -> None:
    """Eight clients that now and then release or let expire; every message is settled in the order of its key."""
    topic = server.topic(queues=3)
    keys, each = 12, 25 if full_run else 10
    for number in range(each):
        for key in range(keys):
            topic.publish(f"{key}.{number}", ordering_key=f"key-{key}")
    acked: dict[str, list[int]] = {f"{key}": [] for key in range(keys)}
    seen: Counter[str] = Counter()
    total = keys * each

    def work(worker: int) -> None:
        while sum(map(len, acked.values())) < total:
            for place, message in enumerate(topic.pop(max_messages=4, wait_seconds=1, invisibility_seconds=1)):
                body = message["body"]
                seen[body] += 1
                key, number = body.split(".")
                action = (hash((body, seen[body])) + place) % 9
                if seen[body] > 2 or action > 2:
                    done = acked[key]
                    before = list(done)
                    if topic.ack(message) == ["acked"]:
                        assert int(number) not in before
                        done.append(int(number))
                elif action == 0:
                    topic.settle("release", [{"receipt_handle": message["receipt_handle"]}])
                elif action == 1:
                    topic.settle("release", [{"receipt_handle": message["receipt_handle"], "delay_seconds": 0.3}])
                # else: hang

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sum(map(len, acked.values())) == total
    assert topic.pop() == []


def test_order_outlives_a_crash_of_the_proxy(server: HttpServer) -> None:
    topic = server.topic()
    publish_buffered(topic, *map(str, range(6)), ordering_key="k")
    zero, one, two = topic.pop(max_messages=3, invisibility_seconds=30)
    assert topic.ack(zero, two) == ["acked", "acked"]
    server.process.kill()
    server.process.start()
    topic = Topic(server.client, topic.name)
    assert topic.pop(max_messages=10, wait_seconds=2) == [], "1 is leased"
    assert topic.ack(one) == ["acked"]
    assert topic.pop_one()["body"] == "3"


def test_what_was_given_back_before_a_crash_still_comes_before_what_was_leased_with_it(server: HttpServer) -> None:
    topic = server.topic()
    publish_buffered(topic, *map(str, range(4)), ordering_key="k")
    zero, one = topic.pop(max_messages=2, invisibility_seconds=30)
    assert topic.settle("release", [{"receipt_handle": zero["receipt_handle"]}]) == [{"status": "released"}]
    server.process.kill()
    server.process.start()
    topic = Topic(server.client, topic.name)
    again = topic.pop(max_messages=10, wait_seconds=5)
    assert bodies(again) == ["0"]
    assert topic.ack(one) == ["acked"]
    assert topic.pop(max_messages=10) == []
    assert topic.ack(*again) == ["acked"]
    assert bodies(topic.pop_all(2)) == ["2", "3"]


def test_many_keys_cost_no_more_than_one(server: HttpServer, full_run: bool) -> None:
    """Draining many keys is not much slower than draining one; the benchmark has the figures."""
    times: list[float] = []
    count = 100_000 if full_run else 1_000
    for keys in (1, count):
        topic = server.topic()
        entries = [{"body": "x", "ordering_key": f"k{number % keys}"} for number in range(count)]
        for start in range(0, count, 256):
            path = f"{topic.path}/messages"
            answer(server.client.post(path, json={"messages": entries[start : start + 256]}))
        started = time.monotonic()
        left = count
        while left:
            batch = topic.pop(max_messages=256, wait_seconds=5)
            topic.ack(*batch)
            left -= len(batch)
        times.append(time.monotonic() - started)
    assert times[1] < max(times[0], 0.5) * 3, times
