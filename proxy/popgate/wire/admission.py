"""What one proxy shows another over HTTP: the path, the headers that only peers may send, and the token.

The token is derived from the secret that all proxies of a cluster share. It says that the bearer is one of them, not
which one; it is no protection against who can read the network between them.
"""

import hmac
from collections.abc import Mapping

PEERS_PATH = "/v1/peers"
CONTENT_TYPE = b"application/msgpack"

RESERVED_PREFIX = b"popgate-"
"""Headers that begin so are the peers' own: those of a client are never passed on."""
TOKEN = b"popgate-peer-token"
"""Not ``authorization``: a request that is passed on brings its client's own."""
TO = b"popgate-to"
"""The instance that is meant: behind the same address may be a later one."""
PASSED_BY = b"popgate-passed-by"
ARRIVALS = b"popgate-arrivals"
WAIT_SECONDS = b"popgate-wait-seconds"
CLIENT_ID = b"popgate-client-id"
"""Of a pop that is passed on. Not in its body: an earlier release would refuse a field that it does not know, and does
not mind a header."""

NOT_A_PEER = "not_a_peer"
WRONG_INSTANCE = "wrong_instance"
REFUSALS = {NOT_A_PEER: 401, WRONG_INSTANCE: 421}
"""The codes, and the status, of problems that a peer's face answers with before anything was done."""

_PURPOSE = b"popgate peers 1"


def peer_token(secret: bytes) -> bytes:
    """The token of all proxies that have this secret."""
    return hmac.digest(secret, _PURPOSE, "sha256").hex().encode()


def is_peer(headers: Mapping[bytes, bytes], token: bytes) -> bool:
    """Whether a request with these headers comes from a proxy that has the same secret. Takes the same time for all
    wrong tokens."""
    return hmac.compare_digest(headers.get(TOKEN, b""), token)
