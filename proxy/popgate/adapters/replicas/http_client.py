"""Creates an HTTP client for a URL that may contain credentials."""

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx


def http_client(
    url: str, path: str, *, timeout_seconds: float, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return an HTTP client whose base URL is ``url`` followed by ``path``.

    The credentials in ``url`` are sent in a header. The base URL does not contain them, because httpx logs every URL.
    """
    parts = urlsplit(url)
    auth = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return httpx.AsyncClient(
        base_url=f"{urlunsplit(place).rstrip('/')}{path}",
        auth=auth,
        headers=headers,
        timeout=timeout_seconds,
        trust_env=False,
        verify=parts.scheme == "https",  # loading the certificates is the slowest step
    )
