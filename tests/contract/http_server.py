"""A real `popgate serve` for the tests of the HTTP interface, on each broker, and helpers to use it.

Import the fixture `server` by name, or `lean_server` as `server`. One server serves a whole module; every test uses a
separate topic.
"""

import contextlib
import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

Json: TypeAlias = Any
CREATED_QUEUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """A running server. `broker` is "embedded", or "rabbitmq" with a separate virtual host.

    With the parameter "front" the broker is "rabbitmq" and the state is on Redis; the server owns no queues, and passes
    everything on to another proxy that does.
    """

    broker: str
    process: ProxyProcess
    vhost: str = ""
    owner: ProxyProcess | None = None

    @property
    def client(self) -> httpx.Client:
        return self.process.client

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name and labels, summed over all proxies: each counts its own work."""
        metrics: dict[str, float] = {}
        for process in (self.process, self.owner):
            for line in process.client.get("/metrics").text.splitlines() if process is not None else ():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    metrics[name] = metrics.get(name, 0.0) + float(value)
        return metrics

    def topic(self, *groups: str, queues: int = 1) -> "Topic":
        """Create a topic with these groups; with `default` if none is named."""
        topic = Topic(self.client, f"t-{secrets.token_hex(4)}")
        put(self.client, topic.admin_path, {"queues": queues})
        for group in groups or ("default",):
            put(self.client, f"{topic.admin_path}/groups/{group}")
        return topic


class Topic:
    """One topic of a server, and its group unless another one is named."""

    def __init__(self, client: httpx.Client, name: str, group: str = "default") -> None:
        self.client = client
        self.name = name
        self.group = group
        self.path = f"/v1/topics/{name}"
        self.group_path = f"{self.path}/groups/{group}"
        self.admin_path = f"/v1/admin/topics/{name}"

    def of(self, group: str) -> "Topic":
        return Topic(self.client, self.name, group)

    def policy(self, **policy: object) -> None:
        put(self.client, f"{self.admin_path}/groups/{self.group}", policy)

    def publish(self, *bodies: str, **fields: object) -> list[Json]:
        """Publish texts, each with the same further fields. Every one of them must be stored."""
        messages = [{"body": body, **fields} for body in bodies]
        results = answer(self.client.post(f"{self.path}/messages", json={"messages": messages}))["results"]
        assert [result["status"] for result in results] == ["published"] * len(bodies)
        return list(results)

    def pop(self, **fields: object) -> list[Json]:
        return list(answer(self.client.post(f"{self.group_path}/pop", json=fields))["messages"])

    def pop_one(self, **fields: object) -> Json:
        """Return the one message that must come, at once or within a second."""
        (message,) = self.pop(**{"wait_seconds": 1, **fields})
        return message

    def pop_all(self, count: int, **fields: object) -> list[Json]:
        """Pop until `count` messages came. A pop may answer with fewer than are ready."""
        messages: list[Json] = []
        while len(messages) < count:
            more = self.pop(max_messages=count - len(messages), wait_seconds=2, **fields)
            assert more, f"{len(messages)} messages came, not {count}"
            messages += more
        return messages

    def settle(self, verb: str, entries: Sequence[object]) -> list[Json]:
        name = "receipt_handles" if verb == "ack" else "entries"
        results: list[Json] = answer(self.client.post(f"{self.group_path}/{verb}", json={name: entries}))["results"]
        return results

    def ack(self, *messages: Json) -> list[str]:
        """Ack popped messages, or receipt handles; return the statuses."""
        handles = [message if isinstance(message, str) else message["receipt_handle"] for message in messages]
        return [result["status"] for result in self.settle("ack", handles)]

    def state(self) -> Json:
        return answer(self.client.get(self.group_path))


def answer(response: httpx.Response) -> Json:
    """Return the body of a success."""
    assert response.status_code == 200, response.text
    return response.json()


def put(client: httpx.Client, path: str, body: object = None) -> Json:
    response = client.put(path, json=body) if body is not None else client.put(path)
    assert response.status_code in (200, 201), response.text
    return response.json()


def problem(response: httpx.Response, status: int, code: str) -> Json:
    """Return the problem document of a failure, which must be complete."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:popgate:problem:{code}"
    assert document["title"]
    assert document["detail"]
    if status == 503:
        assert int(response.headers["retry-after"]) >= 1
    return document


@pytest.fixture(scope="module", params=["embedded", "rabbitmq", "front"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server on each broker, which creates topics and groups on first use."""
    with creating_server(request, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module", params=["embedded", "rabbitmq", "front"])
def lean_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, *, full_run: bool
) -> Iterator[HttpServer]:
    """`server`, for tests that need not run on every pair of broker and state.

    RabbitMQ then runs only behind `front`, and the state beside the proxy only with `embedded`, which also covers
    requests that are not passed on; only --full runs combine the two. In every run, test_http_interface and
    test_http_admin test the combination.
    """
    leave_out_a_pair(request, full_run=full_run)
    with creating_server(request, tmp_path_factory) as server:
        yield server


def leave_out_a_pair(request: pytest.FixtureRequest, *, full_run: bool) -> None:
    """Skip the combination that `lean_server` omits in a short run."""
    if request.param == "rabbitmq" and not full_run:
        pytest.skip("the short run has this broker behind the front, and this state on the embedded broker")


@contextmanager
def creating_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[HttpServer]:
    """A server on the fixture's broker, which creates topics, groups and locks on first use."""
    arguments = ["--auto-create", "true", "--auto-create-queues", str(CREATED_QUEUES)]
    with started_server(request, tmp_path_factory.mktemp(f"http-{request.param}"), *arguments) as server:
        yield server


@contextmanager
def started_server(request: pytest.FixtureRequest, folder: Path, *arguments: str) -> Generator[HttpServer]:
    """Start a server on the broker that the fixture's parameter names; on RabbitMQ in a separate virtual host."""
    if request.param == "embedded":
        with ProxyProcess(folder, *arguments) as process:
            yield HttpServer(broker="embedded", process=process)
        return
    node: RabbitNode = request.getfixturevalue("rabbitmq")
    vhost = f"http-{secrets.token_hex(4)}"
    node.add_vhost(vhost)
    try:
        flags = ["--amqp-url", node.amqp_url(vhost)]
        owner = None
        with contextlib.ExitStack() as stack:
            if request.param == "front":
                redis: RedisServer = request.getfixturevalue("redis_server")
                flags += ["--redis-url", redis.url(), "--redis-namespace", vhost]
                owner = stack.enter_context(ProxyProcess(folder / "owner", *flags, *arguments))
                flags += ["--owns-queues", "false"]
            process = stack.enter_context(ProxyProcess(folder / "front", *flags, *arguments))
            yield HttpServer(broker="rabbitmq", process=process, vhost=vhost, owner=owner)
    finally:
        if node.is_running():  # a session's server may outlive the release on which it was started
            node.delete_vhost(vhost)
