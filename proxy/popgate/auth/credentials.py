"""Proves who a caller is, by an API key, a token of an OpenID provider, or a client certificate.

This is all that the HTTP interface uses of this package, besides the audit log. It decides nothing about permissions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from popgate.auth.key_file import certificate_name
from popgate.auth.keys import PREFIX
from popgate.auth.watched_keys import WatchedKeys
from popgate.domain.errors import Unauthenticated
from popgate.domain.permissions import Caller
from popgate.ports.clock import Clock
from popgate.runtime.clocks import SystemClock

TOKEN_PREFIX = "token:"
"""The ``Caller.credential`` of a token begins with this."""
CERTIFICATE_PREFIX = "certificate:"
"""The ``Caller.credential`` of a client certificate is this and those of its names that belong to the principal, with
spaces between them."""


class TokenVerifier(Protocol):
    """Verifies tokens of an OpenID provider."""

    @property
    def version(self) -> int:
        """Return a number that grows when a token that was valid may have become invalid, although it has not expired:
        for example, when the provider withdraws a key."""
        ...

    async def caller(self, token: str) -> Caller:
        """Return the caller that a token proves. Its ``credential`` begins with ``TOKEN_PREFIX``.

        Raises: Unauthenticated, without the token in its text. RetryLater if the provider can't be reached.
        """
        ...

    def current(self, caller: Caller) -> Caller | None:
        """Return the caller of a token, which another proxy may have verified, or None if it is no longer valid."""
        ...


class Credentials:
    """Knows the callers with keys and certificates in ``keys``, and with tokens that ``tokens`` accepts."""

    def __init__(self, keys: WatchedKeys | None, tokens: TokenVerifier | None, *, clock: Clock | None = None) -> None:
        assert keys is not None or tokens is not None, "without credentials, there is no authentication"
        self._keys = keys
        self._tokens = tokens
        self._clock = SystemClock() if clock is None else clock

    @property
    def version(self) -> int:
        """A number that grows with every change after which an earlier answer of this object may be wrong.

        Exception: it does not grow when a credential expires. ``Caller.expires_at`` says when this happens.
        """
        return (0 if self._keys is None else self._keys.version) + (0 if self._tokens is None else self._tokens.version)

    async def caller(self, token: str) -> Caller:
        """Return the caller that an API key or a token proves. Raises: Unauthenticated, RetryLater."""
        if token.startswith(PREFIX):
            caller = None if self._keys is None else self._keys.caller_by_key(token)
        else:
            caller = None if self._tokens is None else await self._tokens.caller(token)
            if caller is not None and not caller.credential.startswith(TOKEN_PREFIX):
                caller = replace(caller, credential=TOKEN_PREFIX + caller.credential)
        if caller is None:
            raise Unauthenticated("the key or token is not valid")
        return caller

    def caller_by_certificate(self, names: Sequence[str], expires_at: float) -> Caller:
        """Return the caller that a verified client certificate proves.

        ``names`` are the subject alternative names in the certificate. ``expires_at`` is in Unix seconds. Raises:
        Unauthenticated, also if the names belong to more than one principal.
        """
        found = [] if self._keys is None else self._keys.principals_by_certificate(names)
        if expires_at <= self._clock.wall() or len({principal.name for _, principal in found}) != 1:
            raise Unauthenticated("the client certificate names no principal; give a key, or ask an administrator")
        credential = CERTIFICATE_PREFIX + " ".join(dict.fromkeys(certificate_name(name) for name, _ in found))
        return Caller(principal=found[0][1], credential=credential, expires_at=expires_at)

    def current(self, caller: Caller) -> Caller | None:
        """Return the caller with the permissions of now, or None if its credential is revoked or has expired."""
        if caller.expires_at is not None and caller.expires_at <= self._clock.wall():
            return None
        if caller.credential.startswith(TOKEN_PREFIX):
            return None if self._tokens is None else self._tokens.current(caller)
        if self._keys is None:
            return None
        if not caller.credential.startswith(CERTIFICATE_PREFIX):
            found = self._keys.caller_of_key(caller.credential)
            is_same = (
                found is not None and found.principal.name == caller.principal.name and found.proof == caller.proof
            )
            return found if is_same else None
        named = self._keys.principals_by_certificate(caller.credential.removeprefix(CERTIFICATE_PREFIX).split(" "))
        if {principal.name for _, principal in named} != {caller.principal.name}:
            return None
        principal = named[0][1]
        return caller if principal == caller.principal else replace(caller, principal=principal)
