"""The replica keeper as operators run it, and its effect on RabbitMQ's queues."""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pika
from pika.exceptions import AMQPError

from support.command_line import CommandLine, Done
from support.processes import Server, wait_until
from support.proxy import POPGATE
from support.rabbitmq import RabbitNode


def keeper_environment(
    nodes: Sequence[RabbitNode], vhost: str, *, management: bool = True, tools: bool = True
) -> dict[str, str]:
    """Return the settings that ``popgate replicas`` needs for these nodes."""
    urls = ",".join(f"http://guest:guest@127.0.0.1:{node.management_port}" for node in nodes)
    return {
        "POPGATE_AMQP_URL": ",".join(node.amqp_url(vhost) for node in nodes),
        "POPGATE_MANAGEMENT_URL": urls if management else "http://guest:guest@127.0.0.1:1",
        "POPGATE_REPLICA_COMMANDS": ",".join(str(node.command_prefix()) for node in nodes) if tools else "none",
    }


class ReplicaCommands:
    """Runs ``popgate replicas`` commands to completion."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._popgate = CommandLine("http://127.0.0.1:1", may_fork=True)
        self._popgate.environment |= environment

    def __call__(self, *arguments: str) -> Done:
        return self._popgate("replicas", *arguments)

    def rows(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Return the rows it shows, by queue, without the queues of the keeper's own lock."""
        done = self(*arguments)
        assert done.code in (0, 1), done.err
        return {row["queue"]: row for row in done.rows if not row["queue"].startswith("popgate:mutex:")}


def program(folder: Path, name: str, script: str) -> str:
    """Write a shell script; return the command that runs it."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


class KeeperProcess(Server):
    """``popgate replicas watch``, with shorter intervals and waits than an operator would use."""

    ready_timeout_seconds = 60
    stop_timeout_seconds = 20

    def __init__(self, folder: Path, environment: Mapping[str, str], *arguments: str, name: str = "keeper") -> None:
        own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
        super().__init__(
            name,
            folder,
            arguments=[*POPGATE, "replicas", "watch", "--check-interval-seconds", "2", *arguments],
            environment={**own, "PYTHONUNBUFFERED": "1", **environment},
        )

    def _answers(self) -> bool:
        return "keeping replicas on RabbitMQ" in self.output

    @property
    def is_at_work(self) -> bool:
        return self.output.count("event='term_began'") > self.output.count("event='term_ended'")

    def changes(self, event: str = "started") -> list[str]:
        """Return the log's lines about changes that were ``started``, ``done``, ``dropped`` or ``failed``."""
        return [line for line in self.output.splitlines() if f"event='{event}'" in line]


def declare(
    node: RabbitNode,
    vhost: str,
    name: str,
    members: Sequence[RabbitNode],
    *,
    kind: str = "quorum",
    size: int = 1,
    arguments: Mapping[str, object] | None = None,
) -> None:
    """Declare a quorum queue, or a stream, with exactly these members; with ``size``, RabbitMQ first chooses that
    many. The first one leads.
    """
    wanted = {"quorum": "x-quorum-initial-group-size", "stream": "x-initial-cluster-size"}[kind]
    given = {"x-queue-type": kind, wanted: size, **(arguments or {})}
    body = {"durable": True, "node": members[0].name, "arguments": given}
    members[0].api("PUT", "queues", vhost, name, body=body)
    for member in members[1:]:
        if kind == "stream":
            node.ctl("add_replica", "--vhost", vhost, name, member.name, tool="rabbitmq-streams")
        else:
            node.ctl("add_member", "--vhost", vhost, name, member.name, tool="rabbitmq-queues")


def replicas_of(node: RabbitNode, vhost: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return the current members and online members of each queue, read without the keeper's code."""
    answer = httpx.get(
        f"http://127.0.0.1:{node.management_port}/api/queues/{quote(vhost, safe='')}",
        params={"disable_stats": "true", "enable_queue_totals": "true"},
        auth=("guest", "guest"),
        trust_env=False,
        timeout=20,
    )
    rows: list[dict[str, Any]] = answer.raise_for_status().json()
    if any("members" not in row for row in rows):  # of a stream
        said = node.ctl("--quiet", "--formatter", "json", "list_queues", "--vhost", vhost, "name", "members", "online")
        rows = json.loads(said)
    return {row["name"]: (set(row["members"] or ()), set(row["online"] or ())) for row in rows}


def wait_for_replicas(
    node: RabbitNode, vhost: str, names: Sequence[str], count: int, *, timeout_seconds: float
) -> None:
    """Return when each of these queues has ``count`` members online. Raises: TimeoutError."""

    def all_have() -> bool:
        found = replicas_of(node, vhost)
        return all(len(found[name][1]) >= count for name in names)

    wait_until(all_have, timeout_seconds=timeout_seconds, what=f"{len(names)} queues to have {count} replicas online")


class Publisher(threading.Thread):
    """Publishes to some queues, one confirmed message after the other, and records the longest publish."""

    def __init__(self, node: RabbitNode, vhost: str, queues: Sequence[str]) -> None:
        super().__init__(name="publisher", daemon=True)
        self._parameters = pika.URLParameters(node.amqp_url(vhost))
        self._queues = queues
        self._ending = threading.Event()
        self._began: float | None = None
        self._longest = 0.0
        self.confirmed = 0
        self.failures: list[str] = []

    def run(self) -> None:
        connection = pika.BlockingConnection(self._parameters)
        channel = connection.channel()
        channel.confirm_delivery()
        while not self._ending.is_set():
            for queue in self._queues:
                self._began = time.monotonic()
                try:
                    channel.basic_publish("", queue, b"x" * 100, pika.BasicProperties(delivery_mode=2))
                    self.confirmed += 1
                except AMQPError as error:
                    self.failures.append(f"{queue}: {error!r}")
                    if not channel.is_open:
                        return
                self._longest, self._began = max(self._longest, time.monotonic() - self._began), None
            time.sleep(0.01)
        connection.close()

    def longest_seconds(self) -> float:
        """Return the longest publish in seconds since the last ``forget``, including one in progress."""
        began = self._began
        return max(self._longest, 0.0 if began is None else time.monotonic() - began)

    def forget(self) -> None:
        """Restart the measurement: the cost of a killed node alone is not caused by the keeper."""
        self._longest = 0.0

    def end(self) -> None:
        self._ending.set()
        self.join(timeout=30)
