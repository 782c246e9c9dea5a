"""Defines how proxies authenticate to each other over HTTP: the path, the reserved headers, and the token.

The token is derived from the secret that all proxies of a cluster share. It proves that the sender is one of these
proxies, but not which one. It does not protect against an attacker who can read the network traffic between the
proxies.
"""

import hmac
from collections.abc import Mapping

PEERS_PATH = "/v1/peers"
CONTENT_TYPE = b"application/msgpack"

RESERVED_PREFIX = b"popgate-"
"""Prefix of headers that only proxies of the cluster may send. If a client sends such a header, no proxy forwards
it."""
TOKEN = b"popgate-peer-token"
"""Name of the header that contains the token. The header is not ``authorization``, because a forwarded request contains
the ``authorization`` header of its client."""
TO = b"popgate-to"
"""Name of the header that contains the instance id of the receiving proxy. The address of a proxy does not identify its
instance, because a proxy that starts later may have the same address."""
PASSED_BY = b"popgate-passed-by"
ARRIVALS = b"popgate-arrivals"
WAIT_SECONDS = b"popgate-wait-seconds"
CLIENT_ID = b"popgate-client-id"
"""Name of the header that contains the client id of a forwarded pop. The client id is not sent in the body, because an
earlier release of popgate refuses an unknown field, but ignores an unknown header."""

NOT_A_PEER = "not_a_peer"
WRONG_INSTANCE = "wrong_instance"
REFUSALS = {NOT_A_PEER: 401, WRONG_INSTANCE: 421}
"""HTTP status codes, by problem code. If a request has one of these problems, the proxy refuses it without executing
any part of it."""

_PURPOSE = b"popgate peers 1"


def peer_token(secret: bytes) -> bytes:
    """Return the token of the proxies that share ``secret``."""
    return hmac.digest(secret, _PURPOSE, "sha256").hex().encode()


def is_peer(headers: Mapping[bytes, bytes], token: bytes) -> bool:
    """Return whether the token in ``headers`` is ``token``, so that the sender is a proxy of the same cluster.

    The comparison takes the same time for all wrong tokens.
    """
    return hmac.compare_digest(headers.get(TOKEN, b""), token)
