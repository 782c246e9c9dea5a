"""A private Redis on 127.0.0.1 with append-only persistence and `noeviction`, as popgate asks for."""

import shutil
from pathlib import Path

from support.processes import PortBlock, Server, ServerMissingError, accepts


class RedisServer(Server):
    """One Redis server; what it has answered is kept over `stop`, `kill` and `restart`."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path) -> None:
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
        }
        arguments = ["redis-server", *(part for name, value in options.items() for part in (f"--{name}", value))]
        super().__init__("redis", folder, arguments=arguments)

    def url(self, database: int = 0) -> str:
        """The URL of one of its 16 databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def _answers(self) -> bool:
        return accepts(self.port, say=b"PING\r\n", expect=b"+PONG")
