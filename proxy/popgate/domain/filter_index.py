"""Finds the filters that a message may pass, without testing all of them.

Pure. Theory of operation. A filter requires one of its allowed values for every header that it names. So it is enough
to test the filter when a message has one of the values that it allows for *one* of these headers. Each filter is
indexed under one header, once for each allowed value: the header whose values have the fewest other filters. A header
that may also be absent is chosen only if the filter names no other kind, because the absence of each such header has to
be looked up for every message.

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
        """The header under which each filter is indexed, with its allowed values."""
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
        """Return all that the filters can see of a message: messages with equal facts pass the same filters."""
        named = self._named
        return frozenset(
            (name, comparable(value)) for name, value in headers.items() if value is not None and name in named
        )

    def candidates(self, facts: Facts, headers: Mapping[str, HeaderValue]) -> list[list[HeaderFilter]]:
        """Return the filters that a message with these headers, and therefore these facts, may pass: in several lists,
        each in the order in which its filters were added."""
        absent = [(name, ABSENT) for name in self._optional if headers.get(name) is None]
        return [[*standing] for fact in chain(facts, absent) if (standing := self._standing.get(fact))]

    def _limiter(self, header: tuple[str, frozenset[Comparable]]) -> tuple[bool, int]:
        name, values = header
        return ABSENT in values, sum(len(self._standing.get((name, value), ())) for value in values)


def _count_down(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
