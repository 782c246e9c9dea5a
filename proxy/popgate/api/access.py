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


def _rows() -> Iterator[tuple[str, str, Access]]:
    admin_topic, admin_group = f"/v1/admin{TOPIC.removeprefix('/v1')}", f"/v1/admin{GROUP.removeprefix('/v1')}"
    dead, stream, lock = f"{admin_group}/dead-letters", f"{GROUP}/lease-groups/{{}}", f"{LOCKS}/{{}}"

    def row(
        method: str, path: str, operation: str, action: Action, resource: ResourceOf | None, *, is_change: bool = False
    ) -> tuple[str, str, Access]:
        return method, path, Access(operation, action, resource, is_change=is_change)

    for probe in ("healthz", "readyz"):
        for method in ("GET", "HEAD"):
            yield method, f"/{probe}", Access(probe, is_public=True)
    for path in ("/v1", "/docs", "/docs/{}", "/openapi.json"):
        yield "GET", path, Access("index" if path == "/v1" else "docs")
    for path in ("/console", "/console/{}"):  # files without data: the page asks for a key
        yield "GET", path, Access("console", is_public=True)
    yield "GET", "/v1/caller", Access("caller")
    yield row("GET", "/metrics", "metrics", Action.METRICS, _server)

    yield row("POST", f"{TOPIC}/messages", "publish", Action.PUBLISH, _topic)
    yield "GET", GROUP, Access("state", Action.INSPECT, _group, or_action=Action.CONSUME)  # a consumer needs the policy
    for verb in ("pop", "ack", "release", "extend", "reject"):
        yield row("POST", f"{GROUP}/{verb}", verb, Action.CONSUME, _group)
    yield row("POST", f"{GROUP}/assignment", "assignment", Action.CONSUME, _group)
    yield row("DELETE", f"{GROUP}/assignment/{{}}", "assignment_leave", Action.CONSUME, _group)
    for verb in ("pull", "commit"):
        yield row("POST", f"{GROUP}/queues/{{}}/{verb}", verb, Action.CONSUME, _group)
    yield row("GET", f"{GROUP}/lease-groups", "lease_groups_list", Action.CONSUME, _group)
    yield row("PUT", f"{stream}/{{}}", "lease_groups_put", Action.CONSUME, _group)
    yield row("GET", f"{stream}/{{}}/messages", "lease_groups_read", Action.CONSUME, _group)
    for verb in ("ack", "extend", "release"):
        yield row("POST", f"{stream}/{verb}", f"lease_groups_{verb}", Action.CONSUME, _group)

    yield row("GET", LOCKS, "locks_list", Action.INSPECT, None)
    yield row("GET", lock, "locks_get", Action.INSPECT, _lock)
    for method, operation in (("PUT", "locks_put"), ("DELETE", "locks_delete")):
        yield row(method, lock, operation, Action.ADMIN, _lock, is_change=True)
    for verb in ("acquire", "verify", "renew", "release"):
        yield row("POST", f"{lock}/{verb}", f"locks_{verb}", Action.LOCK, _lock)
    yield row("POST", f"{lock}/force-release", "locks_force_release", Action.ADMIN, _lock, is_change=True)

    yield row("GET", "/v1/admin/topics", "topics_list", Action.INSPECT, None)
    yield row("GET", admin_topic, "topic_get", Action.INSPECT, _topic)
    # Changing what exists, and adopting, need more: the engine checks this while no other request can change the topic.
    yield row("PUT", admin_topic, "topic_put", Action.CREATE, _topic, is_change=True)
    yield row("DELETE", admin_topic, "topic_delete", Action.ADMIN, _whole_topic, is_change=True)
    yield row("GET", admin_group, "group_get", Action.INSPECT, _group)
    yield row("PUT", admin_group, "group_put", Action.CREATE, _group, is_change=True)
    yield row("DELETE", admin_group, "group_delete", Action.ADMIN, _group, is_change=True)
    for verb in ("pause", "resume", "purge"):
        yield row("POST", f"{admin_group}/{verb}", f"group_{verb}", Action.ADMIN, _group, is_change=True)
    yield row("GET", f"{admin_group}/consume-mode", "mode_get", Action.INSPECT, _group)
    yield row("PUT", f"{admin_group}/consume-mode", "mode_put", Action.ADMIN, _group, is_change=True)
    yield row("GET", f"{admin_group}/explain", "group_explain", Action.INSPECT, _group)
    # Other groups, and what the publisher has sent, are shown only if the caller may see them.
    yield row("GET", f"{admin_topic}/messages", "message_find", Action.INSPECT, _topic)
    yield row("GET", f"{admin_topic}/messages/{{}}", "message_get", Action.INSPECT, _topic)
    # Peeked messages and dead letters are messages of the group, with their bodies.
    yield row("GET", f"{admin_group}/messages", "group_peek", Action.CONSUME, _group)
    yield row("GET", dead, "dead_letters_list", Action.CONSUME, _group)
    yield row("GET", f"{dead}/{{}}", "dead_letters_get", Action.CONSUME, _group)
    yield row("GET", f"{dead}/redrive", "redrive_get", Action.INSPECT, _group)
    yield row("POST", f"{dead}/redrive", "redrive_start", Action.ADMIN, _group, is_change=True)
    yield row("DELETE", f"{dead}/redrive", "redrive_cancel", Action.ADMIN, _group, is_change=True)
    yield row("POST", f"{dead}/purge", "dead_letters_purge", Action.ADMIN, _group, is_change=True)

    for path, operation in (("cluster", "cluster"), ("replicas", "replicas"), ("replicas/groups", "replica_groups")):
        yield row("GET", f"/v1/admin/{path}", operation, Action.INSPECT, _server)
    yield row("GET", "/v1/admin/log-level", "log_level_get", Action.INSPECT, _server)
    yield row("PUT", "/v1/admin/log-level", "log_level_put", Action.ADMIN, _server, is_change=True)
    yield from _backup_rows()


def _backup_rows() -> Iterator[tuple[str, str, Access]]:
    """A backup contains every message, and the secret of the data folder."""
    path = "/v1/admin/backup"
    for method, operation in (("POST", "backup_start"), ("DELETE", "backup_delete")):
        yield method, path, Access(operation, Action.ADMIN, _server, is_change=True)
    yield "GET", path, Access("backup_get", Action.ADMIN, _server)
    yield "GET", f"{path}/archive", Access("backup_read", Action.ADMIN, _server, is_change=True)


TABLE: Mapping[tuple[str, str], Access] = MappingProxyType({(method, path): access for method, path, access in _rows()})
"""What each operation needs, by its method and its path, with {} in place of each parameter."""

ACCESS = PathTree((method, path, access) for (method, path), access in TABLE.items())
