"""Several `popgate serve` processes that form one cluster, on one virtual host and one Redis namespace."""

import secrets
from pathlib import Path

from support.processes import Startable
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode
from support.redis import RedisServer


class ProxyCluster(Startable):
    """`size` proxies; a context manager that starts and ends them. Stop, kill, pause and restart each as it is.

    The virtual host and the namespace are new, and have the same name: `vhost`. `arguments` follow `popgate serve` for
    every proxy. `nodes` of RabbitMQ are given to them in turn.
    """

    def __init__(
        self, folder: Path, *arguments: str, nodes: tuple[RabbitNode, ...], redis: RedisServer, size: int = 3
    ) -> None:
        self.vhost = f"cluster-{secrets.token_hex(4)}"
        self.nodes = nodes
        self.proxies: list[ProxyProcess] = []
        self._folder = folder
        self._flags = ["--redis-url", redis.url(), "--redis-namespace", self.vhost, *arguments]
        for _ in range(size):
            self.add()

    def add(self, *arguments: str) -> ProxyProcess:
        """One more, not yet started, with flags of its own on top of those that all have."""
        number = len(self.proxies)
        amqp_url = self.nodes[number % len(self.nodes)].amqp_url(self.vhost)
        name = f"proxy-{number}"
        proxy = ProxyProcess(self._folder / name, "--amqp-url", amqp_url, *self._flags, *arguments, name=name)
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
        """End all, whatever state they are in. The virtual host stays, and goes with its RabbitMQ."""
        for proxy in self.proxies:
            proxy.close()
