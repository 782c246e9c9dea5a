"""Defines the table of the data plane: which handler answers which method and path, and the arguments of a handler."""

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
    """A request for a handler.

    ``path`` contains the parameters in the path, in order. They begin with the topic and the group, or with the lock.
    ``query`` contains the values in the query that the route reads.

    In a cluster, ``forwarding`` is set if another proxy has forwarded the request. ``scope`` is set if this proxy may
    forward it.
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
    """An answer of unknown length. If ``parts`` raises, the answer must not be ended properly."""

    content_type: tuple[bytes, bytes]
    parts: AsyncGenerator[bytes]


Handler: TypeAlias = Callable[[Call], Awaitable[bytes | ForwardedAnswer | Streamed]]
"""Returns the encoded body of a 200, another proxy's whole answer, or the parts of an answer."""


class Route(NamedTuple):
    """One row of the table. ``operation`` is its name in the metrics. ``template`` is a path with {} for each
    parameter.

    ``query`` lists the names that are read in the query. If it is None, the query is ignored.
    """

    operation: str
    method: str
    template: str
    handler: Handler
    query: tuple[str, ...] | None = ()


class _Node:
    """The routes that share a beginning of a path, by its next part. The key None stands for a parameter."""

    __slots__ = ("below", "routes")

    def __init__(self) -> None:
        self.below: dict[str | None, _Node] = {}
        self.routes: dict[str, Route] = {}


class Routes:
    """The table, as a tree of the parts of the paths. A literal part takes precedence over a parameter."""

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
