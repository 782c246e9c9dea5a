"""Defines who may use which operation: one table maps every operation to the action that it needs (decision 22).

The gate refuses an operation that is not in the table. A test compares the table with the routes of the application.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from popgate.api.paths import GROUP, LOCKS, TOPIC, PathTree
from popgate.domain.permissions import ANY, SERVER, Action, Resource

ResourceOf: TypeAlias = Callable[[tuple[str, ...]], Resource]
"""Returns the resource of a request from the parameters in its path."""


def _topic(path: tuple[str, ...]) -> Resource:
    return Resource(topic=path[0])


def _whole_topic(path: tuple[str, ...]) -> Resource:
    """The topic with all of its groups."""
    return Resource(topic=path[0], group=ANY)


def _group(path: tuple[str, ...]) -> Resource:
    return Resource(topic=path[0], group=path[1])


def _lock(path: tuple[str, ...]) -> Resource:
    return Resource(lock=path[0])


def _server(path: tuple[str, ...]) -> Resource:
    return SERVER


class Access(NamedTuple):
    """What an operation needs.

    ``action`` None: any valid credential is enough. ``or_action`` is enough in its place. ``resource`` None: a grant
    with ``action`` on any resource is enough, because the answer contains only what the caller may see. If
    ``is_public``, no credential is needed. If ``is_change``, the audit log records the operation.
    """

    operation: str
    action: Action | None = None
    resource: ResourceOf | None = None
    is_public: bool = False
    is_change: bool = False
    or_action: Action | None = None


Row: TypeAlias = tuple[str, str, Access]
"""A method, a path with {} in place of each parameter, and what this operation needs."""


def _row(
    method: str, path: str, operation: str, action: Action, resource: ResourceOf | None, *, is_change: bool = False
) -> Row:
    return method, path, Access(operation, action, resource, is_change=is_change)


def _rows() -> Iterator[Row]:
    yield from _server_rows()
    yield from _message_rows()
    yield from _lock_rows()
    yield from _topic_rows()
    yield from _group_rows()
    yield from _backup_rows()


def _server_rows() -> Iterator[Row]:
    for probe in ("healthz", "readyz"):
        for method in ("GET", "HEAD"):
            yield method, f"/{probe}", Access(probe, is_public=True)
    for path in ("/v1", "/docs", "/docs/{}", "/openapi.json"):
        yield "GET", path, Access("index" if path == "/v1" else "docs")
    for path in ("/console", "/console/{}"):  # files without data: the page asks for a key
        yield "GET", path, Access("console", is_public=True)
    yield "GET", "/v1/caller", Access("caller")
    yield _row("GET", "/metrics", "metrics", Action.METRICS, _server)

    for path, operation in (("cluster", "cluster"), ("replicas", "replicas"), ("replicas/groups", "replica_groups")):
        yield _row("GET", f"/v1/admin/{path}", operation, Action.INSPECT, _server)
    for path, operation in (("reports", "reports_list"), ("reports/{}", "reports_get")):
        yield _row("GET", f"/v1/admin/{path}", operation, Action.INSPECT, _server)
    # The doctor shows permissions and settings of RabbitMQ and Redis, and its runs cost them something.
    yield _row("GET", "/v1/admin/doctor", "doctor_get", Action.ADMIN, _server)
    yield _row("POST", "/v1/admin/doctor", "doctor_run", Action.ADMIN, _server)
    yield _row("GET", "/v1/admin/log-level", "log_level_get", Action.INSPECT, _server)
    yield _row("PUT", "/v1/admin/log-level", "log_level_put", Action.ADMIN, _server, is_change=True)


def _message_rows() -> Iterator[Row]:
    stream = f"{GROUP}/lease-groups/{{}}"
    yield _row("POST", f"{TOPIC}/messages", "publish", Action.PUBLISH, _topic)
    yield "GET", GROUP, Access("state", Action.INSPECT, _group, or_action=Action.CONSUME)  # a consumer needs the policy
    for verb in ("pop", "ack", "release", "extend", "reject"):
        yield _row("POST", f"{GROUP}/{verb}", verb, Action.CONSUME, _group)
    yield _row("POST", f"{GROUP}/assignment", "assignment", Action.CONSUME, _group)
    yield _row("DELETE", f"{GROUP}/assignment/{{}}", "assignment_leave", Action.CONSUME, _group)
    for verb in ("pull", "commit"):
        yield _row("POST", f"{GROUP}/queues/{{}}/{verb}", verb, Action.CONSUME, _group)
    yield _row("GET", f"{GROUP}/lease-groups", "lease_groups_list", Action.CONSUME, _group)
    yield _row("PUT", f"{stream}/{{}}", "lease_groups_put", Action.CONSUME, _group)
    yield _row("GET", f"{stream}/{{}}/messages", "lease_groups_read", Action.CONSUME, _group)
    for verb in ("ack", "extend", "release"):
        yield _row("POST", f"{stream}/{verb}", f"lease_groups_{verb}", Action.CONSUME, _group)


def _lock_rows() -> Iterator[Row]:
    lock = f"{LOCKS}/{{}}"
    yield _row("GET", LOCKS, "locks_list", Action.INSPECT, None)
    yield _row("GET", lock, "locks_get", Action.INSPECT, _lock)
    for method, operation in (("PUT", "locks_put"), ("DELETE", "locks_delete")):
        yield _row(method, lock, operation, Action.ADMIN, _lock, is_change=True)
    for verb in ("acquire", "verify", "renew", "release"):
        yield _row("POST", f"{lock}/{verb}", f"locks_{verb}", Action.LOCK, _lock)
    yield _row("POST", f"{lock}/force-release", "locks_force_release", Action.ADMIN, _lock, is_change=True)


def _topic_rows() -> Iterator[Row]:
    admin_topic = f"/v1/admin{TOPIC.removeprefix('/v1')}"
    yield _row("GET", "/v1/admin/topics", "topics_list", Action.INSPECT, None)
    yield _row("GET", admin_topic, "topic_get", Action.INSPECT, _topic)
    # Changing what exists, and adopting, need more: the engine checks this while no other request can change the topic.
    yield _row("PUT", admin_topic, "topic_put", Action.CREATE, _topic, is_change=True)
    yield _row("DELETE", admin_topic, "topic_delete", Action.ADMIN, _whole_topic, is_change=True)
    # Other groups, and what the publisher has sent, are shown only if the caller may see them.
    yield _row("GET", f"{admin_topic}/messages", "message_find", Action.INSPECT, _topic)
    yield _row("GET", f"{admin_topic}/messages/{{}}", "message_get", Action.INSPECT, _topic)


def _group_rows() -> Iterator[Row]:
    admin_group = f"/v1/admin{GROUP.removeprefix('/v1')}"
    dead = f"{admin_group}/dead-letters"
    yield _row("GET", admin_group, "group_get", Action.INSPECT, _group)
    yield _row("PUT", admin_group, "group_put", Action.CREATE, _group, is_change=True)
    yield _row("DELETE", admin_group, "group_delete", Action.ADMIN, _group, is_change=True)
    for verb in ("pause", "resume", "purge"):
        yield _row("POST", f"{admin_group}/{verb}", f"group_{verb}", Action.ADMIN, _group, is_change=True)
    yield _row("GET", f"{admin_group}/consume-mode", "mode_get", Action.INSPECT, _group)
    yield _row("PUT", f"{admin_group}/consume-mode", "mode_put", Action.ADMIN, _group, is_change=True)
    yield _row("GET", f"{admin_group}/explain", "group_explain", Action.INSPECT, _group)
    # Peeked messages and dead letters are messages of the group, with their bodies.
    yield _row("GET", f"{admin_group}/messages", "group_peek", Action.CONSUME, _group)
    yield _row("GET", dead, "dead_letters_list", Action.CONSUME, _group)
    yield _row("GET", f"{dead}/{{}}", "dead_letters_get", Action.CONSUME, _group)
    yield _row("GET", f"{dead}/redrive", "redrive_get", Action.INSPECT, _group)
    yield _row("POST", f"{dead}/redrive", "redrive_start", Action.ADMIN, _group, is_change=True)
    yield _row("DELETE", f"{dead}/redrive", "redrive_cancel", Action.ADMIN, _group, is_change=True)
    yield _row("POST", f"{dead}/purge", "dead_letters_purge", Action.ADMIN, _group, is_change=True)


def _backup_rows() -> Iterator[Row]:
    """A backup contains every message, and the secret of the data folder."""
    path = "/v1/admin/backup"
    for method, operation in (("POST", "backup_start"), ("DELETE", "backup_delete")):
        yield method, path, Access(operation, Action.ADMIN, _server, is_change=True)
    yield "GET", path, Access("backup_get", Action.ADMIN, _server)
    yield "GET", f"{path}/archive", Access("backup_read", Action.ADMIN, _server, is_change=True)


TABLE: Mapping[tuple[str, str], Access] = MappingProxyType({(method, path): access for method, path, access in _rows()})
"""What each operation needs, by its method and its path, with {} in place of each parameter."""

ACCESS = PathTree((method, path, access) for (method, path), access in TABLE.items())
