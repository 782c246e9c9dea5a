"""Verifies tokens of an OpenID provider: signed JWTs (RFC 7519, RFC 9068), with the precautions of RFC 8725.

What costs little is checked first: size, form, algorithm and key id. The key, and not the token, decides the algorithm.
Of the header, only ``alg``, ``kid`` and ``typ`` are used. Keys and addresses in it (``jwk``, ``jku``, ``x5u``) are
ignored.

Until the signature is verified, a refusal does not say what is wrong. After that, the client has a real token of the
provider, and the refusal says why the token is not accepted here. The reason is also logged, at debug level. A verified
token is remembered by its hash until it expires or a key is withdrawn, so that later requests cost microseconds.

This module needs the extra ``popgate[oidc]``.
"""

import base64
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NoReturn, cast

import jwt

from popgate.auth import credentials
from popgate.auth.credentials import TOKEN_PREFIX
from popgate.auth.key_set import ALGORITHMS, KEY_ID_LENGTH_MAX, ProviderKey
from popgate.auth.provider_keys import ProviderKeys
from popgate.auth.scopes import ScopeRules, TooManyScopes
from popgate.domain.errors import Unauthenticated
from popgate.domain.permissions import Caller, Principal
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock

_log = logging.getLogger(__name__)

TOKEN_BYTES_MAX = 8 * 1024
SKEW_SECONDS = 30.0
"""Maximum seconds by which the provider's clock may be ahead. It does not extend a token: access ends at ``exp``."""
KNOWN_MAX = 4_096
"""Maximum number of verified tokens that are remembered."""
KNOWN_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the remembered tokens together, in bytes. Their grants take about five times as much memory."""
PRINCIPAL_PREFIX = "oidc:"
"""The name of a token's principal begins with this, so it differs from the names in the key file."""
HASH_LENGTH = 16
NAME_LENGTH_MAX = 128

_TOKEN = re.compile(r"([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)")
_NAME = re.compile(rf"[A-Za-z0-9._@:|+/-]{{1,{NAME_LENGTH_MAX}}}")
_TOKEN_ID = re.compile(r"[A-Za-z0-9._~-]{1,64}")
_TYPES = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""Values of ``typ`` in lower case. Others are no access tokens: for example, ``logout+jwt``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """Which tokens are accepted, and what they mean.

    ``name_claim`` is the claim with the name of the principal, and ``scopes_claim`` is the one with its scopes. A claim
    in a claim is named with dots between them: ``realm_access.roles``.
    """

    issuer: str
    audience: str
    name_claim: str = "sub"
    scopes_claim: str = "scope"
    scopes: ScopeRules = field(default_factory=ScopeRules)


class TokenVerifier:
    """Proves callers by tokens that ``keys`` verify."""

    def __init__(self, keys: ProviderKeys, rules: TokenRules, *, clock: Clock | None = None) -> None:
        self._keys = keys
        self._rules = rules
        self._clock = SystemClock() if clock is None else clock
        self._known: dict[bytes, tuple[Caller, int]] = {}
        """Callers and the sizes of their tokens, by the hash of the token."""
        self._known_bytes = 0
        self._known_version = keys.version

    @property
    def version(self) -> int:
        """A number that grows when a key is withdrawn, so that an earlier answer may be wrong."""
        return self._keys.version

    def current(self, caller: Caller) -> Caller | None:
        """Return the caller of a token, which another proxy may have verified, or None if it is no longer valid."""
        thumbprint, _, _ = caller.credential.removeprefix(TOKEN_PREFIX).partition("/")
        return None if _has_expired(caller, self._clock) or self._keys.is_withdrawn(thumbprint) else caller

    async def caller(self, token: str) -> Caller:
        """Return the caller that a token proves.

        Raises: Unauthenticated. RetryLater if the provider's keys are not known.
        """
        if len(token) > TOKEN_BYTES_MAX or not token.isascii():
            _refuse("the token is too long, or not ASCII")
        hashed = sha256(token.encode()).digest()
        if self._known_version != self._keys.version:
            self._known_version = self._keys.version
            self._known.clear()
            self._known_bytes = 0
        known, _ = self._known.get(hashed, (None, 0))
        if known is not None:
            if not _has_expired(known, self._clock):
                return known
            self._forget(hashed)
        key = await self._key_of(token)
        caller = self._caller_in(_verified(token, key, self._rules), hashed, key)
        self._remember(hashed, caller, len(token))
        return caller

    def _remember(self, hashed: bytes, caller: Caller, size: int) -> None:
        if hashed in self._known:  # verified for another request in the meantime
            return
        while self._known and (len(self._known) >= KNOWN_MAX or self._known_bytes + size > KNOWN_BYTES_MAX):
            self._forget(next(iter(self._known)))
        self._known[hashed] = caller, size
        self._known_bytes += size

    def _forget(self, hashed: bytes) -> None:
        _, size = self._known.pop(hashed)
        self._known_bytes -= size

    async def _key_of(self, token: str) -> ProviderKey:
        """Return the key that the header of a token names. Raises: Unauthenticated, RetryLater."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            _refuse("the token does not have the form of a JWT")
        header = _json_in(match[1])
        algorithm, id, kind = header.get("alg"), header.get("kid"), header.get("typ", "jwt")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            _refuse("the algorithm is not RS256, ES256 or EdDSA")
        if not isinstance(id, str) or not 0 < len(id) <= KEY_ID_LENGTH_MAX:
            _refuse("the token names no key")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            _refuse("the type of the token is not that of an access token")
        if "crit" in header:
            _refuse("the token has extensions that must be understood")
        # Otherwise another spelling of the same signature would be another valid token.
        if _spelled(_decoded(match[2])) != match[2]:
            _refuse("the signature is not encoded canonically")
        key = await self._keys.key(id, algorithm)
        if key is None:
            _refuse("the provider has no such key for this algorithm")
        return key

    def _caller_in(self, claims: Mapping[str, object], hashed: bytes, key: ProviderKey) -> Caller:
        """Return the caller that the claims of a verified token describe. Raises: Unauthenticated."""
        now = self._clock.wall()
        expires_at = _time_in(claims, "exp")
        if expires_at is None or now >= expires_at:
            _refuse("the token has expired", is_verified=True)
        for claim in ("nbf", "iat"):
            if (_time_in(claims, claim) or 0.0) > now + SKEW_SECONDS:
                _refuse("the token is not valid yet", is_verified=True)
        if "cnf" in claims:
            _refuse("the token is bound to a key of the client, which popgate does not support", is_verified=True)
        name = _claim_in(claims, self._rules.name_claim)
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            _refuse(
                f"the claim {self._rules.name_claim!r} of the token must be a name: 1 to {NAME_LENGTH_MAX} of A-Z, "
                "a-z, 0-9 and ._@:|+/-",
                is_verified=True,
            )
        try:
            grants = self._rules.scopes.grants(_claim_in(claims, self._rules.scopes_claim))
        except TooManyScopes:
            _refuse("the token has more scopes than popgate accepts; use patterns", is_verified=True)
        id = claims.get("jti")
        if not isinstance(id, str) or _TOKEN_ID.fullmatch(id) is None:
            id = hashed.hex()[:HASH_LENGTH]
        return Caller(
            principal=Principal(name=PRINCIPAL_PREFIX + name, grants=grants),
            credential=f"{TOKEN_PREFIX}{key.thumbprint}/{id}",
            expires_at=expires_at,
        )


_conforms: type[credentials.TokenVerifier] = TokenVerifier


def _verified(token: str, key: ProviderKey, rules: TokenRules) -> dict[str, Any]:
    """Return the claims of a token with a right signature, issuer and audience. Raises: Unauthenticated."""
    try:
        return jwt.decode(
            token,
            key.public_key,
            algorithms=[key.algorithm],
            audience=rules.audience,
            issuer=rules.issuer,
            options={
                "require": ["exp", "iss", "aud"],
                # the caller checks times, by its clock, and the other claims
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
                "verify_sub": False,
                "verify_jti": False,
            },
        )
    except jwt.MissingRequiredClaimError as error:
        _refuse(f"the token has no claim {error.claim!r}", is_verified=True)
    except (jwt.InvalidAudienceError, jwt.InvalidIssuerError):
        _refuse("the issuer or the audience of the token is not that of this server", is_verified=True)
    except (jwt.PyJWTError, ValueError, RecursionError):
        _refuse("the signature is wrong, or the claims are not JSON")


def _refuse(reason: str, *, is_verified: bool = False) -> NoReturn:
    """Raise Unauthenticated, which tells the reason only if the signature of the token is verified."""
    _log.debug("a token was refused", extra={"reason": reason})
    raise Unauthenticated(reason if is_verified else "the token is not valid")


def _json_in(part: str) -> dict[str, object]:
    try:
        table: object = json.loads(_decoded(part))
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        _refuse("the header of the token is not a JSON object")
    return cast("dict[str, object]", table)


def _decoded(part: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except ValueError:
        _refuse("a part of the token is not encoded in base64url")


def _spelled(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _time_in(claims: Mapping[str, object], claim: str) -> float | None:
    """Return a time in Unix seconds, or None if the claim is missing. Raises: Unauthenticated if it is no time."""
    value = claims.get(claim)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 and math.isfinite(value):
        return float(value)
    _refuse(f"the claim {claim!r} of the token is not a time", is_verified=True)


def _claim_in(claims: Mapping[str, object], name: str) -> object:
    """Return the claim of this name, or None. If no claim has the name, dots in it separate claims in claims."""
    if name in claims:
        return claims[name]
    value: object = claims
    for part in name.split("."):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, dict) else None
    return value


def _has_expired(caller: Caller, clock: Clock) -> bool:
    return caller.expires_at is not None and clock.wall() >= caller.expires_at
