"""Filters on headers: which messages a pop wants.

Pure. A filter names headers and the values that each may have; a message must have one of them for every header named.
"""

from collections.abc import Callable, Mapping, Sequence

from popgate.domain.message import HeaderValue

FILTER_HEADERS_MAX = 16
FILTER_VALUES_MAX = 64

FilterValue = str | int | float | bool | None
Matches = Callable[[Mapping[str, HeaderValue]], bool]


def header_filter(wanted: Mapping[str, Sequence[FilterValue]]) -> Matches:
    """A function that says whether a message's headers pass. None stands for a header that is absent or null.

    Values are compared by kind as well: neither "1" nor true is 1, but 1.0 is.
    """
    allowed = [(name, frozenset(_comparable(value) for value in values)) for name, values in wanted.items()]

    def matches(headers: Mapping[str, HeaderValue]) -> bool:
        for name, values in allowed:
            value = headers.get(name)
            if not isinstance(value, str | int | float | bool | None) or _comparable(value) not in values:
                return False
        return True

    return matches


def _comparable(value: FilterValue) -> tuple[bool, FilterValue]:
    return isinstance(value, bool), value
