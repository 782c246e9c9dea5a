"""Filters on headers: which messages a pop wants.

Pure. A filter names headers and the values that each may have; a message must have one of them for every header named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from popgate.domain.message import HeaderValue

FILTER_HEADERS_MAX = 16
FILTER_VALUES_MAX = 64

FilterValue = str | int | float | bool | None
Comparable = tuple[bool, FilterValue]
"""A value together with its kind: neither "1" nor true is 1, but 1.0 is."""
ABSENT: Comparable = (False, None)
"""The value of a header that is absent or null."""
OTHER: Comparable = (True, None)
"""The value of a header that no filter can name: bytes, a list, a map, a time."""


@dataclass(frozen=True, slots=True)
class HeaderFilter:
    """Call it to learn whether a message's headers pass. Filters that want the same are equal."""

    wanted: tuple[tuple[str, frozenset[Comparable]], ...]
    """Each header with its allowed values, in the order of their names."""

    def __call__(self, headers: Mapping[str, HeaderValue]) -> bool:
        return all(comparable(headers.get(name)) in values for name, values in self.wanted)


def header_filter(wanted: Mapping[str, Sequence[FilterValue]]) -> HeaderFilter:
    """Return the filter for these headers and values. None stands for a header that is absent or null."""
    return HeaderFilter(tuple((name, frozenset(map(comparable, wanted[name]))) for name in sorted(wanted)))


def comparable(value: HeaderValue) -> Comparable:
    """Return a header's value as filters compare it."""
    return (isinstance(value, bool), value) if isinstance(value, str | int | float | bool | None) else OTHER
