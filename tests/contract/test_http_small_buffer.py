"""A proxy whose buffer is smaller than what waits: pops go on, one share of the buffer after the other."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contract.http_server import HttpServer
from support.proxy import ProxyProcess

BUFFER_BYTES = 1024 * 1024
POPS = 8


@pytest.fixture(params=["embedded", "rabbitmq"])
def small_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HttpServer]:
    arguments = ["--auto-create", "true", "--buffer-bytes-max", str(BUFFER_BYTES)]
    if request.param == "rabbitmq":
        arguments += ["--amqp-url", request.getfixturevalue("amqp_url")]
    with ProxyProcess(tmp_path, *arguments) as process:
        yield HttpServer(broker=request.param, process=process)


@pytest.mark.parametrize("size", [1, BUFFER_BYTES // 3, BUFFER_BYTES])
def test_every_parked_pop_is_served(small_server: HttpServer, size: int) -> None:
    topic = small_server.topic()
    bodies = [str(number).ljust(size, "x") for number in range(POPS)]
    with ThreadPoolExecutor(POPS) as pool:
        parked = [pool.submit(topic.pop_one, wait_seconds=10) for _ in range(POPS)]
        topic.publish(*bodies)
        assert sorted(each.result()["body"] for each in parked) == bodies


def test_a_backlog_larger_than_the_buffer_is_drained_in_order(small_server: HttpServer) -> None:
    topic = small_server.topic()
    bodies = [str(number).ljust(BUFFER_BYTES // 2, "x") for number in range(POPS)]
    topic.publish(*bodies)
    assert [message["body"] for message in topic.pop_all(POPS)] == bodies
