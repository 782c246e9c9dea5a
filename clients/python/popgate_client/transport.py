"""How both clients use httpx: where the server is, how long connections are kept, what a request is made from."""

import os
import ssl
from typing import Any

import httpx

from popgate_client.errors import RequestInvalid
from popgate_client.wire import Request

URL_VARIABLE = "POPGATE_URL"
URL_DEFAULT = "http://127.0.0.1:8080"
CONNECT_SECONDS = 5.0
CONNECTIONS_MAX = 256
KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which common servers close an idle connection: a publish sent into one that is just being
closed could not be repeated safely."""


def connection(base_url: str | None, token: str | None) -> dict[str, Any]:
    """The arguments for `httpx.Client` and its asyncio twin.

    The URL is the given one, else POPGATE_URL, else the local default.
    Raises: RequestInvalid when it is not http or https, or when the token can't be sent.
    """
    text = base_url or os.environ.get(URL_VARIABLE) or URL_DEFAULT
    complaint = url_complaint(text)
    if complaint is not None:
        raise RequestInvalid("invalid_request", complaint)
    url = httpx.URL(text)
    headers = {"accept": "application/json", "user-agent": "popgate-client-python"}
    if token:
        if not (token.isascii() and token.isprintable()):  # a line end from a file, most often
            raise RequestInvalid("invalid_request", "the token has characters that no HTTP header can carry")
        headers["authorization"] = f"Bearer {token}"
    limits = httpx.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=CONNECTIONS_MAX,
        keepalive_expiry=KEEPALIVE_SECONDS,
    )
    # Over http nothing is encrypted, and to read the machine's certificates takes longer than most calls: this context
    # has none, and so would trust nobody.
    verify = True if url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Of user and password only the header is made: httpx logs the URLs that it asks for.
    auth = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
    base = url.copy_with(userinfo=b"")
    return {"base_url": base, "auth": auth, "headers": headers, "limits": limits, "verify": verify}


def without_password(url: str) -> str:
    """A URL, or what was meant as one, as it may be shown: user and password are left out."""
    secret, _, place = url.rpartition("@")
    scheme, separator, _ = secret.partition("://")
    return f"{scheme}://{place}" if separator else place


def url_complaint(text: str) -> str | None:
    """What is wrong with a proxy's URL, without its password; None where it is good."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        # What httpx takes for the port may be of a password.
        return f"{without_password(text)!r} is not a URL" + ("" if "@" in text else f": {error}")
    if url.scheme not in ("http", "https") or not url.host:
        return f"{without_password(text)!r} is not an http:// or https:// URL"
    return None


def call_arguments(request: Request) -> dict[str, Any]:
    """The arguments for `httpx.Client.request` and its asyncio twin."""
    connect_seconds = min(CONNECT_SECONDS, request.silence_seconds)
    return {
        "method": request.method,
        "url": request.path,
        "content": request.content,
        "headers": {"content-type": "application/json"} if request.content is not None else None,
        "timeout": httpx.Timeout(request.silence_seconds, connect=connect_seconds, pool=connect_seconds),
    }
