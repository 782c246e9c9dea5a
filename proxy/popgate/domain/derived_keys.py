"""Derives separate keys from one secret, with HKDF-SHA256 (RFC 5869).

Each purpose has its own key. So a key that is used for one purpose says nothing about the secret or about other keys.
"""

from hashlib import sha256
from hmac import digest

HASH = "sha256"
HASH_BYTES = sha256().digest_size
LENGTH_MAX = 255 * HASH_BYTES
"""Maximum length of a derived key, in bytes."""
KEY_ID_BYTES = 4


def derived_key(secret: bytes, purpose: str, length: int = HASH_BYTES) -> bytes:
    """Return the key of ``length`` bytes for one purpose. The same arguments always give the same key.

    The secret must have enough entropy: the derivation is fast, so it does not protect a password that can be guessed.
    """
    return expand(extract(b"", secret), purpose.encode(), length)


def key_id(secret: bytes) -> bytes:
    """Return the public name of a secret: handles and tags carry it, so that a proxy can choose the right secret."""
    return derived_key(secret, "popgate key id", KEY_ID_BYTES)


def extract(salt: bytes, secret: bytes) -> bytes:
    """Return the pseudorandom key of HKDF-Extract. An empty salt stands for zeros, as the RFC says."""
    return digest(salt or bytes(HASH_BYTES), secret, HASH)


def expand(pseudorandom_key: bytes, info: bytes, length: int) -> bytes:
    """Return ``length`` bytes of HKDF-Expand. Raises: ValueError if they are too many."""
    if not 0 < length <= LENGTH_MAX:
        raise ValueError(f"a derived key has from 1 to {LENGTH_MAX} bytes, not {length}")
    block, key = b"", b""
    for number in range(1, -(-length // HASH_BYTES) + 1):
        block = digest(pseudorandom_key, block + info + bytes((number,)), HASH)
        key += block
    return key[:length]
