"""Encodes the caller of a forwarded request as compact JSON, for a header that only proxies may set."""

from msgspec import DecodeError, MsgspecError, Struct, json

from popgate.domain.permissions import (
    ANY,
    GRANTS_MAX,
    NO_LIMITS,
    PATTERNS_MAX,
    Action,
    Caller,
    Grant,
    Limits,
    Principal,
)
from popgate.wire.errors import NotUnderstood

CALLER_BYTES_MAX = 16 << 10
"""Maximum size of an encoded caller, in bytes."""
_ALL = (ANY,)


class _Grant(Struct, omit_defaults=True, kw_only=True):
    a: tuple[Action, ...]
    t: tuple[str, ...] = _ALL
    g: tuple[str, ...] = _ALL
    l: tuple[str, ...] = _ALL  # noqa: E741  # short, because the header is
    q: tuple[str, ...] = ()


class _Limits(Struct, omit_defaults=True, array_like=True):
    requests_per_second: float | None = None
    parked_pops: int | None = None
    connections: int | None = None
    bytes_in_flight: int | None = None
    topics: int | None = None


class _Caller(Struct, omit_defaults=True, kw_only=True):
    """``n``: the principal's name; ``g``: its grants; ``l``: its limits; ``c``: the credential's id; ``e``: when the
    credential expires, in Unix seconds."""

    n: str
    g: tuple[_Grant, ...] = ()
    l: _Limits | None = None  # noqa: E741  # short, because the header is
    c: str
    e: float | None = None


_encode = json.Encoder().encode
_decode = json.Decoder(_Caller).decode


def encode_caller(caller: Caller) -> bytes:
    """Return the value of the header: printable ASCII. Raises: NotUnderstood if it would be too long."""
    principal = caller.principal
    limits = principal.limits
    encoded = _encode(
        _Caller(
            n=principal.name,
            g=tuple(
                _Grant(
                    a=tuple(sorted(grant.actions)),
                    t=_short(grant.topics),
                    g=_short(grant.groups),
                    l=_short(grant.locks),
                    q=grant.queues,
                )
                for grant in principal.grants
            ),
            l=None
            if limits == NO_LIMITS
            else _Limits(
                limits.requests_per_second,
                limits.parked_pops,
                limits.connections,
                limits.bytes_in_flight,
                limits.topics,
            ),
            c=caller.credential,
            e=caller.expires_at,
        )
    )
    header = encoded if encoded.isascii() and b"\x7f" not in encoded else _in_ascii(encoded.decode())
    if len(header) > CALLER_BYTES_MAX:
        raise NotUnderstood(
            f"the permissions of {principal.name} take more than {CALLER_BYTES_MAX >> 10} KiB, so its request can't be "
            "forwarded; use fewer or shorter patterns"
        )
    return header


def _short(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns as the object that is left out as the default, if they are equal to it."""
    return _ALL if patterns == _ALL else patterns


def decode_caller(header: bytes) -> Caller:
    """Return the caller in the value of the header. Raises: NotUnderstood."""
    try:
        read = _decode(header)
    except (DecodeError, MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotUnderstood(f"the caller of a forwarded request can't be read: {error}") from error
    if len(header) > CALLER_BYTES_MAX or len(read.g) > GRANTS_MAX or any(_is_too_long(grant) for grant in read.g):
        raise NotUnderstood("the caller of a forwarded request has too many permissions")
    limits = NO_LIMITS if read.l is None else _limits_of(read.l)
    grants = tuple(
        Grant(actions=frozenset(grant.a), topics=grant.t, groups=grant.g, locks=grant.l, queues=grant.q)
        for grant in read.g
    )
    return Caller(principal=Principal(name=read.n, grants=grants, limits=limits), credential=read.c, expires_at=read.e)


def _limits_of(read: _Limits) -> Limits:
    return Limits(
        requests_per_second=read.requests_per_second,
        parked_pops=read.parked_pops,
        connections=read.connections,
        bytes_in_flight=read.bytes_in_flight,
        topics=read.topics,
    )


def _is_too_long(grant: _Grant) -> bool:
    return any(len(patterns) > PATTERNS_MAX for patterns in (grant.t, grant.g, grant.l, grant.q))


def _in_ascii(text: str) -> bytes:
    """Return a JSON text whose other characters are escaped. They occur in strings only."""
    escaped: list[str] = []
    for one in text:
        units = one.encode("utf-16-be") if one >= "\x7f" else b""
        escaped += [f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)] or [one]
    return "".join(escaped).encode()
