"""Defines how proxies name each other: the path, the reserved headers, and the names in their certificates.

Proxies talk only over TLS with certificates on both sides. The authorities of the certificates are derived from the
secret that all proxies of a cluster share, so a certificate proves which proxy its owner is.
"""

from collections.abc import Iterable

from popgate.domain.names import InstanceId

PEERS_PATH = "/v1/peers"
TRACES_PATH = "/v1/peers/traces"
"""The path at which proxies with tracing ask each other for the trace contexts of leases."""
PEER_PATHS = frozenset({PEERS_PATH, TRACES_PATH})
"""The paths of requests that proxies make themselves. All others are those of clients' requests, forwarded."""
CONTENT_TYPE = b"application/msgpack"

RESERVED_PREFIX = b"popgate-"
"""Prefix of headers that only proxies of the cluster may send. If a client sends such a header, no proxy forwards
it."""
TO = b"popgate-to"
"""Name of the header that contains the instance id of the receiving proxy. The address of a proxy does not identify its
instance, because a proxy that starts later may have the same address."""
PASSED_BY = b"popgate-passed-by"
ARRIVALS = b"popgate-arrivals"
WAITED_SECONDS = b"popgate-waited-seconds"
"""Name of the header that contains how long the first message of the answer to a forwarded pop had waited. A proxy
sends it while its own clients take messages of the same subscription."""
WAIT_SECONDS = b"popgate-wait-seconds"
CLIENT_ID = b"popgate-client-id"
"""Name of the header that contains the client id of a forwarded pop. The client id is not sent in the body, because an
earlier release of popgate refuses an unknown field, but ignores an unknown header."""
CALLER = b"popgate-caller"
"""Name of the header that contains the caller of a forwarded request (``wire.callers``)."""

REQUEST_ID = b"x-request-id"
"""Name of the header that contains the id of a client's request, also in the requests that proxies make for it."""

NOT_A_PEER = "not_a_peer"
WRONG_INSTANCE = "wrong_instance"
REFUSALS = {NOT_A_PEER: 401, WRONG_INSTANCE: 421}
"""HTTP status codes, by problem code. If a request has one of these problems, the proxy refuses it without executing
any part of it."""

INSTANCE_PREFIX = "popgate:instance:"
"""Prefix of the URI (subject alternative name) by which a proxy's certificate names its instance."""


def instance_uri(instance: InstanceId) -> str:
    return INSTANCE_PREFIX + instance


def instance_in(names: Iterable[str]) -> InstanceId | None:
    """Return the instance that a certificate names, or None. ``names`` are its subject alternative names."""
    named = [name.removeprefix(INSTANCE_PREFIX) for name in names if name.startswith(INSTANCE_PREFIX)]
    return InstanceId(named[0]) if len(named) == 1 and named[0] else None
