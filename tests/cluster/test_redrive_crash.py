"""Kill -9 of the proxy in the middle of a redrive: each message is in the source or a dead letter, never in both."""

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pika
import pytest

from cluster.conftest import assert_no_traceback
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

Json: TypeAlias = Any
ROUNDS, ROUNDS_FULL = 2, 12
COUNT, COUNT_ON_RABBITMQ = 300, 120
"""Number of letters. On RabbitMQ, where each letter takes longer, the short run uses the second."""
SWEPT_SECONDS = 20.0


class Place:
    """A topic with one group, and everything known of its messages."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.topic = f"r-{secrets.token_hex(4)}"
        self.group = f"/v1/topics/{self.topic}/groups/g"
        self.admin = f"/v1/admin/topics/{self.topic}"
        self.desk = f"{self.admin}/groups/g/dead-letters"
        self._ok(client.put(self.admin, json={"queues": 2}))
        self._ok(client.put(f"{self.admin}/groups/g"))

    @staticmethod
    def _ok(response: httpx.Response) -> Json:
        assert response.is_success, response.text
        return response.json()

    def post(self, path: str, body: Json) -> Json:
        return self._ok(self.client.post(path, json=body))

    def bury(self, count: int) -> set[str]:
        """Create dead letters with these bodies."""
        bodies = [f"m{number:04}" for number in range(count)]
        for start in range(0, count, 200):
            messages = [{"body": body, "headers": {"n": body}} for body in bodies[start : start + 200]]
            self.post(f"/v1/topics/{self.topic}/messages", {"messages": messages})
        left = count
        while left:
            popped = self.post(f"{self.group}/pop", {"max_messages": 256, "wait_seconds": 5})["messages"]
            entries = [{"receipt_handle": message["receipt_handle"]} for message in popped]
            results = self.post(f"{self.group}/reject", {"entries": entries})["results"]
            assert {result["status"] for result in results} == {"rejected"}
            left -= len(popped)
        return set(bodies)

    def listed(self) -> list[str]:
        bodies: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = self._ok(self.client.get(self.desk, params={"max_messages": "256", **after}))
            bodies += [letter["body"] for letter in page["messages"]]
            if "next" not in page:
                return bodies
            after = {"after": page["next"]}

    def until_moved(self, count: int) -> None:
        """Return as soon as the redrive has moved that many, or has ended."""
        while True:
            progress = self._ok(self.client.get(f"{self.desk}/redrive"))
            if progress["moved"] >= count or progress["ended_at"] is not None:
                return

    def state(self) -> Json:
        return self._ok(self.client.get(self.group))

    def drained(self) -> list[str]:
        """Return what the source has, popped and acked."""
        bodies: list[str] = []
        while messages := self.post(f"{self.group}/pop", {"max_messages": 256})["messages"]:
            assert {message["delivery_count"] for message in messages} == {1}
            assert all(message["headers"] == {"n": message["body"]} for message in messages)
            bodies += [message["body"] for message in messages]
            handles = [message["receipt_handle"] for message in messages]
            results = self.post(f"{self.group}/ack", {"receipt_handles": handles})["results"]
            assert {result["status"] for result in results} == {"acked"}
        return bodies


@pytest.fixture
def vhost(request: pytest.FixtureRequest, broker_flags: Sequence[str]) -> Iterator[tuple[RabbitNode, str] | None]:
    """A virtual host for the test alone, if it uses RabbitMQ."""
    if not broker_flags:
        yield None
        return
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    with node.own_vhost("redrive") as name:
        yield node, name


@pytest.mark.crash
def test_a_redrive_that_is_killed_half_way_loses_and_doubles_nothing(
    vhost: tuple[RabbitNode, str] | None, tmp_path: Path, seed: int, full_run: bool
) -> None:
    chance = random.Random(seed)
    flags = [] if vhost is None else ["--amqp-url", vhost[0].amqp_url(vhost[1])]
    count = COUNT if vhost is None or full_run else COUNT_ON_RABBITMQ
    interrupted = 0
    with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
        for number in range(ROUNDS_FULL if full_run else ROUNDS):
            place = Place(proxy.client)
            published = place.bury(count)
            place.post(f"{place.desk}/redrive", {"rate_per_second": chance.choice([300, 1_000, 100_000])})
            place.until_moved(chance.randrange(count * 3 // 4))
            proxy.kill()
            proxy.start()
            source, dead = _settled_down(place, count)
            if vhost is not None:
                assert sorted(_read(*vhost, f"popgate:{place.topic}:g:dead")) == sorted(dead)
            assert len(set(dead)) == len(dead)
            assert len(set(source)) == len(source), f"round {number}: doubled messages"
            assert sorted(dead + source) == sorted(published), f"round {number}, seed {seed}"
            interrupted += 0 < len(source) < count
            done = place.post(f"{place.desk}/redrive", {"wait_seconds": 20})
            assert (done["state"], done["moved"]) == ("done", len(dead))
            assert sorted(place.drained()) == sorted(dead)
            assert place.state()["dead"] == 0
        assert_no_traceback(proxy)
    assert interrupted, "no kill came in the middle of a redrive"


def _settled_down(place: Place, count: int) -> tuple[list[str], list[str]]:
    """Return the source's messages and the dead letters, once unfinished moves have completed by themselves after
    the restart.
    """
    deadline = time.monotonic() + SWEPT_SECONDS
    source: list[str] = []
    while True:
        source += place.drained()
        dead = place.listed()
        if len(source) + len(dead) == count == len(source) + place.state()["dead"]:
            return source, dead
        assert time.monotonic() < deadline, f"{len(source)} came again, {len(dead)} are listed, {place.state()}"
        time.sleep(0.1)


def _read(node: RabbitNode, vhost: str, queue: str) -> list[str]:
    """Return the content of a queue, read directly from the broker and given back."""
    connection = pika.BlockingConnection(pika.URLParameters(node.amqp_url(vhost)))
    try:
        channel = connection.channel()
        bodies: list[str] = []
        while (got := channel.basic_get(queue))[0] is not None:
            bodies.append(got[2].decode())
        channel.close()
        return bodies
    finally:
        connection.close()
