"""Finds the row of a table for the method and the path of a request."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Generic, TypeVar

from popgate.api.problems import MethodNotAllowed, NotFound

T = TypeVar("T")

REMEMBERED_MAX = 1024
"""Maximum number of paths whose rows are remembered."""
REMEMBERED_LENGTH_MAX = 256
"""Longer paths are not remembered, so that those of a hostile client don't take much memory."""

TOPIC = "/v1/topics/{}"
GROUP = "/v1/topics/{}/groups/{}"
LOCKS = "/v1/locks"


class _Node(Generic[T]):
    """The rows whose paths begin with the same parts. ``below`` contains the longer paths by their next part; the key
    None stands for a parameter."""

    __slots__ = ("below", "rows")

    def __init__(self) -> None:
        self.below: dict[str | None, _Node[T]] = {}
        self.rows: dict[str, T] = {}


class PathTree(Generic[T]):
    """A table of rows by method and path template, as a tree of path segments. A literal segment takes precedence over
    a parameter."""

    def __init__(self, rows: Iterable[tuple[str, str, T]]) -> None:
        self._root: _Node[T] = _Node()
        for method, template, row in rows:
            node = self._root
            for part in template.split("/"):
                node = node.below.setdefault(None if part == "{}" else part, _Node())
            node.rows[method] = row
        self._remembered = lru_cache(REMEMBERED_MAX)(self._find)

    def find(self, method: str, path: str) -> tuple[T, tuple[str, ...]]:
        """Return the row of a request, and the parameters in its path. Raises: NotFound, MethodNotAllowed."""
        return (self._remembered if len(path) <= REMEMBERED_LENGTH_MAX else self._find)(method, path)

    def _find(self, method: str, path: str) -> tuple[T, tuple[str, ...]]:
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
        row = node.rows.get(method)
        if row is None:
            if not node.rows:
                raise NotFound(path)
            raise MethodNotAllowed(", ".join(sorted(node.rows)))
        return row, tuple(found)
