"""Starts the servers of a run, each when a system first needs it, and tells where they are."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.publishing import SECRET
from bench.systems.servers import (
    BEANSTALKD,
    BEANSTALKD_SERVER,
    NATS,
    NATS_SERVER,
    POSTGRES,
    POSTGRES_SERVER,
    REDIS,
    REDIS_SERVER,
    USER,
    Beanstalkd,
    NatsServer,
    PostgresServer,
)
from support.processes import PortBlock, Server, accepts
from support.proxy import ProxyProcess, python_program
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.redis import RedisServer

BASELINES = Path(__file__).parents[1] / "baselines.py"
ROOMY = RabbitSettings(configuration={"vm_memory_high_watermark.absolute": "4GB"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that runs: its port, and the processes whose time counts."""

    port: int
    pids: Sequence[int]
    options: dict[str, str] = field(default_factory=dict[str, str])


class EmptyServer(Server):
    """An HTTP server that answers a constant."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        super().__init__("empty", folder, arguments=python_program(str(BASELINES), "noop", str(self.port)))

    def _answers(self) -> bool:
        return accepts(self.port)


class Servers:
    """The servers of one run, in ``folder``. ``versions`` has the version of each started one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started: dict[str, Started] = {}
        self._node: RabbitNode | None = None
        self.versions: dict[str, str] = {"Python": sys.version.split()[0]}
        self._starts: dict[str, Callable[[Path], Started]] = {
            "empty": self._empty,
            "rabbitmq": lambda _: Started(port=self.node.amqp_port, pids=[self.node.pid]),
            "popgate-rabbitmq": self._popgate_on_rabbitmq,
            "popgate-embedded": self._popgate_embedded,
            "redis-always": lambda folder: self._redis(folder, "always"),
            "redis-everysec": lambda folder: self._redis(folder, "everysec"),
            "nats": lambda folder: self._nats(folder, "2m"),
            "nats-always": lambda folder: self._nats(folder, "always"),
            "beanstalkd": self._beanstalkd,
            "postgres": self._postgres,
        }

    def start(self, name: str) -> Started:
        """Start a server, unless it runs. Raises: ServerMissingError."""
        if name not in self._started:
            self._started[name] = self._starts[name](self._folder / name)
        return self._started[name]

    @property
    def node(self) -> RabbitNode:
        """The only node of RabbitMQ, which is started at the first use. Raises: ServerMissingError."""
        if self._node is None:
            cluster = self._stack.enter_context(RabbitCluster(self._folder / "rabbitmq", settings=ROOMY))
            self.versions["RabbitMQ"] = str(cluster.release)
            (self._node,) = cluster.nodes
        return self._node

    def _empty(self, folder: Path) -> Started:
        server = self._stack.enter_context(EmptyServer(folder))
        return Started(port=server.port, pids=[server.pid])

    def _proxy(self, folder: Path, *flags: str) -> ProxyProcess:
        return self._stack.enter_context(ProxyProcess(folder, *flags, environment={"POPGATE_SECRET": SECRET}))

    def _popgate_on_rabbitmq(self, folder: Path) -> Started:
        proxy = self._proxy(folder, "--amqp-url", self.node.amqp_url())
        return Started(port=proxy.port, pids=[proxy.pid, self.node.pid])

    def _popgate_embedded(self, folder: Path) -> Started:
        proxy = self._proxy(folder)
        return Started(port=proxy.port, pids=[proxy.pid])

    def _redis(self, folder: Path, appendfsync: str) -> Started:
        server = RedisServer(folder, {"appendfsync": appendfsync}, REDIS.command(REDIS_SERVER))
        self._stack.enter_context(server)
        self.versions["Redis"] = REDIS.version(REDIS_SERVER, "--version")
        return Started(port=server.port, pids=[server.pid])

    def _nats(self, folder: Path, sync_interval: str) -> Started:
        server = self._stack.enter_context(NatsServer(folder, sync_interval))
        self.versions["NATS"] = NATS.version(NATS_SERVER, "--version")
        return Started(port=server.port, pids=[server.pid])

    def _beanstalkd(self, folder: Path) -> Started:
        server = self._stack.enter_context(Beanstalkd(folder))
        self.versions["beanstalkd"] = BEANSTALKD.version(BEANSTALKD_SERVER, "-v")
        return Started(port=server.port, pids=[server.pid])

    def _postgres(self, folder: Path) -> Started:
        server = self._stack.enter_context(PostgresServer(folder))
        self.versions["PostgreSQL"] = POSTGRES.version(POSTGRES_SERVER, "--version")
        return Started(port=server.port, pids=[server.pid], options={"user": USER})
