"""Defines header filters, which select the messages that a pop wants.

Pure. A filter names headers with their allowed values. A message passes if every named header has an allowed value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from popgate.domain.message import HeaderValue

FILTER_HEADERS_MAX = 16
FILTER_VALUES_MAX = 64

FilterValue = str | int | float | bool | None
Comparable = tuple[bool, FilterValue]
"""A header's value, and whether it is a bool, so that 1 equals 1.0, but equals neither "1" nor true."""
ABSENT: Comparable = (False, None)
"""The value of a header that is absent or null."""
OTHER: Comparable = (True, None)
"""The value of a header that no filter can name: bytes, a list, a map or a timestamp."""


@dataclass(frozen=True, slots=True)
class HeaderFilter:
    """A header filter. Calling it returns whether a message's headers pass. Filters with the same criteria are
    equal."""

    wanted: tuple[tuple[str, frozenset[Comparable]], ...]
    """Each header with its allowed values, sorted by header name."""

    def __call__(self, headers: Mapping[str, HeaderValue]) -> bool:
        return all(comparable(headers.get(name)) in values for name, values in self.wanted)


def header_filter(wanted: Mapping[str, Sequence[FilterValue]]) -> HeaderFilter:
    """Return the filter for these headers and values. The value None allows a header that is absent or null."""
    return HeaderFilter(tuple((name, frozenset(map(comparable, wanted[name]))) for name in sorted(wanted)))


def comparable(value: HeaderValue) -> Comparable:
    """Return a header's value in the form in which filters compare it."""
    return (isinstance(value, bool), value) if isinstance(value, str | int | float | bool | None) else OTHER
