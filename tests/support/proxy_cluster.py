"""Several `popgate serve` processes that form one cluster, on one virtual host and one Redis namespace."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.answers import answer
from support.processes import Startable
from support.proxy import POPGATE, ProxyProcess
from support.rabbitmq import RabbitNode
from support.redis import RedisServer


class ProxyCluster(Startable):
    """`size` proxies, as a context manager that starts and ends them. Stop, kill, pause and restart each one directly.

    The virtual host and the Redis namespace are new and share one name: `vhost`. `arguments` follow `popgate serve` for
    every proxy. Each knows all `nodes` of RabbitMQ, and prefers a different one than the proxy before it. `redis` is a
    server, or the URL of one; `program` as for a `ProxyProcess`. `environments` apply to the first proxies, in order.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        nodes: tuple[RabbitNode, ...],
        redis: RedisServer | str,
        size: int = 3,
        program: Sequence[str] = POPGATE,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.vhost = f"cluster-{secrets.token_hex(4)}"
        self.nodes = nodes
        self.proxies: list[ProxyProcess] = []
        self._folder = folder
        self._program = program
        self._environments = environments
        redis_url = redis if isinstance(redis, str) else redis.url()
        self._flags = ["--redis-url", redis_url, "--redis-namespace", self.vhost, *arguments]
        for _ in range(size):
            self.add()

    def add(self, *arguments: str) -> ProxyProcess:
        """Add one more, not yet started, with extra flags after the common ones."""
        number = len(self.proxies)
        first = number % len(self.nodes)
        urls = ",".join(node.amqp_url(self.vhost) for node in (*self.nodes[first:], *self.nodes[:first]))
        name = f"proxy-{number}"
        flags = ["--amqp-url", urls, *self._flags, *arguments]
        environment = self._environments[number] if number < len(self._environments) else None
        proxy = ProxyProcess(self._folder / name, *flags, name=name, program=self._program, environment=environment)
        self.proxies.append(proxy)
        return proxy

    def start(self) -> None:
        """Start all at once, and return when each is ready. Raises: ServerFailedError."""
        self.nodes[0].add_vhost(self.vhost)
        for proxy in self.proxies:
            proxy.launch()
        for proxy in self.proxies:
            proxy.wait_ready()

    def close(self) -> None:
        """End all, whatever their state. The virtual host stays until its RabbitMQ ends."""
        for proxy in self.proxies:
            proxy.close()


def owners(proxy: ProxyProcess) -> dict[str, str | None]:
    """Return the owner of each queue, by the queue's name, as this proxy sees it."""
    return {one["broker_queue"]: one["owner"] for one in answer(proxy.client.get("/v1/admin/cluster"))["queues"]}


def instance(proxy: ProxyProcess) -> str:
    """Return the name of this start of the proxy."""
    return str(answer(proxy.client.get("/v1/admin/cluster"))["instance"])
