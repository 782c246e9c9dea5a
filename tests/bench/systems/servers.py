"""The servers of the other systems, each started here in a folder and on a port of its own, and ended afterwards.

`.ci/install-bench-servers` unpacks them into a cache, each with the whole `/usr` that it needs; only root can run them.
An installed one is used otherwise.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.processes import PortBlock, Server, ServerFailedError, ServerMissingError, accepts
from support.rabbitmq_releases import WITH_USR

USER = "postgres"
AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""PostgreSQL refuses to run as root; in a user namespace, root's files belong to another user."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one Debian package, unpacked or installed."""

    package: str

    @property
    def _usr(self) -> Path | None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        usr = cache / "popgate" / "bench-servers" / self.package / "usr"
        return usr if os.geteuid() == 0 and usr.is_dir() else None

    def command(self, program: str, *arguments: str, as_user: bool = False) -> list[str]:
        """Return the command line of a program; its name may be a pattern below /usr. Raises: ServerMissingError."""
        wrapped = list(AS_USER) if as_user and os.geteuid() == 0 else []
        usr = self._usr
        if usr is not None and (found := sorted(usr.glob(program))):
            inside = str(Path("/usr") / found[-1].relative_to(usr))
            return [str(WITH_USR), str(usr), *wrapped, inside, *arguments]
        found = sorted(Path("/usr").glob(program))
        installed = str(found[-1]) if found else shutil.which(Path(program).name)
        if installed is None:
            raise ServerMissingError(f"{Path(program).name} can't be had here")
        return [*wrapped, installed, *arguments]

    def version(self, program: str, *arguments: str) -> str:
        """Return the version number that a program prints."""
        done = subprocess.run(self.command(program, *arguments), capture_output=True, text=True, check=True)
        found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
        return found.group() if found else "unknown"


NATS, BEANSTALKD = Programs("nats-server"), Programs("beanstalkd")
POSTGRES, REDIS = Programs("postgresql"), Programs("redis-server")
NATS_SERVER, BEANSTALKD_SERVER, REDIS_SERVER = "sbin/nats-server", "bin/beanstalkd", "bin/redis-server"
POSTGRES_SERVER, INITDB = "lib/postgresql/*/bin/postgres", "lib/postgresql/*/bin/initdb"


class NatsServer(Server):
    """A NATS server with JetStream on disk. ``sync_interval``: its time between syncs, or ``always``."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path, sync_interval: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._block = PortBlock()
        (self.port,) = self._block.ports
        configuration = folder / "nats.conf"
        store = folder / "store"
        configuration.write_text(
            f"listen: 127.0.0.1:{self.port}\n"
            f'jetstream {{ store_dir: "{store}", sync_interval: {sync_interval}, max_file_store: 20GB }}\n'
        )
        super().__init__("nats", folder, arguments=NATS.command(NATS_SERVER, "--config", str(configuration)))

    def _answers(self) -> bool:
        return "Server is ready" in self.output


class Beanstalkd(Server):
    """A beanstalkd that syncs its log at each write."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        log = folder / "log"
        log.mkdir(parents=True, exist_ok=True)
        arguments = ("-l", "127.0.0.1", "-p", str(self.port), "-b", str(log), "-f0")
        super().__init__("beanstalkd", folder, arguments=BEANSTALKD.command(BEANSTALKD_SERVER, *arguments))

    def _answers(self) -> bool:
        return accepts(self.port, say=b"stats\r\n", expect=b"OK")


class PostgresServer(Server):
    """A PostgreSQL that syncs each commit; all other settings are PostgreSQL's own."""

    ready_timeout_seconds = 30
    stop_timeout_seconds = 30

    def __init__(self, folder: Path) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        self._data = folder / "data"
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "synchronous_commit": "on",
            "fsync": "on",
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = POSTGRES.command(POSTGRES_SERVER, "-D", str(self._data), *flags, as_user=True)
        super().__init__("postgresql", folder, arguments=command)

    def start(self) -> None:
        """Make a new database, and start the server. Raises: ServerFailedError."""
        initdb = ("-D", str(self._data), "-U", USER, "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        command = POSTGRES.command(INITDB, *initdb, as_user=True)
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ServerFailedError(f"initdb: {done.stderr}")
        super().start()

    def _answers(self) -> bool:
        return "database system is ready to accept connections" in self.output and accepts(self.port)
