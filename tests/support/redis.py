"""A private Redis on 127.0.0.1 with append-only persistence and `noeviction`, as popgate asks for.

And one with a replica and a Sentinel, and one that speaks TLS only to those it knows.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from support.processes import PortBlock, Server, ServerMissingError, Startable, accepts, wait_until
from support.tls import Authority

REPLICATED_SECONDS = 45
"""A Sentinel takes ten to look at one that has come back."""


TORN_COMMAND = b"*3\r\n$3\r\nSET\r\n$9\r\nhalf-writ"


class RedisServer(Server):
    """One Redis server; what it has answered is kept over `stop` and `restart`, and nearly all of it over `kill`."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        if shutil.which("redis-server") is None:
            raise ServerMissingError("redis-server is not installed")
        self._block = PortBlock()
        (self.port,) = self._block.ports
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
            "save": "",
            **(settings or {}),
        }
        arguments = ["redis-server", *(part for name, value in options.items() for part in (f"--{name}", value))]
        super().__init__("redis", folder, arguments=arguments)

    def url(self, database: int = 0) -> str:
        """The URL of one of its 16 databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def cut_power(self) -> None:
        """Kill it, and leave behind what a power cut does: a command that was half on its way to the disk.

        With `appendfsync always` all that it has answered is in front of that.
        """
        self.kill()
        latest = max((self.folder / "appendonlydir").glob("*.incr.aof"), key=lambda file: file.stat().st_mtime_ns)
        with latest.open("ab") as file:
            file.write(TORN_COMMAND)

    def ask(self, *words: str) -> Any:
        """What it answers to one command, as `redis-py` has it."""
        return _ask(self.port, *words)

    def hearers(self, namespace: str) -> int:
        """How many proxies listen there to what changes in their cluster."""
        _, count = self.ask("PUBSUB", "NUMSUB", f"popgate:{namespace}:changes")
        return int(count)

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")


class SecretiveRedis(RedisServer):
    """One that speaks TLS beside `port`, which is for the tests, and only to who has a certificate of `authority`."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.tls_block = PortBlock()
        (self.tls_port,) = self.tls_block.ports
        certificate, key = authority.certify("redis")
        settings = {
            "tls-port": str(self.tls_port),
            "tls-cert-file": str(certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(authority.certificate),
            "tls-auth-clients": "yes",
            "appendfsync": "always",
        }
        super().__init__(folder, settings)

    def tls_url(self, **options: Path) -> str:
        query = "&".join(f"{name}={path}" for name, path in options.items())
        return f"rediss://127.0.0.1:{self.tls_port}/0?{query}"


class RedisSentinel(Server):
    """One Sentinel that watches `master` and replaces it half a second after it went. Start it after the replicas."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20
    master_name = "orders"

    def __init__(self, folder: Path, master: RedisServer) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        settings = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"sentinel monitor {self.master_name} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {self.master_name} 500",
            f"sentinel failover-timeout {self.master_name} 3000",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join([*settings, ""]))
        super().__init__("sentinel", folder, arguments=["redis-server", str(configuration), "--sentinel"])

    @property
    def url(self) -> str:
        """The URL of its master, whichever that is."""
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.master_name}/0"

    def master_port(self) -> int:
        """The port of who is master by its decision."""
        _, port = _ask(self.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master_name)
        return int(port)

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")


class ReplicatedRedis(Startable):
    """Two servers, of which the second one has all that the first has, and a Sentinel that replaces one by the other.

    A server that was killed may be started again: the Sentinel makes it a replica.
    """

    def __init__(self, folder: Path) -> None:
        settings = {"repl-diskless-sync-delay": "0", "repl-diskless-load": "swapdb", "appendfsync": "always"}
        self.servers = [RedisServer(folder / name, settings) for name in ("first", "second")]
        self.sentinel = RedisSentinel(folder / "sentinel", self.servers[0])

    def start(self) -> None:
        first, second = self.servers
        first.start()
        second.start()
        second.ask("REPLICAOF", "127.0.0.1", str(first.port))
        self.wait_replicated(second)
        self.sentinel.start()

    def wait_replicated(self, replica: RedisServer) -> None:
        """Return when `replica` is one, and has all that its master has."""

        def is_replicated() -> bool:
            try:
                return bool(replica.ask("INFO", "replication").get("master_link_status") == "up")
            except redis.ConnectionError:  # who becomes a replica closes its connections
                return False

        wait_until(is_replicated, timeout_seconds=REPLICATED_SECONDS, what="the replica to have all data")

    def master(self) -> RedisServer:
        """Who is it by the Sentinel's decision."""
        port = self.sentinel.master_port()
        return next(server for server in self.servers if server.port == port)

    def close(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.close()


def _ask(port: int, *words: str) -> Any:
    client: Any = redis.Redis  # it has few types
    with client.from_url(f"redis://127.0.0.1:{port}") as connected:
        return connected.execute_command(*words)
