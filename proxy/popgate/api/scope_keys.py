"""Names the entries that popgate adds to the scope of a request, for the parts of the HTTP interface."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from popgate.domain.names import ClientId, InstanceId
from popgate.domain.permissions import Caller

CALLER = "popgate.caller"
"""The ``Caller`` of the request. Missing if this proxy does not authenticate callers."""
PROVE_CALLER = "popgate.prove_caller"
"""A function that returns the ``Caller`` of a public operation, or None if the caller is not known. Missing if this
proxy does not authenticate callers. The operation calls it only if the caller matters: a health check must not wait for
an OpenID provider."""
VISIT = "popgate.visit"
"""The ``Visit`` of the request, if this proxy authenticates callers."""
FORWARDING = "popgate.forwarding"
"""The ``Forwarding`` of a request that another proxy has forwarded. Only the socket for peers sets it."""


class Forwarding(NamedTuple):
    """Describes how another proxy, ``by``, forwarded a client's request. This proxy answers the request, and does not
    forward it again.

    ``wait_seconds`` overrides the request's own value, unless it is None. ``client_id`` is the client of a pop, or
    None.
    """

    by: InstanceId
    wait_seconds: float | None
    client_id: ClientId | None = None


def caller_of(scope: Mapping[str, Any]) -> Caller | None:
    caller: Caller | None = scope.get(CALLER)
    return caller


def forwarding_of(scope: Mapping[str, Any]) -> Forwarding | None:
    """Return how another proxy forwarded the request, or None for a client's request."""
    forwarding: Forwarding | None = scope.get(FORWARDING)
    return forwarding
