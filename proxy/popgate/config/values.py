"""Contains the parsers for values of settings. Each parser converts a text or a TOML value to an option.

For an invalid value, each parser raises ValueError with a text that describes a correct value. The text never contains
a credential.
"""

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import parse_qs, unquote, urlsplit

from popgate.domain.features import ALL_FEATURES, Feature
from popgate.domain.hosts import ANY_HOST, is_any_address
from popgate.domain.receipt import SECRET_BYTES_MIN

PORT_MAX = 65_535
SECRET_CHARACTERS_MIN = 8
"""Minimum number of different bytes in a secret. With fewer, it is no random text."""
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_NEXT_URL = re.compile(r"\s*[,\n]\s*(?=amqps?://)")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class HostPort(NamedTuple):
    """The host and the port of a service. The ``port`` 0 means any free port."""

    host: str
    port: int


def text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"must be a text, not {raw!r}")
    return raw


def hidden_text(raw: object) -> str:
    """Parse a text that may contain a credential. Error texts never contain the value, even if its type is wrong."""
    if not isinstance(raw, str) or not raw:
        raise ValueError("must be a text in quotes, and not empty")
    return raw


def whole_number(minimum: int, maximum: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        try:
            value = int(raw) if isinstance(raw, (str, int)) and not isinstance(raw, bool) else None
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(f"must be a whole number from {minimum} to {maximum}, not {raw!r}")
        return value

    return parse


def seconds(minimum: float, maximum: float) -> Callable[[object], float]:
    def parse(raw: object) -> float:
        try:
            value = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else None
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(f"must be seconds from {minimum:g} to {maximum:g}, not {raw!r}")
        return value

    return parse


def switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if not isinstance(raw, str) or raw.lower() not in words:
        raise ValueError(f"must be true or false, not {raw!r}")
    return words[raw.lower()]


def size_between(minimum: int, maximum: int) -> Callable[[object], int]:
    """Return a parser of sizes. ``minimum`` and ``maximum`` are in bytes.

    A size is a whole number with a unit, such as 64MiB, or a number of bytes without a unit.
    """
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

    def parse(raw: object) -> int:
        match = re.fullmatch(r"(\d{1,20})\s*([A-Za-z]*)", str(raw)) if not isinstance(raw, bool) else None
        value = int(match[1]) * units.get(match[2].lower(), 0) if match is not None else 0
        if not minimum <= value <= maximum:
            raise ValueError(f"must be a size from {shown_size(minimum)} to {shown_size(maximum)}, not {raw!r}")
        return value

    return parse


def shown_size(size: int) -> str:
    """Return ``size`` (in bytes) as a text, rounded down in the largest unit that is not larger than ``size``."""
    shift, unit = next((one for one in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if size >> one[0]), (0, "B"))
    return f"{size >> shift}{unit}"


def split_amqp_urls(text: str) -> list[str]:
    """Split a text at the commas and line ends between AMQP URLs.

    A comma that no AMQP URL follows is not a separator, because it may be part of a password.
    """
    return _NEXT_URL.split(text.strip())


def amqp_urls(raw: object) -> tuple[str, ...]:
    """Parse the URLs of the nodes of one RabbitMQ cluster.

    Error texts identify a URL only by its position. They never contain a part of it, because any part may belong to a
    password that was not quoted.
    """
    texts = [raw]
    if isinstance(raw, list) and raw:
        texts = cast("list[object]", raw)
    urls = [url for text in texts for url in split_amqp_urls(hidden_text(text))]
    virtual_hosts = [_virtual_host(url) for url in urls]
    for place, virtual_host in enumerate(virtual_hosts, 1):
        if virtual_host is None:
            which = f"; number {place} of {len(urls)} is not" if len(urls) > 1 else ""
            raise ValueError(
                "must be a URL such as amqp://user:password@host:5672/vhost, or several with commas between them "
                f"(inside a URL, write a comma as %2C, a slash as %2F and an @ as %40){which}"
            )
    queries = [parse_qs(urlsplit(url).query, keep_blank_values=True) for url in urls]
    if any(one not in ("0", "1") for query in queries for one in query.get("no_verify_ssl", ())):
        raise ValueError("must be URLs in which no_verify_ssl is 0 or 1")  # the library would take "false" for 1
    for place, virtual_host in enumerate(virtual_hosts, 1):
        if virtual_host != virtual_hosts[0]:
            raise ValueError(
                f"must be URLs of nodes of one RabbitMQ, all with the same virtual host: the path of number {place} "
                f"of {len(urls)} differs from that of the first"
            )
    return tuple(urls)


def _virtual_host(amqp_url: str) -> str | None:
    """Return the virtual host in an AMQP URL, or None if the URL is not valid."""
    try:
        parts = urlsplit(amqp_url)
        usable = parts.scheme in ("amqp", "amqps") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    if not usable or set(",@") & set(f"{parts.hostname}{parts.path}"):  # another URL, or a password with a slash
        return None
    return unquote(parts.path[1:]) or "/"


def redis_url(raw: object) -> str:
    url = hidden_text(raw)
    if url.partition("://")[0].lower() not in REDIS_SCHEMES:
        raise ValueError(f"must be a URL such as redis://host:6379/0; {', '.join(REDIS_SCHEMES)} are understood")
    return url


def host_port(raw: object) -> HostPort:
    match = _HOST_PORT.fullmatch(raw) if isinstance(raw, str) else None
    if match is None or int(match[3]) > PORT_MAX:
        raise ValueError(f"must be host:port, such as 10.0.0.7:9000 or [fd00::7]:9000, not {raw!r}")
    host = match[1] or match[2]
    if is_any_address(host):
        raise ValueError(f"must be an address at which other proxies reach this one, not {raw!r}")
    return HostPort(host, int(match[3]))


def host_names(raw: object) -> frozenset[str]:
    names: object = [name.strip() for name in raw.split(",")] if isinstance(raw, str) else raw
    for name in cast("list[object]", names) if isinstance(names, list) and names else [raw]:
        if not isinstance(name, str) or (name != ANY_HOST and _HOST_NAME.fullmatch(name) is None):
            raise ValueError(f"must be host names without ports, such as popgate.example.org, or *, not {name!r}")
    return frozenset(name.lower().removesuffix(".") for name in cast("list[str]", names))


def plain_name(raw: object) -> str:
    if not isinstance(raw, str) or _NAME.fullmatch(raw) is None:
        raise ValueError(f"must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', not {raw!r}")
    return raw


def secret_text(raw: object) -> str:
    secret = hidden_text(raw).strip(string.whitespace)  # as in a file of secrets
    if problem := secret_problem(secret.encode()):
        raise ValueError(problem)
    return secret


def secret_problem(secret: bytes) -> str:
    """Return why a secret can't be used, without the secret, or an empty text."""
    if len(secret) < SECRET_BYTES_MIN:
        return f"must be at least {SECRET_BYTES_MIN} bytes long"
    if len(set(secret)) < SECRET_CHARACTERS_MIN:
        return f"must be a text with at least {SECRET_CHARACTERS_MIN} different characters"
    return ""


def one_of(*words: str) -> Callable[[object], str]:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}, not {raw!r}")
        return raw.lower()

    return parse


def feature_names(raw: object) -> frozenset[Feature]:
    names = [name.strip() for name in raw.split(",")] if isinstance(raw, str) else raw
    for name in cast("list[object]", names) if isinstance(names, list) else [raw]:
        if name not in ALL_FEATURES:
            raise ValueError(f"must be names of features ({', '.join(ALL_FEATURES)}), not {name!r}")
    return frozenset(map(Feature, cast("list[str]", names)))


def folder_or_url(raw: object) -> str:
    """Parse the path of a folder, or a URL. Error texts never contain the URL, because it may contain a credential."""
    place = hidden_text(raw)
    if "://" not in place:
        return str(folder_path(place))
    try:
        parts = urlsplit(place)
        is_url = bool(parts.scheme and (parts.netloc or parts.path)) and "@" not in place.replace(parts.netloc, "", 1)
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(
            "must be a folder, or a URL such as s3://bucket/folder (in a password, write a slash as %2F, an @ as %40)"
        )
    return place


def folder_path(raw: object) -> Path:
    return Path(text(raw)).expanduser().absolute()


def file_path(raw: object) -> Path:
    """Parse the name of a file. The error text never contains it: it may be a credential in the wrong place."""
    name = hidden_text(raw)
    if "://" in name:
        raise ValueError("must be the name of a file, not a URL")
    return folder_path(name)
