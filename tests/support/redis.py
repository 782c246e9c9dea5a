"""A private Redis on 127.0.0.1 with append-only persistence and `noeviction`, as popgate asks for; and a Sentinel."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from support.processes import PortBlock, Server, ServerMissingError, accepts


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

    def ask(self, *words: str) -> Any:
        """What it answers to one command, as `redis-py` has it."""
        client: Any = redis.Redis  # it has few types
        with client.from_url(self.url()) as connected:
            return connected.execute_command(*words)

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")


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

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")
