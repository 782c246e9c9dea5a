"""Contains the parsers for the values of replica settings.

As in ``values``, each parser raises ValueError for an invalid value, with a text that describes a correct value.
"""

import re
import shlex
from typing import cast
from urllib.parse import parse_qs, urlencode, urlsplit

from popgate.config.values import hidden_text
from popgate.domain.replica_wanted import REPLICAS_MAX, ReplicaPolicy

LOCAL = "local"
NONE = "none"
MANAGEMENT_PORTS = {"amqp": 15_672, "amqps": 15_671}

_NEXT_URL = re.compile(r"\s*[,\n]\s*(?=https?://)")


def _entries(raw: object, example: str) -> list[str]:
    """Return the entries of a list, or of a text with commas between the entries.

    Spaces around entries are removed, and empty entries are dropped.
    """
    entries = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in cast("list[object]", entries)):
        raise ValueError(f"must be a text such as {example!r}, not {raw!r}")
    return [entry.strip() for entry in cast("list[str]", entries) if entry.strip()]


def replica_policies(raw: object) -> tuple[ReplicaPolicy, ...]:
    example = "popgate:orders:*=5, audit*=3"
    policies: list[ReplicaPolicy] = []
    for entry in _entries(raw, example):
        pattern, equals, number = entry.rpartition("=")
        if not equals or not pattern or not number.strip().isdecimal() or int(number) > REPLICAS_MAX:
            raise ValueError(
                f"must be PATTERN=NUMBER with commas between them, numbers from 0 to {REPLICAS_MAX}, such as "
                f"{example!r}; {entry!r} is not"
            )
        policies.append(ReplicaPolicy(pattern.strip(), int(number)))
    patterns = [policy.pattern for policy in policies]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"must be patterns that occur once each; {pattern!r} does not")
    return tuple(policies)


def node_zones(raw: object) -> tuple[tuple[str, str], ...]:
    example = "rabbit@one=a, rabbit@two=b"
    zones: dict[str, str] = {}
    for entry in _entries(raw, example):
        node, equals, zone = (part.strip() for part in entry.partition("="))
        if not equals or not node or not zone or zones.get(node, zone) != zone:
            raise ValueError(f"must be NODE=ZONE with commas between them, such as {example!r}; {entry!r} is not")
        zones[node] = zone
    return tuple(zones.items())


def tool_prefixes(raw: object) -> tuple[str, ...]:
    """Parse the prefixes with which RabbitMQ's command line tools are run.

    For ``none``, the result is an empty tuple. For ``local``, the prefix is an empty text.
    """
    entries = _entries(raw, "ssh rabbit-1, ssh rabbit-2")
    if entries == [NONE]:
        return ()
    if NONE in entries:
        raise ValueError(f"must be {NONE!r} alone, or the words before a command, such as 'ssh rabbit-1'")
    for entry in entries:
        try:
            words = shlex.split(entry)
        except ValueError as error:
            raise ValueError(
                f"must be the words before a command, such as 'ssh rabbit-1': {entry!r} ({error})"
            ) from error
        if not words:
            raise ValueError("must be the words before a command, such as 'ssh rabbit-1'")
    if not entries:
        raise ValueError(f"must be the words before a command, such as 'ssh rabbit-1'; or {LOCAL}, or {NONE}")
    return tuple("" if entry == LOCAL else entry for entry in entries)


def management_urls(raw: object) -> tuple[str, ...]:
    return _urls(raw, "http://user:password@host:15672")


def proxy_urls(raw: object) -> tuple[str, ...]:
    return _urls(raw, "http://127.0.0.1:8080")


def _urls(raw: object, example: str) -> tuple[str, ...]:
    """Parse HTTP URLs. Error texts never contain the URL, because it may contain a password."""
    texts = [raw]
    if isinstance(raw, list) and raw:
        texts = cast("list[object]", raw)
    urls = [url for text in texts for url in _NEXT_URL.split(hidden_text(text).strip())]
    for url in urls:
        try:
            parts = urlsplit(url)
            usable = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            usable = False
        if not usable or "," in url.rpartition("@")[2]:
            raise ValueError(f"must be URLs such as {example}, with commas between them")
    return tuple(urls)


def management_urls_of(amqp_urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the default URLs of the management API on the hosts of ``amqp_urls``.

    They contain the same credentials, or guest:guest if the AMQP URL contains none, and the same authorities.
    """
    urls: list[str] = []
    for url in amqp_urls:
        parts = urlsplit(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        credentials = parts.netloc.rpartition("@")[0] or "guest:guest"
        scheme = "https" if parts.scheme == "amqps" else "http"
        authorities = parse_qs(parts.query).get("cafile") if scheme == "https" else None
        query = f"/?{urlencode({'cafile': authorities[-1]})}" if authorities else ""
        urls.append(f"{scheme}://{credentials}@{host}:{MANAGEMENT_PORTS[parts.scheme]}{query}")
    return tuple(urls)


def entry_point_name(raw: object) -> str:
    if not isinstance(raw, str) or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", raw) is None:
        raise ValueError(f"must be the name of an entry point, not {raw!r}")
    return raw
