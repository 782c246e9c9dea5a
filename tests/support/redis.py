"""A private Redis on 127.0.0.1 with append-only persistence and `noeviction`, as popgate requires.

Also one with a replica and a Sentinel, and one that requires TLS with a client certificate.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from support.processes import PortBlock, Server, ServerMissingError, Startable, accepts, wait_until
from support.tls import Authority

REPLICATED_SECONDS = 45
"""Maximum seconds for replication to recover; a Sentinel takes ten to notice a returned server."""


TORN_COMMAND = b"*3\r\n$3\r\nSET\r\n$9\r\nhalf-writ"


class RedisServer(Server):
    """One Redis server; acknowledged writes survive `stop` and `restart`, and nearly all of them survive `kill`."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(
        self, folder: Path, settings: Mapping[str, str] | None = None, program: Sequence[str] = ("redis-server",)
    ) -> None:
        if shutil.which(program[0]) is None:
            raise ServerMissingError(f"{program[0]} is not installed")
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
        arguments = [*program, *(part for name, value in options.items() for part in (f"--{name}", value))]
        super().__init__("redis", folder, arguments=arguments)

    def url(self, database: int = 0) -> str:
        """Return the URL of one of its 16 databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def cut_power(self) -> None:
        """Kill it, and leave a half-written command at the end of its file, as a power cut would.

        With `appendfsync always`, everything acknowledged comes before that.
        """
        self.kill()
        latest = max((self.folder / "appendonlydir").glob("*.incr.aof"), key=lambda file: file.stat().st_mtime_ns)
        with latest.open("ab") as file:
            file.write(TORN_COMMAND)

    def ask(self, *words: str) -> Any:
        """Return its answer to one command, as `redis-py` decodes it."""
        return _ask(self.port, *words)

    def hearers(self, namespace: str) -> int:
        """Return how many proxies subscribe there to changes in their cluster."""
        _, count = self.ask("PUBSUB", "NUMSUB", f"popgate:{namespace}:changes")
        return int(count)

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")


class SecretiveRedis(RedisServer):
    """A Redis that accepts TLS, from clients with a certificate of `authority` only, beside the plain `port` for
    tests.
    """

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
    """One Sentinel that watches `master` and replaces it half a second after it fails. Start it after the replicas."""

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
        """Return the URL of the current master."""
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.master_name}/0"

    def master_port(self) -> int:
        """Return the port of the server that the Sentinel considers the master."""
        _, port = _ask(self.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master_name)
        return int(port)

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")


class ReplicatedRedis(Startable):
    """Two servers, of which the second replicates the first, and a Sentinel that fails over between them.

    A killed server may be started again: the Sentinel makes it a replica.
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
        """Return when `replica` is a replica and has all data of its master."""

        def is_replicated() -> bool:
            try:
                return bool(replica.ask("INFO", "replication").get("master_link_status") == "up")
            except redis.ConnectionError:  # a server that becomes a replica closes its connections
                return False

        wait_until(is_replicated, timeout_seconds=REPLICATED_SECONDS, what="the replica to have all data")

    def master(self) -> RedisServer:
        """Return the server that the Sentinel considers the master."""
        port = self.sentinel.master_port()
        return next(server for server in self.servers if server.port == port)

    def close(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.close()


def _ask(port: int, *words: str) -> Any:
    client: Any = redis.Redis  # the library is only partly typed
    with client.from_url(f"redis://127.0.0.1:{port}") as connected:
        return connected.execute_command(*words)
