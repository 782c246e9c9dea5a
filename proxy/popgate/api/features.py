"""Hides disabled features of a server, so that it looks like an older version to clients.

This module wraps the whole HTTP interface, but only if a feature is disabled. A request that uses a disabled feature is
answered as if the server had never supported the feature: the feature's paths and fields are unknown, and its content
type is not supported. Requests that other proxies forward are not affected.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from popgate.api.body import ClientGone, read_body
from popgate.api.complaints import unknown_field
from popgate.api.formats import JSON, MSGPACK_TYPES, media_type
from popgate.api.problems import NotFound, UnsupportedMediaType, problem_answer
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.api.scope_keys import forwarding_of
from popgate.domain.errors import PopgateError
from popgate.domain.features import ALL_FEATURES, Feature

_TOPIC = "/v1/topics/[^/]+"
_GROUP = f"{_TOPIC}/groups/[^/]+"
_ADMIN_GROUP = "/v1/admin/topics/[^/]+/groups/[^/]+"
PATHS: Mapping[Feature, str] = {
    Feature.POP: f"{_GROUP}/(pop|ack|release|extend)",
    Feature.PULL: f"{_GROUP}/(assignment|queues)(/.*)?",
    Feature.LEASE_GROUPS: f"{_GROUP}/lease-groups(/.*)?",
    Feature.DEAD_LETTERS: f"{_ADMIN_GROUP}/dead-letters(/.*)?",
    Feature.EXPLAIN: f"{_ADMIN_GROUP}/(explain|messages)|/v1/admin/topics/[^/]+/messages(/.*)?",
    Feature.PURGE: f"{_ADMIN_GROUP}/purge",
    Feature.PAUSE: f"{_ADMIN_GROUP}/(pause|resume)",
    Feature.CONSUME_MODE: f"{_ADMIN_GROUP}/consume-mode",
    Feature.LOCKS: "/v1/locks(/.*)?",
    Feature.MIN_REPLICAS: "/v1/admin/replicas/groups",
}
FIELDS: Mapping[Feature, tuple[str, ...]] = {
    Feature.ATTEMPT_ID: (f"{_GROUP}/pop", "attempt_id"),
    Feature.CLIENT_ID: (f"{_GROUP}/pop", "client_id"),
    Feature.FILTER: (f"{_GROUP}/pop", "filter"),
    Feature.CAUSES: (f"{_GROUP}/(release|reject)", "error", "client_id"),
    Feature.SETTLE_ON_POP: (f"{_GROUP}/pop", "ack", "release", "extend", "reject"),
    Feature.ORDERING: (f"{_TOPIC}/messages", "ordering_key"),
    Feature.DELAY: (f"{_TOPIC}/messages", "delay_seconds"),
    Feature.TTL: (f"{_TOPIC}/messages", "ttl_seconds"),
    Feature.DEDUP: (f"{_TOPIC}/messages", "dedup_id"),
    Feature.RETRY: (_ADMIN_GROUP, "retry"),
    Feature.MAX_IN_FLIGHT: (_ADMIN_GROUP, "max_in_flight"),
    Feature.MAX_LEASE_SECONDS: (_ADMIN_GROUP, "max_lease_seconds"),
    Feature.MIN_REPLICAS: (_ADMIN_GROUP, "min_replicas"),
    Feature.PAUSE: (_ADMIN_GROUP, "paused"),
}
"""For each feature that adds fields to requests: a pattern of the path, and the names of the fields. In publish
requests, each message has these fields, and in settlements, each entry."""


class FeatureFilter:
    """Serves ``app`` to clients, but refuses requests that use a feature which is not in ``offered``."""

    def __init__(self, app: ASGIApp, offered: Collection[Feature]) -> None:
        off = [feature for feature in ALL_FEATURES if feature not in offered]
        self._app = app
        self._paths = [re.compile(PATHS[feature]) for feature in off if feature in PATHS]
        self._fields = [(re.compile(path), names) for path, *names in (FIELDS[one] for one in off if one in FIELDS)]
        self._packs = Feature.MSGPACK in offered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"]) if scope["type"] == "http" else {}
        if scope["type"] == "http" and forwarding_of(scope) is None:
            try:
                scope, receive = await self._as_before(scope, headers, receive)
            except ClientGone:
                return
            except PopgateError as error:
                status, answer_headers, body = problem_answer(error)
                await send({"type": "http.response.start", "status": status, "headers": answer_headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)

    async def _as_before(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> tuple[Scope, Receive]:
        """Return the request if it uses no disabled feature. Otherwise raise the error with which the client is
        answered. Raises: PopgateError."""
        path: str = scope["path"]
        if any(pattern.fullmatch(path) for pattern in self._paths):
            raise NotFound(path)
        packed = media_type(headers.get(b"content-type", b"")) in MSGPACK_TYPES
        if not self._packs:
            if packed:
                raise UnsupportedMediaType(f"this server reads {JSON}")
            scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != b"accept"]}
        names = {name for pattern, names in self._fields if pattern.fullmatch(path) for name in names}
        if names and scope["method"] in ("POST", "PUT"):
            body = await read_body(receive, headers, REQUEST_BYTES_MAX)
            for field in _fields_of(body, packed=packed):
                if field.rpartition(".")[2] in names:
                    raise unknown_field(field)
            receive = _replayed(body, receive)
        return scope, receive


def _fields_of(body: bytes, *, packed: bool) -> Iterator[str]:
    """Yield the names of the fields of a request, and of its messages or entries.

    Yield nothing for an unreadable body, because ``app`` reports the error.
    """
    try:
        request: Any = (msgspec.msgpack if packed else msgspec.json).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(request, dict):
        return
    fields = cast("dict[object, object]", request)
    yield from (str(name) for name in fields)
    for listed in ("messages", "entries"):
        many = fields.get(listed)
        for place, one in enumerate(cast("list[object]", many) if isinstance(many, list) else ()):
            if isinstance(one, dict):
                yield from (f"{listed}[{place}].{name}" for name in cast("dict[object, object]", one))


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
