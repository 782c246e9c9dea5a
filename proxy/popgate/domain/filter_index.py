"""Finds the filters that a message may pass, without testing every filter.

Pure. Theory of operation. A message passes a filter only if every header that the filter names has an allowed value.
So the index chooses *one* of these headers, and the filter needs to be tested only if the message has an allowed value
for the chosen header. Each filter is indexed once for each allowed value of this header. The index chooses the header
whose allowed values have the fewest filters so far. It chooses a header that may be absent only if all headers of the
filter may be absent, because the absence of each such header has to be looked up for every message.

Messages that differ only in headers that no filter names pass the same filters; ``facts`` returns the same value for
such messages.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from popgate.domain.filters import ABSENT, Comparable, HeaderFilter, comparable
from popgate.domain.message import HeaderValue

Facts = frozenset[tuple[str, Comparable]]


class FilterIndex:
    """A set of filters, indexed by header values."""

    def __init__(self) -> None:
        self._headers: dict[HeaderFilter, tuple[str, frozenset[Comparable]]] = {}
        """The header under which each filter is indexed, with the header's allowed values."""
        self._standing: dict[tuple[str, Comparable], dict[HeaderFilter, None]] = {}
        self._named: Counter[str] = Counter()
        """Number of filters that name each header."""
        self._optional: Counter[str] = Counter()
        """Number of filters indexed under the absence of each header."""

    def __len__(self) -> int:
        return len(self._headers)

    def add(self, one: HeaderFilter) -> None:
        """Add a filter that names at least one header and is not in the index."""
        name, values = self._headers[one] = min(one.wanted, key=self._limiter)
        for value in values:
            self._standing.setdefault((name, value), {})[one] = None
        self._named.update(named for named, _ in one.wanted)
        if ABSENT in values:
            self._optional[name] += 1

    def remove(self, one: HeaderFilter) -> None:
        """Remove a filter that is in the index."""
        name, values = self._headers.pop(one)
        for value in values:
            standing = self._standing[name, value]
            del standing[one]
            if not standing:
                del self._standing[name, value]
        for named, _ in one.wanted:
            _count_down(self._named, named)
        if ABSENT in values:
            _count_down(self._optional, name)

    def facts(self, headers: Mapping[str, HeaderValue]) -> Facts:
        """Return the headers that at least one filter names, with their values. Messages with equal facts pass the same
        filters."""
        named = self._named
        return frozenset(
            (name, comparable(value)) for name, value in headers.items() if value is not None and name in named
        )

    def candidates(self, facts: Facts, headers: Mapping[str, HeaderValue]) -> list[list[HeaderFilter]]:
        """Return the filters that a message with ``headers`` may pass, in several lists.

        Each list contains its filters in the order in which they were added. ``facts`` must be the facts of
        ``headers``.
        """
        absent = [(name, ABSENT) for name in self._optional if headers.get(name) is None]
        return [[*standing] for fact in chain(facts, absent) if (standing := self._standing.get(fact))]

    def _limiter(self, header: tuple[str, frozenset[Comparable]]) -> tuple[bool, int]:
        name, values = header
        return ABSENT in values, sum(len(self._standing.get((name, value), ())) for value in values)


def _count_down(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
