"""Defines the routing table of the data plane, which maps a method and a path to a handler, and the arguments of a
handler."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from starlette.types import Scope

from popgate.api.connection import Connection
from popgate.api.formats import Format
from popgate.api.peers import Forwarding
from popgate.api.problems import MethodNotAllowed, NotFound
from popgate.ports.peers import ForwardedAnswer

TOPIC = "/v1/topics/{}"
GROUP = "/v1/topics/{}/groups/{}"
LOCKS = "/v1/locks"


class Call(NamedTuple):
    """A request, as its handler receives it.

    ``path`` contains the values of the parameters in the path, in order: first the topic and the group (if the path
    contains one), or the lock. ``query`` contains the values in the query that the route reads.

    In a cluster, ``forwarding`` is set if another proxy has forwarded the request. ``scope`` is set if this proxy may
    forward the request.
    """

    path: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes
    form: Format
    connection: Connection | None
    forwarding: Forwarding | None = None
    scope: Scope | None = None


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer of unknown length, which is sent part by part. If ``parts`` raises, the answer must not be ended
    properly, so that the client notices the interruption."""

    content_type: tuple[bytes, bytes]
    parts: AsyncGenerator[bytes]


Handler: TypeAlias = Callable[[Call], Awaitable[bytes | ForwardedAnswer | Streamed]]
"""Returns the encoded body of an answer with status 200, another proxy's whole answer, or the parts of an answer."""


class Route(NamedTuple):
    """One row of the routing table. ``operation`` is the name of the route in the metrics. ``template`` is the path,
    with {} in place of each parameter.

    ``query`` lists the permitted names in the query. If ``query`` is None, the query of a request is ignored.
    """

    operation: str
    method: str
    template: str
    handler: Handler
    query: tuple[str, ...] | None = ()


class _Node:
    """The routes whose paths begin with the same parts. ``below`` contains the longer paths by their next part; the key
    None stands for a parameter."""

    __slots__ = ("below", "routes")

    def __init__(self) -> None:
        self.below: dict[str | None, _Node] = {}
        self.routes: dict[str, Route] = {}


class Routes:
    """The routing table, as a tree of path segments. A literal segment takes precedence over a parameter."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in route.template.split("/"):
                node = node.below.setdefault(None if part == "{}" else part, _Node())
            node.routes[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        """Return the route of a request, and the parameters in its path. Raises: NotFound, MethodNotAllowed."""
        node = self._root
        found: list[str] = []
        for part in path.split("/"):
            below = node.below.get(part)
            if below is None:
                below = node.below.get(None)
                found.append(part)
            if below is None:
                raise NotFound(path)
            node = below
        route = node.routes.get(method)
        if route is None:
            if not node.routes:
                raise NotFound(path)
            raise MethodNotAllowed(", ".join(sorted(node.routes)))
        return route, tuple(found)
