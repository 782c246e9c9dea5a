"""Reads a set of public keys (JWKS, RFC 7517) of an OpenID provider.

The type of a key alone decides its algorithm, so that a token can't choose one: RSA is RS256, P-256 is ES256, and
Ed25519 is EdDSA. Keys of other types, for encryption, or that can't be read are left out: a provider may publish keys
that popgate does not use. This module needs the extra ``popgate[oidc]``.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWTError
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

KEYS_MAX = 64
"""Maximum number of keys in a set. Those after them are left out."""
KEY_ID_LENGTH_MAX = 255
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 8192
"""Bounds of an RSA key: smaller ones are not safe, and larger ones are slow."""
THUMBPRINT_LENGTH = 16
"""Length of a thumbprint, in characters of 6 bits."""

PublicKey: TypeAlias = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderKey:
    """A key that verifies tokens. ``thumbprint`` identifies the key itself, independent of its id (RFC 7638)."""

    algorithm: str
    public_key: PublicKey
    thumbprint: str


KeySet: TypeAlias = Mapping[tuple[str, str], ProviderKey]
"""Keys by their id and algorithm."""


class KeySetError(ValueError):
    """The content is not a set of keys."""


class _Kind(NamedTuple):
    """How keys of one type are used, and the members that define such a key."""

    algorithm: str
    members: tuple[str, ...]
    curve: str | None
    read: Callable[[Any], Any]


_KINDS: Mapping[object, _Kind] = MappingProxyType(
    {
        "RSA": _Kind("RS256", ("e", "n"), None, RSAAlgorithm.from_jwk),
        "EC": _Kind("ES256", ("crv", "x", "y"), "P-256", ECAlgorithm.from_jwk),
        "OKP": _Kind("EdDSA", ("crv", "x"), "Ed25519", OKPAlgorithm.from_jwk),
    }
)
ALGORITHMS = frozenset(kind.algorithm for kind in _KINDS.values())
"""The algorithms of tokens that popgate accepts."""


def parse_key_set(content: bytes) -> KeySet:
    """Return the usable keys of a set, which may be none. If an id is repeated, the first key counts.

    Raises: KeySetError if the content has another form.
    """
    try:
        document: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise KeySetError("the answer is not JSON") from error
    entries = cast("dict[str, object]", document).get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise KeySetError("the answer has no list of keys")
    keys: dict[tuple[str, str], ProviderKey] = {}
    for entry in cast("list[object]", entries)[:KEYS_MAX]:
        if isinstance(entry, dict):
            table = cast("dict[str, object]", entry)
            key = _parse_key(table)
            id = table.get("kid")
            if key is not None and isinstance(id, str) and 0 < len(id) <= KEY_ID_LENGTH_MAX:
                keys.setdefault((id, key.algorithm), key)
    return keys


def _parse_key(table: Mapping[str, object]) -> ProviderKey | None:
    """Return a key, or None if popgate does not use such keys."""
    kty = table.get("kty")
    kind = _KINDS.get(kty) if isinstance(kty, str) else None
    if kind is None or not _is_for_signatures(table, kind) or table.get("crv") != kind.curve:
        return None
    members = {name: table.get(name) for name in kind.members}
    if not all(isinstance(value, str) for value in members.values()):
        return None
    jwk = {"kty": kty, **members}
    try:
        public_key: object = kind.read(jwk)
    except (PyJWTError, ValueError, TypeError, KeyError, OverflowError):
        return None
    if isinstance(public_key, RSAPublicKey) and not RSA_BITS_MIN <= public_key.key_size <= RSA_BITS_MAX:
        return None
    if not isinstance(public_key, PublicKey):
        return None
    canonical = json.dumps(jwk, sort_keys=True, separators=(",", ":")).encode()
    thumbprint = base64.urlsafe_b64encode(sha256(canonical).digest()).decode()[:THUMBPRINT_LENGTH]
    return ProviderKey(algorithm=kind.algorithm, public_key=public_key, thumbprint=thumbprint)


def _is_for_signatures(table: Mapping[str, object], kind: _Kind) -> bool:
    """Return whether the key is meant for signatures with the algorithm. A published private key is not secret."""
    operations = table.get("key_ops", ["verify"])
    return (
        table.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
        and table.get("alg", kind.algorithm) == kind.algorithm
        and "d" not in table
    )
