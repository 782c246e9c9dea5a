"""Checks the method, the query and the whole numbers of a data plane request."""

from urllib.parse import parse_qsl

from popgate.api.complaints import QUOTED_LENGTH_MAX
from popgate.api.problems import MethodNotAllowed
from popgate.domain.errors import InvalidRequest


def allow(method: str, *allowed: str) -> None:
    """Check that the method is allowed. Raises: MethodNotAllowed."""
    if method not in allowed:
        raise MethodNotAllowed(", ".join(allowed))


def query_values(query: bytes, *known: str) -> dict[str, str]:
    """Return the query's values by name. Raises: InvalidRequest if a name is not in ``known``, or is repeated."""
    found: dict[str, str] = {}
    if not query:
        return found
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        shown = name[:QUOTED_LENGTH_MAX]
        if name not in known:
            remedy = f"only {known[0]} is" if known else "send it in the body"
            raise InvalidRequest(f"{shown!r} is in the query, which is not read here; {remedy}", field=shown)
        if name in found:
            raise InvalidRequest(f"{shown} occurs twice in the query", field=shown)
        found[name] = value
    return found


def whole(value: float, field: str) -> int:
    """Convert a float without a fraction to an int, because JSON has only one type of number. Raises: InvalidRequest if
    ``value`` has a fraction."""
    if value != int(value):
        raise InvalidRequest(f"{field} must be a whole number", field=field)
    return int(value)
