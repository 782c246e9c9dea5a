"""Creates an HTTP client for one place, whose URL may contain credentials."""

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx


def http_client(
    url: str, path: str, *, timeout_seconds: float, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client for paths below ``path``. Its URL contains no credentials, because httpx logs every URL."""
    parts = urlsplit(url)
    auth = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return httpx.AsyncClient(
        base_url=f"{urlunsplit(place).rstrip('/')}{path}",
        auth=auth,
        headers=headers,
        timeout=timeout_seconds,
        trust_env=False,
        verify=parts.scheme == "https",  # reading the machine's certificates takes longer than everything else
    )
