"""Private RabbitMQ nodes and clusters on 127.0.0.1, which tests stop, kill, pause and restart.

This module owns the nodes' folders, ports, configuration and name server (epmd); it never talks to a RabbitMQ that it
did not start. Data is kept over `stop`, `kill` and `restart`, and belongs to the caller's folder.

Measured on two cores: a node of 3.10 is ready in 6-8 s, one of 4.3 in 5 s, a cluster of three in 15-22 s, SIGTERM takes
6 s; share them.
"""

import os
import secrets
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run
from typing import Any
from urllib.parse import quote

import httpx

from support.processes import PortBlock, Server, ServerFailedError, Startable, accepts, wait_until
from support.rabbitmq_releases import RabbitRelease, find_release

COOKIE = "POPGATETESTS"
USER = "guest"
WHOLE_TIMEOUT_SECONDS = 30
CTL_TIMEOUT_SECONDS = 60
# While one node is paused, the management API of the others hangs.
API_TIMEOUT_SECONDS = 10
CTL_PORT_COUNT = 8
QUIET_ERLANG = "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitSettings:
    """The node configuration that a test may change.

    `consumer_timeout_seconds` closes channels that hold an unacked delivery for longer (default 30 minutes); the broker
    checks every `channel_tick_interval_seconds` (60). A node considers another one down after about `net_tick_seconds`
    of silence (60), or if it can't connect within `net_setup_seconds` (7); both are whole seconds. A message that
    expired but did not reach its next queue, because that queue's node was just lost, is sent there again after
    `dead_letter_confirm_seconds` (180). `configuration` is more lines for rabbitmq.conf.
    """

    consumer_timeout_seconds: float | None = None
    channel_tick_interval_seconds: float | None = None
    net_tick_seconds: int | None = None
    net_setup_seconds: int | None = None
    dead_letter_confirm_seconds: float | None = None
    configuration: Mapping[str, str | int] = field(default_factory=dict[str, str | int])

    def advanced_config(self) -> str:
        rabbit = {
            "consumer_timeout": _milliseconds(self.consumer_timeout_seconds),
            "channel_tick_interval": _milliseconds(self.channel_tick_interval_seconds),
            "dead_letter_worker_publisher_confirm_timeout": _milliseconds(self.dead_letter_confirm_seconds),
        }
        kernel = {"net_ticktime": self.net_tick_seconds, "net_setuptime": self.net_setup_seconds}
        return f"[{{rabbit, [{_erlang(rabbit)}]}}, {{kernel, [{_erlang(kernel)}]}}].\n"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _erlang(settings: Mapping[str, int | None]) -> str:
    return ", ".join(f"{{{name}, {value}}}" for name, value in settings.items() if value is not None)


class RabbitNode(Server):
    """One node. `RabbitCluster` creates it, and the first time starts all its nodes in the right order."""

    ready_timeout_seconds = 90
    stop_timeout_seconds = 60

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        release: RabbitRelease,
        epmd_port: int,
        peers: list[str],
        settings: RabbitSettings,
    ) -> None:
        self.release = release
        self._folder_of_node = folder
        self._block = PortBlock(3 + CTL_PORT_COUNT)
        self.amqp_port, self.management_port, dist_port, *ctl_ports = self._block.ports
        environment = {
            "HOME": str(folder.parent),
            "RABBITMQ_NODENAME": name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.amqp_port),
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script is replaced by the Erlang VM: our child is the node itself
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": QUIET_ERLANG,
            "RABBITMQ_CTL_ERL_ARGS": f"{QUIET_ERLANG} +sbwt none",
            "RABBITMQ_CTL_DIST_PORT_MIN": str(ctl_ports[0]),
            "RABBITMQ_CTL_DIST_PORT_MAX": str(ctl_ports[-1]),
        }
        super().__init__(name, folder, arguments=release.script("rabbitmq-server"), environment=environment)
        (folder / "rabbitmq.conf").write_text(self._configuration(peers, settings))
        (folder / "advanced.config").write_text(settings.advanced_config())
        (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
        self._api = httpx.Client(
            base_url=f"http://127.0.0.1:{self.management_port}/api",
            auth=(USER, USER),
            timeout=API_TIMEOUT_SECONDS,
            trust_env=False,
            verify=False,  # plain http
        )

    def _configuration(self, peers: list[str], settings: RabbitSettings) -> str:
        entries: dict[str, str | int] = {
            "listeners.tcp.1": f"127.0.0.1:{self.amqp_port}",
            "management.tcp.ip": "127.0.0.1",
            "management.tcp.port": self.management_port,
            "log.console": "true",
            "log.console.use_colors": "off",
            "log.file": "false",
            "vm_memory_high_watermark.absolute": "1GB",
            "disk_free_limit.absolute": "50MB",
            # The management API's data is then at most one second old, not five. All three settings are needed.
            "management.sample_retention_policies.global.minute": 5,
            "management.sample_retention_policies.global.hour": 60,
            "management.sample_retention_policies.basic.minute": 1,
            "management.sample_retention_policies.basic.hour": 60,
            "management.sample_retention_policies.detailed.10": 5,
        }
        if len(peers) > 1:
            entries |= {
                "cluster_formation.peer_discovery_backend": "classic_config",
                "cluster_formation.discovery_retry_limit": 1,  # the first node waits for no other
                "cluster_formation.discovery_retry_interval": 100,
                "cluster_partition_handling": "pause_minority",
            }
            if self.release.version < (4,):
                entries |= {f"cluster_formation.randomized_startup_delay_range.{end}": 0 for end in ("min", "max")}
            # A node waits ten seconds for each named node that is down: the first node joins none, the others join it.
            joined = dict.fromkeys((peers[0], self.name))
            entries |= {f"cluster_formation.classic_config.nodes.{i}": node for i, node in enumerate(joined, 1)}
        return "".join(f"{key} = {value}\n" for key, value in {**entries, **settings.configuration}.items())

    def _answers(self) -> bool:
        # The listeners answer a little earlier, but a virtual host added then never starts on this node.
        if "Server startup complete" not in self.output:
            return False
        if not accepts(self.amqp_port, say=b"AMQP\x00\x00\x09\x01", expect=b"\x01"):
            return False
        return self.name in self.running_nodes()

    def close(self) -> None:
        super().close()
        self._api.close()

    def amqp_url(self, vhost: str = "/") -> str:
        """Return the URL of a virtual host, with credentials."""
        return f"amqp://{USER}:{USER}@127.0.0.1:{self.amqp_port}/{quote(vhost, safe='')}"

    @property
    def management_url(self) -> str:
        return f"http://guest:guest@127.0.0.1:{self.management_port}"

    def ctl(self, *arguments: str, tool: str = "rabbitmqctl") -> str:
        """Run `rabbitmqctl` (or `tool`, such as `rabbitmq-queues`) against this node and return its output.

        Takes half a second, for example `ctl("set_vm_memory_high_watermark", "0.0000001")`.
        Raises: ServerFailedError with the tool's output.
        """
        done = run(
            self.release.script(tool, *arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=CTL_TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailedError(f"{tool} {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def command_prefix(self) -> Path:
        """Write a program that runs RabbitMQ's tools against this node, as `ssh HOST` does: `PREFIX rabbitmqctl
        ...`.
        """
        program = self._folder_of_node / "on-this-node"
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self._environment.items()]
        run_tool = self.release.command("/bin/sh", "-c", f'cd {self.release.scripts} && exec "./$@"', "tool")
        program.write_text("\n".join(["#!/bin/sh", *lines, f'exec {shlex.join(run_tool)} "$@"', ""]))
        program.chmod(0o700)
        return program

    def api(self, method: str, *path: str, body: object = None) -> Any:
        """Call the management API with every part of `path` quoted; return the decoded answer.

        Raises: httpx.HTTPError, httpx.HTTPStatusError included.
        """
        answer = self._api.request(method, "/" + "/".join(quote(part, safe="") for part in path), json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def running_nodes(self) -> set[str]:
        """Return the names of the cluster's running nodes, as this node sees them; none if it does not answer."""
        try:
            return {node["name"] for node in self._rows("nodes") if node["running"]}
        except httpx.HTTPError:
            return set()

    def add_vhost(self, vhost: str) -> None:
        """Create a virtual host that only this harness's user can use."""
        self.api("PUT", "vhosts", vhost, body={})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.api("PUT", "permissions", vhost, USER, body=everything)

    def vhosts(self) -> set[str]:
        """Return the names of all virtual hosts."""
        return {row["name"] for row in self._rows("vhosts")}

    def delete_vhost(self, vhost: str) -> None:
        """Delete a virtual host with all its queues and connections."""
        self.api("DELETE", "vhosts", vhost)

    @contextmanager
    def own_vhost(self, prefix: str) -> Generator[str]:
        """Make a virtual host with a unique name that begins with `prefix`, and delete it in the end."""
        name = f"{prefix}-{secrets.token_hex(4)}"
        self.add_vhost(name)
        yield name
        self.delete_vhost(name)

    def queues(self, vhost: str) -> list[dict[str, Any]]:
        """Return the queues of a virtual host as the management API describes them, up to a second old."""
        return self._rows("queues", vhost)

    def consumers(self, vhost: str) -> list[dict[str, Any]]:
        """Return the consumers of a virtual host as the management API describes them, up to a second old."""
        return self._rows("consumers", vhost)

    def close_connections(self, vhost: str) -> None:
        """Close every connection to a virtual host from the broker's side. Takes half a second."""
        self.ctl("close_all_connections", "--vhost", vhost, "closed by the test")

    def sync(self) -> None:
        """Write to disk what RabbitMQ would otherwise keep in memory for half a second. Takes as long.

        A quorum queue that was declared less than that before a `kill` never gets a leader again (3.10).
        """
        # Each virtual host has a separate table. It disappears with a virtual host that is deleted meanwhile, which is
        # no failure.
        sync = (
            "case catch dets:sync(Table) of ok -> ok; Told -> {false, _} = {lists:member(Table, dets:all()), Told} end"
        )
        self.ctl("eval", f"[{sync} || Table <- dets:all()].")

    def _rows(self, *path: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.api("GET", *path)
        return rows


class RabbitCluster(Startable):
    """`size` nodes that form one cluster, with a private name server; a context manager that starts and ends them.

    `folder` is a new folder of the caller's. Every node can serve every client. The newest release is started unless
    `release` names another.
    """

    def __init__(
        self,
        folder: Path,
        *,
        release: RabbitRelease | None = None,
        size: int = 1,
        settings: RabbitSettings | None = None,
    ) -> None:
        self.release = release or find_release()
        folder.mkdir(parents=True, exist_ok=True)
        cookie = folder / ".erlang.cookie"
        cookie.write_text(COOKIE)
        cookie.chmod(0o400)
        self._epmd = _Epmd(folder / "epmd", self.release)
        names = [f"n{i}@localhost" for i in range(1, size + 1)]
        self.nodes = tuple(
            RabbitNode(
                folder / name.partition("@")[0],
                name,
                release=self.release,
                epmd_port=self._epmd.port,
                peers=names,
                settings=settings or RabbitSettings(),
            )
            for name in names
        )

    def start(self) -> None:
        """Start all nodes and return when each of them sees all. Raises: ServerFailedError, TimeoutError."""
        self._epmd.start()
        # The first one starts alone, so that the others find it: started together, each could form a separate cluster.
        self.nodes[0].start()
        for node in self.nodes[1:]:
            node.launch()
        for node in self.nodes[1:]:
            node.wait_ready()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Return when every node sees every node running. Raises: TimeoutError."""
        names = {node.name for node in self.nodes}
        wait_until(
            lambda: all(node.running_nodes() == names for node in self.nodes),
            timeout_seconds=WHOLE_TIMEOUT_SECONDS,
            what="every node to see the whole cluster",
        )

    def make_whole(self) -> None:
        """Repair what a test has left broken, drop the virtual hosts that it has left, and return when each node sees
        all: queues of an earlier test would have a part in where leaders are placed, and in how long elections take.

        Raises: ServerFailedError, TimeoutError, httpx.HTTPError.
        """
        for node in self.nodes:
            if node.is_running():
                node.resume()
            else:
                node.launch()
        for node in self.nodes:
            node.wait_ready()
        self.wait_whole()
        for name in self.nodes[0].vhosts() - {"/"}:
            self.nodes[0].delete_vhost(name)

    def close(self) -> None:
        """Kill everything; the data stays in its folder. A second call does nothing."""
        for server in (*self.nodes, self._epmd):
            server.close()


class _Epmd(Server):
    """Erlang's name server. Otherwise a node would start one itself, which would then stay behind."""

    ready_timeout_seconds = 10
    stop_timeout_seconds = 10

    def __init__(self, folder: Path, release: RabbitRelease) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        arguments = release.command("epmd", "-port", str(self.port), "-address", "127.0.0.1", "-relaxed_command_check")
        super().__init__("epmd", folder, arguments=arguments)

    def _answers(self) -> bool:
        return accepts(self.port)
