"""The curves of the growth benchmark: what grows along each, and the proxies that serve its points.

Each curve yields its points in order. The first one is the base: it stays usable until the last point is measured, so
that each point can be compared with the base at the same time.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx

from bench import growth_load
from bench.growth_load import Target
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

CLIENTS = 10
QUEUES = 4
BODY_BYTES = 1024
READY, WAITING, RATE = 1_500, 100, 100.0
"""Number of ready messages, number of messages for waiting pops, and publishes a second, of one measurement."""
READY_OF_A_CLIENT, READY_MIN = 400, 5
"""Maximum and minimum number of ready messages for each client."""
SIZED_BYTES = 48 * 1024 * 1024
"""Maximum bytes that each load of a measurement publishes."""
SIZED_BYTES_PER_SECOND = 20 * 1024 * 1024
SETUP_SECONDS_MAX = 120
"""Time limit of a point's setup on RabbitMQ. A point beyond it is left out."""
EMBEDDED_SETUP_SECONDS_MAX = 900


class SetupTooLongError(Exception):
    """A point's setup takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a run: ``share`` of the usual number of messages, and which points of a curve are measured."""

    share: float = 1.0
    largest: float = float("inf")
    points_max: int = 100
    rounds: int = 3
    ends_at: float = float("inf")
    """Time after which no point begins (monotonic)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A point: its place on the curve, and the load that measures it."""

    at: float
    target: Target
    ready: int
    ready_min: int
    waiting: int
    rate: float


class World:
    """Starts the proxies of one broker: with ``node`` on RabbitMQ, without it on the embedded store."""

    def __init__(self, folder: Path, node: RabbitNode | None, scale: Scale) -> None:
        self.scale = scale
        self._folder = folder
        self._node = node
        self._numbers = count()

    @property
    def setup_seconds_max(self) -> int:
        return EMBEDDED_SETUP_SECONDS_MAX if self._node is None else SETUP_SECONDS_MAX

    def proxy(self, stack: ExitStack) -> ProxyProcess:
        """Start a proxy that lives as long as ``stack``."""
        name = f"growth-{next(self._numbers)}"
        flags = ["--topics-max", "2000"]
        if self._node is not None:
            self._node.add_vhost(name)
            stack.callback(self._forget, name)
            flags += ["--amqp-url", self._node.amqp_url(name)]
        proxy = ProxyProcess(self._folder / name, *flags)
        stack.callback(proxy.close)
        proxy.start()
        return proxy

    def _forget(self, vhost: str) -> None:
        assert self._node is not None
        with suppress(httpx.TimeoutException):  # the node continues, also without the answer
            self._node.delete_vhost(vhost)

    def work(self, at: float, proxy: ProxyProcess, topics: list[str], **changed: int) -> Work:
        """Return a point with the usual load, or with the given number of ``clients`` or ``body_bytes``."""
        clients = changed.get("clients", CLIENTS)
        body_bytes = changed.get("body_bytes", BODY_BYTES)
        share, fitting = self.scale.share, SIZED_BYTES // body_bytes
        ready_min = max(READY_MIN * clients, len(topics))
        return Work(
            at=at,
            target=Target(
                port=proxy.port,
                pid=proxy.pid,
                broker_pid=None if self._node is None else self._node.pid,
                topics=topics,
                clients=clients,
                body_bytes=body_bytes,
            ),
            ready=max(int(share * min(READY, READY_OF_A_CLIENT * clients, fitting)), ready_min),
            ready_min=ready_min,
            waiting=max(10, int(share * min(WAITING, fitting))),
            rate=min(RATE, SIZED_BYTES_PER_SECOND / body_bytes),
        )


def _make_topics(proxy: ProxyProcess, topics: list[str], queues: int, seconds_max: float) -> None:
    """Create topics with one group each. Raises: SetupTooLongError."""
    started = time.monotonic()
    for topic in topics:
        for path, body in ((f"/v1/admin/topics/{topic}", {"queues": queues}), (_group_path(topic), {})):
            left = seconds_max - (time.monotonic() - started)
            if left <= 0:
                raise SetupTooLongError
            try:
                proxy.client.put(path, json=body, timeout=left).raise_for_status()
            except httpx.TimeoutException as error:
                raise SetupTooLongError from error


def _group_path(topic: str) -> str:
    return f"/v1/admin/topics/{topic}/groups/default"


def clients_curve(world: World, points: list[float]) -> Generator[Work]:
    """One proxy; the clients are connections that pop and ack."""
    with ExitStack() as stack:
        proxy = world.proxy(stack)
        _make_topics(proxy, ["bench"], QUEUES, world.setup_seconds_max)
        for at in points:
            yield world.work(at, proxy, ["bench"], clients=int(at))


def sizes_curve(world: World, points: list[float]) -> Generator[Work]:
    """One proxy; ``points`` are KiB of a body."""
    with ExitStack() as stack:
        proxy = world.proxy(stack)
        _make_topics(proxy, ["bench"], QUEUES, world.setup_seconds_max)
        for at in points:
            yield world.work(at, proxy, ["bench"], body_bytes=int(at * 1024))


def queues_curve(world: World, points: list[float]) -> Generator[Work]:
    """One topic of many queues; each point has a proxy of its own."""
    yield from _by_proxy(world, points, lambda at: (["bench"], int(at)))


def topics_curve(world: World, points: list[float]) -> Generator[Work]:
    """Many topics of one queue; each point has a proxy of its own."""
    yield from _by_proxy(world, points, lambda at: ([f"bench-{number}" for number in range(int(at))], 1))


def _by_proxy(world: World, points: list[float], layout: Callable[[float], tuple[list[str], int]]) -> Generator[Work]:
    with ExitStack() as all_points:
        for number, at in enumerate(points):
            with ExitStack() as one_point:
                proxy = world.proxy(all_points if number == 0 else one_point)
                topics, queues = layout(at)
                _make_topics(proxy, topics, queues, world.setup_seconds_max)
                yield world.work(at, proxy, topics)


def in_flight_curve(world: World, points: list[float]) -> Generator[Work]:
    """Two proxies: the base keeps the fewest leases; the other one's leases grow from point to point."""
    with ExitStack() as stack:
        leased = 0
        proxies = [world.proxy(stack) for _ in range(2)]
        for proxy in proxies:
            _make_topics(proxy, ["bench"], QUEUES, world.setup_seconds_max)
        for number, at in enumerate(points):
            proxy = proxies[min(number, 1)]
            more = int(at) if number < 2 else int(at) - leased
            work = world.work(at, proxy, ["bench"])
            try:
                asyncio.run(_within(world.setup_seconds_max, work.target, more))
            except TimeoutError as error:
                raise SetupTooLongError from error
            leased = int(at)
            yield work


async def _within(seconds: float, target: Target, count: int) -> None:
    async with asyncio.timeout(seconds):
        await growth_load.lease(target, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    axis: str
    """The meaning of the horizontal axis."""
    points: tuple[float, ...]
    works: Callable[[World, list[float]], Generator[Work]]
    largest_on_rabbitmq: float = float("inf")
    """Larger points are left out on RabbitMQ, because their setup takes minutes."""

    def points_on(self, broker: str) -> list[float]:
        return [at for at in self.points if broker == "embedded" or at <= self.largest_on_rabbitmq]


CURVES = (
    Curve(name="clients", axis="clients", points=(1, 10, 100, 1_000), works=clients_curve),
    Curve(name="size", axis="KiB of a message", points=(0.1, 1, 10, 100, 1_024), works=sizes_curve),
    Curve(
        name="in flight",
        axis="messages in flight",
        points=(1e3, 1e4, 1e5, 1e6),
        works=in_flight_curve,
        largest_on_rabbitmq=1e5,
    ),
    Curve(name="queues", axis="queues of one topic", points=(1, 16, 64, 256), works=queues_curve),
    Curve(
        name="topics",
        axis="topics of one queue",
        points=(1, 10, 100, 1_000),
        works=topics_curve,
        largest_on_rabbitmq=100,
    ),
)
"""256 is the maximum number of queues of a topic. RabbitMQ goes on for minutes deleting what the last two leave behind,
so they are last.
"""
