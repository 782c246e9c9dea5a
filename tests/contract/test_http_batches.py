"""A parked pop gets several of the messages that are published together, though RabbitMQ delivers one of them first."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract.http_server import HttpServer
from support.collecting_proxy import collecting_program
from support.processes import wait_until
from support.proxy import ProxyProcess

ROUNDS = 3
PUBLISHED, WANTED = 10, 4
LONGEST_SECONDS = {"owner": 20, "front": 1}
"""Seconds that a pop collects, in place of a few milliseconds, in which a busy broker may not deliver the others.
The owner of a queue does not know how many messages another proxy's pop may take; it is woken when time is over.
"""


@pytest.fixture(params=LONGEST_SECONDS)
def server(request: pytest.FixtureRequest, amqp_url: str, tmp_path: Path) -> Iterator[HttpServer]:
    """A proxy that owns the queues, or one that passes pops on to it."""
    flags = ["--amqp-url", amqp_url]
    program = collecting_program(LONGEST_SECONDS[request.param])

    def proxy(name: str, *more: str) -> ProxyProcess:
        return ProxyProcess(tmp_path / name, *flags, *more, program=program)

    with ExitStack() as stack:
        if request.param == "owner":
            process = stack.enter_context(proxy("owner"))
            yield HttpServer(broker="rabbitmq", process=process)
            return
        redis_url: str = request.getfixturevalue("redis_server").url()
        flags += ["--redis-url", redis_url, "--redis-namespace", f"batches-{secrets.token_hex(4)}"]
        owner = stack.enter_context(proxy("owner"))
        process = stack.enter_context(proxy("front", "--owns-queues", "false"))
        yield HttpServer(broker="rabbitmq", process=process, owner=owner)


def parked_pops(server: HttpServer) -> float:
    return sum(value for name, value in server.metrics().items() if name.startswith("popgate_parked_pops"))


def test_a_parked_pop_gets_as_many_of_ten_messages_as_it_may_take(server: HttpServer) -> None:
    topic = server.topic(queues=2)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(ROUNDS):
            waiting = pool.submit(topic.pop, max_messages=WANTED, wait_seconds=30)
            wait_until(lambda: parked_pops(server) == 1, timeout_seconds=10, what="the pop to park")
            started = time.monotonic()
            topic.publish(*map(str, range(PUBLISHED)))
            assert len(waiting.result()) == WANTED
            assert time.monotonic() - started < max(LONGEST_SECONDS.values())
            topic.ack(*topic.pop_all(PUBLISHED - WANTED))
