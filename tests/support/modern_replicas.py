"""The management API of RabbitMQ 3.13 and 4.x, as far as it is about replicas: a real HTTP server with derived answers.

No such broker can be installed beside the tests' own 3.10, so these answers were read from RabbitMQ's source, at the
tags v3.13.7, v4.1.0 and v4.3.5. Each method names the module. What they leave out, the adapter does not read.
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
"""After so many looks at it a new member has copied the log, and gets its vote."""
END_OF_LOG = 5_000
NO_MEMBER = "Node is not a cluster member"


@dataclass
class ModernQueue:
    members: list[str]
    online: list[str]
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    joining: dict[str, int] = field(default_factory=dict[str, int])
    """Members without a vote, and how often somebody has looked since."""
    behind: dict[str, int] = field(default_factory=dict[str, int])
    """By how many entries of the log members are behind."""


@dataclass
class ModernRabbit:
    """``version``: "3.13.7", "4.1.0" or "4.3.5". ``changes_allowed``: whether management.restrictions leave them on."""

    version: str = "4.1.0"
    running: list[str] = field(default_factory=lambda: ["rabbit@a", "rabbit@b", "rabbit@c"])
    down: list[str] = field(default_factory=list[str])
    drained: list[str] = field(default_factory=list[str])
    queues: dict[str, ModernQueue] = field(default_factory=dict[str, ModernQueue])
    policies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    changes_allowed: bool = True
    odd: dict[str, tuple[int, Any]] = field(default_factory=dict[str, tuple[int, Any]])
    """Status and body of what is answered in place of the right thing, by the first part of the path."""
    changes: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Method, queue and node of each change that was made."""

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and body."""
        parts = [unquote(part) for part in urlsplit(path).path.split("/")[2:]]
        if parts[0] in self.odd:
            status, said = self.odd[parts[0]]
            return status, {}, said
        match parts:
            case ["overview"]:
                return 200, {}, self._overview()
            case ["nodes"]:
                return 200, {}, self._nodes()
            case ["feature-flags"]:
                return 200, {}, [{"name": "quorum_queue_non_voters", "state": "enabled"}]
            case ["policies", "/"]:
                return 200, {}, self.policies
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

    def _overview(self) -> Mapping[str, Any]:
        """rabbit_mgmt_wm_overview; node_tags from 4.0 on."""
        tags = {"node_tags": {"zone": "east"}} if self.version.startswith("4") else {}
        return {"rabbitmq_version": self.version, "node": self.running[0], **tags}

    def _nodes(self) -> list[Mapping[str, Any]]:
        """rabbit_mgmt_wm_nodes:all_nodes_raw, augmented for nodes that run (rabbit_mgmt_external_stats)."""
        full: dict[str, Any] = {
            "mem_alarm": False,
            "disk_free_alarm": False,
            "mem_used": 10,
            "mem_limit": 100,
            "partitions": [],
        }
        return [
            {"name": name, "type": "disc", "running": name in self.running, "being_drained": name in self.drained}
            | (full | {"disk_free": 100, "disk_free_limit": 1} if name in self.running else {})
            for name in [*self.running, *self.down]
        ]

    def _row(self, name: str) -> Mapping[str, Any]:
        """rabbit_mgmt_format:queue with rabbit_quorum_queue:format."""
        queue = self.queues[name]
        leader = queue.online[0] if queue.online else queue.members[0]
        own = {"members": queue.members, "online": queue.online, "leader": leader, "node": leader, "state": "running"}
        return {"name": name, "vhost": "/", "type": "quorum", "messages": 0, "arguments": queue.arguments, **own}

    def _status(self, name: str) -> list[Mapping[str, Any]]:
        """rabbit_mgmt_wm_quorum_queue_status, with the rows of rabbit_quorum_queue:status."""
        queue, rows = self.queues[name], list[Mapping[str, Any]]()
        for member in sorted(queue.members):
            if member not in queue.online:
                empty = dict.fromkeys(("Membership", "LastLog Index", "Last Written", "Last Applied"), "")
                rows.append({"Node Name": member, "Raft State": "nodedown", **empty, "Commit Index": "", "Term": ""})
                continue
            looks = queue.joining.get(member)
            if looks is not None:
                queue.joining[member] = looks + 1
                if looks + 1 >= LOOKS_TO_CATCH_UP:
                    del queue.joining[member]
            position = END_OF_LOG if looks is None else END_OF_LOG * looks // LOOKS_TO_CATCH_UP
            position -= queue.behind.get(member, 0)
            rows.append(
                {
                    "Node Name": member,
                    "Raft State": "leader" if member == queue.online[0] else "follower",
                    "Membership": "voter" if looks is None else "promotable",
                    "Last Log Index": position,
                    "Last Written": position,
                    "Last Applied": position,
                    "Commit Index": position,
                    "Snapshot Index": "undefined",
                    "Term": 1,
                    "Machine Version": 3,
                }
            )
        return rows

    def _replicas(
        self, method: str, name: str, what: str, body: Mapping[str, Any]
    ) -> tuple[int, Mapping[str, str], Any]:
        """rabbit_mgmt_wm_quorum_queue_replicas_{add,delete}_member; is_authorized comes before the method is looked at,
        and cowboy_rest answers OPTIONS with what allowed_methods says."""
        taken = {"add": "POST", "delete": "DELETE"}[what]
        if not self.changes_allowed:
            reason = "Broker settings disallow quorum queue replica operations."
            return 405, {}, {"error": "method_not_allowed", "reason": reason}
        if method == "OPTIONS":
            return 200, {"allow": f"{taken}, OPTIONS"}, None
        if method != taken:
            return 405, {"allow": f"{taken}, OPTIONS"}, None
        if name not in self.queues:
            return 404, {}, {"error": "Object Not Found", "reason": "Not Found"}
        node: str = body["node"]
        refusal = self._added(name, node) if what == "add" else self._deleted(name, node)
        if refusal == NO_MEMBER:
            return 400, {}, {"error": "bad_request", "reason": refusal}
        if refusal is not None:
            return 503, {}, {"error": "service_unavailable", "reason": refusal}
        return (204 if what == "add" else 202), {}, None

    def _added(self, name: str, node: str) -> str | None:
        """rabbit_quorum_queue:add_member/5: idempotent; the new member is promotable until it has caught up."""
        queue = self.queues[name]
        if node not in self.running:
            return "node_not_running"
        if node not in queue.members:
            queue.members.append(node)
            queue.online.append(node)
            queue.joining[node] = 0
            self.changes.append(("POST", name, node))
        return None

    def _deleted(self, name: str, node: str) -> str | None:
        """rabbit_quorum_queue:delete_member/3: idempotent; rabbit_mgmt_nodes:require_node_name in 4.3."""
        queue = self.queues[name]
        if self.version.startswith("4.3") and node not in [*self.running, *self.down]:
            return NO_MEMBER
        if queue.members == [node]:
            return "last_node"
        if node in queue.members:
            queue.members.remove(node)
            queue.online = [member for member in queue.online if member != node]
            self.changes.append(("DELETE", name, node))
        return None


class ModernManagement:
    """Serves ``rabbit``; a context manager. ``url`` has credentials in it, and nobody without them is answered."""

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
                """The test says what went wrong."""

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
