"""The replica part of RabbitMQ 4.3's management API, for answers that a real broker can't be made to give.

A real broker does not stop half way through its catch-up, and returns no malformed rows;
``contract/test_replicas_http`` covers real answers. The answers here are copied from a real 4.3.6, without the fields
that the adapter does not read.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LOOKS_TO_CATCH_UP = 3
"""Number of looks at a new member after which it has copied the log and gets its vote."""
END_OF_LOG = 5_000


@dataclass
class ModernQueue:
    members: list[str]
    online: list[str]
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    joining: dict[str, int] = field(default_factory=dict[str, int])
    """Members without a vote, and the number of looks at each since it joined."""
    behind: dict[str, int] = field(default_factory=dict[str, int])
    """Number of log entries by which each member is behind."""
    growth: int = 0
    """Number of entries added to the log between two looks."""
    looks: int = 0
    late_lists: int = 0
    """Number of lists after each change that still show the members before it, as those of a busy broker do."""
    listed: list[list[str]] = field(default_factory=list[list[str]])
    """The members that the next lists show."""


@dataclass
class ModernRabbit:
    """``changes_allowed``: whether management.restrictions permits changes."""

    running: list[str] = field(default_factory=lambda: ["rabbit@a", "rabbit@b", "rabbit@c"])
    queues: dict[str, ModernQueue] = field(default_factory=dict[str, ModernQueue])
    changes_allowed: bool = True
    odd: dict[str, tuple[int, Any]] = field(default_factory=dict[str, tuple[int, Any]])
    """Status and body that replace the correct answer, by the first part of the path."""
    changes: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Method, queue and node of each change that was made."""

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], Any]:
        """Return status, headers and body."""
        parts = [unquote(part) for part in urlsplit(path).path.split("/")[2:]]
        if parts[0] in self.odd:
            status, said = self.odd[parts[0]]
            return status, {}, said
        match parts:
            case ["overview"]:
                return 200, {}, {"rabbitmq_version": "4.3.6", "node": self.running[0], "node_tags": {}}
            case ["nodes"]:
                return 200, {}, self._nodes()
            case ["feature-flags"]:
                return 200, {}, [{"name": "quorum_queue_non_voters", "state": "enabled"}]
            case ["policies", "/"]:
                return 200, {}, []
            case ["queues", "/"]:
                return 200, {}, [self._row(name) for name in self.queues]
            case ["queues", "/", name] if name in self.queues:
                return 200, {}, self._row(name)
            case ["queues", "quorum", "/", name, "status"] if method == "GET" and name in self.queues:
                return 200, {}, self._status(name)
            case ["queues", "quorum", "/", name, "replicas", ("add" | "delete") as what]:
                return self._replicas(method, name, what, body)
            case _:
                return 404, {}, {"error": "Object Not Found", "reason": "Not Found"}

    def _nodes(self) -> list[Mapping[str, Any]]:
        facts: dict[str, Any] = {"running": True, "being_drained": False, "partitions": [], "mem_alarm": False}
        return [{"name": name, "type": "disc", "disk_free_alarm": False, **facts} for name in self.running]

    def _row(self, name: str) -> Mapping[str, Any]:
        queue = self.queues[name]
        leader = queue.online[0] if queue.online else queue.members[0]
        members = queue.listed.pop(0) if queue.listed else queue.members
        online = [one for one in queue.online if one in members]
        own = {"members": members, "online": online, "leader": leader, "node": leader, "state": "running"}
        return {"name": name, "vhost": "/", "type": "quorum", "messages": 0, "arguments": queue.arguments, **own}

    def _status(self, name: str) -> list[Mapping[str, Any]]:
        queue, rows = self.queues[name], list[Mapping[str, Any]]()
        queue.looks += 1
        for member in sorted(queue.members):
            if member not in queue.online:
                empty = dict.fromkeys(("Membership", "Last Log Index", "Last Written", "Last Applied"), "")
                rows.append(
                    {"Node Name": member, "Raft State": "noconnection", **empty, "Commit Index": "", "Term": ""}
                )
                continue
            looks = queue.joining.get(member)
            if looks is not None:
                queue.joining[member] = looks + 1
                if looks + 1 >= LOOKS_TO_CATCH_UP:
                    del queue.joining[member]
            position = END_OF_LOG if looks is None else END_OF_LOG * looks // LOOKS_TO_CATCH_UP
            position += queue.looks * queue.growth - queue.behind.get(member, 0)
            rows.append(
                {
                    "Node Name": member,
                    "Raft State": "leader" if member == queue.online[0] else "follower",
                    "Membership": "voter" if looks is None else "promotable",
                    "Last Log Index": position,
                    "Last Written": position,
                    "Last Applied": position,
                    "Commit Index": position,
                    "Snapshot Index": -1,
                    "Term": 1,
                    "Machine Version": 8,
                }
            )
        return rows

    def _replicas(
        self, method: str, name: str, what: str, body: Mapping[str, Any]
    ) -> tuple[int, Mapping[str, str], Any]:
        """Only additions are made here."""
        taken = {"add": "POST", "delete": "DELETE"}[what]
        if not self.changes_allowed:
            reason = "Broker settings disallow quorum queue replica operations."
            return 405, {}, {"error": "method_not_allowed", "reason": reason}
        if method == "OPTIONS":
            return 200, {"allow": f"{taken}, OPTIONS"}, None
        queue, node = self.queues[name], str(body["node"])
        if what == "add" and node not in queue.members:
            queue.listed = [[*queue.members] for _ in range(queue.late_lists)]
            queue.members.append(node)
            queue.online.append(node)
            queue.joining[node] = 0
            self.changes.append((method, name, node))
        return 204, {}, None


class ModernManagement:
    """Serves ``rabbit``; a context manager. ``url`` contains credentials, and requests without them are refused."""

    def __init__(self, rabbit: ModernRabbit) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                status, headers, answer = rabbit.answer(self.command, self.path, body)
                if "authorization" not in self.headers:
                    status, headers, answer = 401, dict[str, str](), {"error": "not_authorized"}
                said = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                for header, value in headers.items():
                    self.send_header(header, value)
                self.send_header("content-type", "application/json")
                if status != 204:
                    self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = handle_any  # noqa: N815  # the names that the standard library calls
            do_POST = do_DELETE = do_OPTIONS = do_GET  # noqa: N815  # likewise

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing; the test reports failures."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://guest:guest@127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
