"""A proxy whose buffer is smaller than the backlog: pops continue, one share of the buffer after the other."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.http_server import HttpServer, Topic, answer, put, started_server

BUFFER_BYTES = 1024 * 1024
POPS = 8
KEYS = 96
LEASE_SECONDS = 2


@pytest.fixture(scope="module", params=["embedded", "rabbitmq"])
def small_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp(f"small-{request.param}")
    with started_server(request, folder, "--buffer-bytes-max", str(BUFFER_BYTES)) as server:
        yield server


@pytest.fixture
def topic(small_server: HttpServer) -> Iterator[Topic]:
    """A topic that leaves the whole buffer to the next one."""
    topic = small_server.topic()
    yield topic
    assert topic.client.delete(topic.admin_path).is_success
    assert small_server.process.is_running()


@pytest.mark.parametrize("size", [1, BUFFER_BYTES // 3, BUFFER_BYTES])
def test_every_parked_pop_is_served(topic: Topic, size: int) -> None:
    bodies = [str(number).ljust(size, "x") for number in range(POPS)]
    with ThreadPoolExecutor(POPS) as pool:
        parked = [pool.submit(topic.pop_one, wait_seconds=10) for _ in range(POPS)]
        topic.publish(*bodies)
        assert sorted(each.result()["body"] for each in parked) == bodies


def test_a_backlog_larger_than_the_buffer_is_drained_in_order(topic: Topic) -> None:
    bodies = [str(number).ljust(BUFFER_BYTES // 2, "x") for number in range(POPS)]
    topic.publish(*bodies)
    assert [message["body"] for message in topic.pop_all(POPS)] == bodies


def test_what_comes_back_is_lined_up_though_all_of_it_is_larger_than_the_buffer(
    topic: Topic, small_server: HttpServer
) -> None:
    """A killed proxy had leased six times as much as its buffer holds; then all of it comes back at once."""
    bodies = {f"k{number}": "x" * (BUFFER_BYTES // 16) for number in range(KEYS)}
    for key, body in bodies.items():
        topic.publish(f"0{body}", ordering_key=key)
    assert len(topic.pop_all(KEYS, invisibility_seconds=LEASE_SECONDS)) == KEYS
    small_server.process.kill()
    time.sleep(LEASE_SECONDS)  # leased messages come back with their records, and without need for their bodies
    small_server.process.start()
    for key in bodies:
        topic.publish("1", ordering_key=key)
    seen: dict[str, str] = dict.fromkeys(bodies, "")
    for _ in range(2 * KEYS):
        message = topic.pop_one(wait_seconds=15)
        seen[message["ordering_key"]] += message["body"][0]
        assert topic.ack(message) == ["acked"]
    assert set(seen.values()) == {"01"}


def test_a_lease_group_takes_what_memory_can_keep_and_nothing_of_it_is_fetched_twice(
    topic: Topic, small_server: HttpServer
) -> None:
    bodies = [str(number).ljust(BUFFER_BYTES // 64, "x") for number in range(100)]
    topic.publish(*bodies)
    groups = f"{topic.group_path}/lease-groups/s"
    redelivered = f'popgate_events_total{{group="default",kind="redelivered",topic="{topic.name}"}}'
    seen: list[str] = []
    epoch = 0
    while len(seen) < len(bodies):
        epoch += 1
        count = put(topic.client, f"{groups}/{epoch}", {"max_messages": 100, "slices": 2})["count"]
        assert 0 < count <= 32
        before = small_server.metrics().get(redelivered, 0.0)
        first, again = (  # a failed task reads its slice again
            [answer(topic.client.get(f"{groups}/{epoch}/messages?slice={number}")) for number in (0, 1)]
            for _ in range(2)
        )
        assert first == again
        seen += [message["body"] for each in first for message in each["messages"]]
        assert small_server.metrics().get(redelivered, 0.0) == before
        assert topic.client.post(f"{groups}/ack", json={"through_epoch": epoch}).is_success
    assert seen == bodies
