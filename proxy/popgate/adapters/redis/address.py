"""Parses the URL of Redis, and creates the pool that makes connections to this address.

    redis://[[user]:password@]host[:port][/database]            rediss:// the same over TLS
    unix:///path/of/the/socket[?db=database]
    redis+sentinel://[[user]:password@]host[:port],host[:port],.../master[/database]        rediss+sentinel:// over TLS

The hosts of a Sentinel URL are Sentinels, whose default port is 26379. The user and the password are those of Redis.
The query of a Sentinel URL may contain ``sentinel_username``, ``sentinel_password`` and redis-py's TLS options. For
example, ``ssl_ca_certs`` names the file of trusted certificate authorities, in place of the system's authorities. The
server's certificate and name are verified, unless ``ssl_cert_reqs=none`` is given.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import ConnectionPool, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from popgate.domain.errors import StartupError

CONNECT_SECONDS = 1.0
SENTINEL_SECONDS = 0.5
"""Maximum number of seconds to wait for each Sentinel. It is short, because popgate asks them one after another which
server is the master."""
REDIS_PORT = 6_379
SENTINEL_PORT = 26_379
FORMS = "redis://host:6379/0, rediss://host:6379/0 (TLS), unix:///path, or redis+sentinel://host1:26379,host2:26379/master/0"
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


class _NotUnderstood(ValueError):
    """A reason that contains no part of the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """The address of a Redis server, or of the Sentinels that know it.

    ``place`` is the address that operators see, without the password. Either ``url`` or ``sentinels`` is set. ``host``
    and ``port`` are those of Redis, or of the first Sentinel. ``host`` is None for a local socket.
    """

    place: str
    host: str | None = None
    port: int = REDIS_PORT
    url: str = field(default="", repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)


def parse_address(url: str) -> RedisAddress:
    """Parse the URL of Redis.

    Raises: StartupError. Its text contains no part of the URL, because any part may belong to a password that was not
    quoted.
    """
    scheme = url.partition("://")[0]
    try:
        if scheme in _SENTINEL_SCHEMES:
            address = _sentinel_address(url)
        elif scheme in ("redis", "rediss", "unix"):
            address = _server_address(url)
        else:
            raise _NotUnderstood("it has another scheme")
        _check_options(address)
    except ValueError as error:
        reason = error if isinstance(error, _NotUnderstood) else "it is no URL"
        raise StartupError(f"the Redis URL is not understood: {reason}; use {FORMS}") from None
    return address


def open_pool(address: RedisAddress) -> ConnectionPool:
    """Return a pool that makes connections to Redis. This function opens no connection.

    If the address names Sentinels, each new connection first asks them which server is the master.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": None,  # PipelinedConnection has its own timeout
        "protocol": 2,  # with 3, redis-py does not detect that a connection is closed
        # redis-py must not repeat a script that may have run: the script's caller decides.
        "retry": Retry(NoBackoff(), 0),
    }
    if address.host is not None:
        options["socket_keepalive"] = True  # redis-py makes no connection to a local socket with this option
    # redis-py has no types for the arguments of a URL or of Sentinels.
    if address.url.startswith("rediss://") and parse_url(address.url).get("ssl_cert_reqs") != "none":
        options["ssl_check_hostname"] = True  # not the default of redis-py 5; the URL may override it
    if not address.sentinels:
        return ConnectionPool.from_url(address.url, **options)  # pyright: ignore[reportUnknownMemberType]
    limits = {"socket_connect_timeout": SENTINEL_SECONDS, "socket_timeout": SENTINEL_SECONDS}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        address.sentinels, sentinel_kwargs={**options, **limits, **address.sentinel_options}
    )
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        address.master, sentinel, **options, **address.options
    )


def is_unverified(address: RedisAddress) -> bool:
    """Return whether the URL switches the verification of the server's certificate or of its name off."""
    options = open_pool(address).connection_kwargs
    return options.get("ssl_cert_reqs") == "none" or options.get("ssl_check_hostname") is False


async def close_pool(pool: ConnectionPool) -> None:
    """Close the connections that ``pool`` has opened to the Sentinels."""
    if isinstance(pool, SentinelConnectionPool):
        for client in cast("Any", pool).sentinel_manager.sentinels:  # redis-py has no types for these attributes
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()


def _server_address(url: str) -> RedisAddress:
    parts = urlsplit(url)
    if "@" in parts.path:
        raise _NotUnderstood("write a / in a password as %2F, and an @ in a path as %40")
    if parts.scheme == "unix":
        return RedisAddress(place=parts.path, url=url)
    host, port = parts.hostname or "localhost", parts.port or REDIS_PORT
    return RedisAddress(place=f"{host}:{port}{parts.path}", host=host, port=port, url=url)


def _check_options(address: RedisAddress) -> None:
    """Raises: ValueError if redis-py can't make a connection with the options in the URL. It opens none."""
    try:
        open_pool(address).make_connection()  # type: ignore[no-untyped-call]
    except (AttributeError, TypeError, RedisError):  # redis-py checks no options by itself
        raise _NotUnderstood("its query has an unknown option or a wrong value") from None


def _sentinel_address(url: str) -> RedisAddress:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, has_password, password = credentials.partition(":")
    path = parts.path.strip("/").split("/")
    if not hosts or not path[0] or len(path) > 2:
        raise _NotUnderstood("a Sentinel URL has hosts, the name of the master, and perhaps a database")
    if len(path) == 2 and not path[1].isdecimal():
        raise _NotUnderstood("a database is a number")
    query = dict(parse_qsl(parts.query))
    sentinel_options: dict[str, Any] = {
        name.removeprefix("sentinel_"): query.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in query
    }
    options: dict[str, Any] = {"db": int(path[1]) if len(path) == 2 else 0}
    if user:
        options["username"] = unquote(user)
    if has_password:
        options["password"] = unquote(password)
    if parts.scheme == "rediss+sentinel":
        tls: dict[str, Any] = {name: query.pop(name) for name in _TLS_OPTIONS if name in query}
        if tls.get("ssl_check_hostname") is not None:
            tls["ssl_check_hostname"] = tls["ssl_check_hostname"].lower() not in ("0", "false", "no")
        tls = {"ssl": True, "ssl_check_hostname": tls.get("ssl_cert_reqs") != "none", **tls}
        options |= tls
        sentinel_options |= tls
    if query:
        raise _NotUnderstood("its query has an unknown option")
    sentinels = tuple(_host_and_port(host) for host in hosts.split(","))
    master = unquote(path[0])
    return RedisAddress(
        place=f"{master} of {hosts}",
        host=sentinels[0][0],
        port=sentinels[0][1],
        sentinels=sentinels,
        master=master,
        options=options,
        sentinel_options=sentinel_options,
    )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise _NotUnderstood("a host is missing")
    return parts.hostname, parts.port or SENTINEL_PORT
