"""Creates an HTTP client for a URL that may contain credentials."""

import ssl
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import httpx

from popgate.domain.errors import StartupError


def http_client(
    url: str, path: str, *, timeout_seconds: float, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return an HTTP client whose base URL is ``url`` followed by ``path``.

    The credentials in ``url`` are sent in a header. The base URL does not contain them, because httpx logs every URL.
    The server's certificate and name are verified. ``cafile`` in the query of ``url`` names the file of authorities, as
    in an AMQP URL.

    Raises: StartupError if this file can't be used.
    """
    parts = urlsplit(url)
    auth = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="")
    authorities = parse_qs(parts.query).get("cafile")
    return httpx.AsyncClient(
        base_url=f"{urlunsplit(place).rstrip('/')}{path}",
        auth=auth,
        headers=headers,
        timeout=timeout_seconds,
        trust_env=False,
        # Loading the certificates is the slowest step.
        verify=_trusting(authorities[-1]) if authorities else parts.scheme == "https",
    )


def _trusting(authorities: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:  # an SSLError is an OSError
        raise StartupError(
            f"the authorities in {authorities} (cafile of the management URL) can't be used ({error.strerror or error})"
        ) from error
