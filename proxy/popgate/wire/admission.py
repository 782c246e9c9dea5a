"""Defines how a proxy authenticates to another over HTTP: the path, the headers reserved for peers, and the token.

The token is derived from the secret that all proxies of a cluster share. It proves that the sender is one of these
proxies, but not which one. It does not protect against anyone who can read the network between the proxies.
"""

import hmac
from collections.abc import Mapping

PEERS_PATH = "/v1/peers"
CONTENT_TYPE = b"application/msgpack"

RESERVED_PREFIX = b"popgate-"
"""Prefix of headers that are reserved for peers. If a client sends such a header, it is never forwarded."""
TOKEN = b"popgate-peer-token"
"""The header of the token. It is not ``authorization``, because a forwarded request carries its client's
``authorization``."""
TO = b"popgate-to"
"""The header of the receiving instance, which the address does not identify: a later instance may have the same
address."""
PASSED_BY = b"popgate-passed-by"
ARRIVALS = b"popgate-arrivals"
WAIT_SECONDS = b"popgate-wait-seconds"
CLIENT_ID = b"popgate-client-id"
"""The header of a forwarded pop's client id. The client id is not in the body, because an earlier release would refuse
an unknown field, but ignores an unknown header."""

NOT_A_PEER = "not_a_peer"
WRONG_INSTANCE = "wrong_instance"
REFUSALS = {NOT_A_PEER: 401, WRONG_INSTANCE: 421}
"""The codes, with their HTTP status, of the problems for which a peer refuses a request before it does anything."""

_PURPOSE = b"popgate peers 1"


def peer_token(secret: bytes) -> bytes:
    """Return the token of all proxies that have this secret."""
    return hmac.digest(secret, _PURPOSE, "sha256").hex().encode()


def is_peer(headers: Mapping[bytes, bytes], token: bytes) -> bool:
    """Return whether a request with these headers is from a proxy with the same secret.

    The comparison takes the same time for all wrong tokens.
    """
    return hmac.compare_digest(headers.get(TOKEN, b""), token)
