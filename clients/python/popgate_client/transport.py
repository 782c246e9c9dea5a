"""Configures httpx for both clients: the server's URL, the connection pool, and the arguments of a request."""

import asyncio
import os
import ssl
import time
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from popgate_client.errors import RequestInvalid
from popgate_client.httpx_log import keep_out
from popgate_client.tokens import AsyncTokenSource, bearer_auth
from popgate_client.wire import BYTES_PER_SECOND_MIN, Request

URL_VARIABLE = "POPGATE_URL"
URL_DEFAULT = "http://127.0.0.1:8080"
_TRUST_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
CONNECT_SECONDS = 5.0
CONNECTIONS_MAX = 256
KEEPALIVE_SECONDS = 4.0
"""Seconds for which an idle connection is kept. This is less than the 5 s after which common servers close one, because
a publish on a connection that is just being closed could not be repeated safely."""
CONTEXT_UNUSED = "give ssl_context to the transport: httpx.HTTPTransport(verify=ssl_context)"
"""httpx gives a context only to the transport that it makes itself."""


def connection(
    base_url: str | None,
    token: AsyncTokenSource | None,
    ssl_context: ssl.SSLContext | None = None,
    transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
) -> dict[str, Any]:
    """Return the arguments for `httpx.Client` and, but for `event_hooks`, its asyncio twin.

    The URL is the given one, else POPGATE_URL, else the local default. The token is the given one, else that of the
    environment (`tokens.token_of_environment`). No cookie of a server is kept. Raises: RequestInvalid if the URL is not
    http or https, if the token can't be sent, if SSL_CERT_FILE can't be read, or if `ssl_context` would have no effect.
    """
    if ssl_context is not None and transport is not None:
        raise RequestInvalid("invalid_request", CONTEXT_UNUSED)
    text = base_url or os.environ.get(URL_VARIABLE) or URL_DEFAULT
    complaint = url_complaint(text)
    if complaint is not None:
        raise RequestInvalid("invalid_request", complaint)
    url = httpx.URL(text)
    keep_out(url)
    headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "popgate-client-python"}
    limits = httpx.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=CONNECTIONS_MAX,
        keepalive_expiry=KEEPALIVE_SECONDS,
    )
    arguments = {
        **private_connection(url, ssl_context),
        "headers": headers,
        "limits": limits,
        "transport": transport,
        "event_hooks": {"response": [refuse_compressed]},
        "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    }
    if (bearer := bearer_auth(token, url)) is not None:
        arguments["auth"] = bearer
    return arguments


def refuse_compressed(response: httpx.Response) -> None:
    """Raise httpx.DecodingError before a compressed answer is read: popgate sends none, and it could become arbitrarily
    large."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx.DecodingError("the answer is compressed", request=response.request)


async def refuse_compressed_async(response: httpx.Response) -> None:
    """Do the same for `httpx.AsyncClient`."""
    refuse_compressed(response)


def private_connection(url: httpx.URL, ssl_context: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Return the arguments for an httpx client that sends the user and the password in `url` to its server only.

    They go into a header, because httpx logs the URLs of its requests. No proxy of the environment is used, because a
    proxy that HTTP_PROXY names could read them. Raises: RequestInvalid if SSL_CERT_FILE can't be read.
    """
    # Without TLS no certificates are needed, and reading the machine's takes longer than most calls. This context has
    # none, so it would trust no server.
    verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if url.scheme == "https":
        verify = ssl_context or _trusting_context()
    auth = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
    return {"base_url": url.copy_with(userinfo=b""), "auth": auth, "verify": verify, "trust_env": False}


def _trusting_context() -> ssl.SSLContext:
    """Trust the authorities that SSL_CERT_FILE or SSL_CERT_DIR names; without them, those of the machine and those that
    httpx trusts. httpx alone would not trust an authority that was added to the machine. Raises: RequestInvalid."""
    try:
        context = httpx.create_ssl_context()
    except OSError as error:  # an SSLError is an OSError
        place = next((name for name in _TRUST_VARIABLES if os.environ.get(name)), "certifi")
        detail = f"the certificates of {place} can't be read: {error.strerror or error}"
        raise RequestInvalid("invalid_request", detail) from error
    if not any(os.environ.get(name) for name in _TRUST_VARIABLES):
        context.load_default_certs()
    return context


def without_password(url: str) -> str:
    """Return a URL, or an invalid one, without user and password, so that it can be shown."""
    secret, _, place = url.rpartition("@")
    scheme, separator, _ = secret.partition("://")
    return f"{scheme}://{place}" if separator else place


def shown_url(base_url: str | None) -> str:
    """Return the URL that `connection` uses, without user and password."""
    return without_password(base_url or os.environ.get(URL_VARIABLE) or URL_DEFAULT)


def url_complaint(text: str) -> str | None:
    """Return what is wrong with a proxy's URL, without its password; None if it is valid."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        # The text that httpx reads as the port may be part of a password.
        return f"{without_password(text)!r} is not a URL" + ("" if "@" in text else f": {error}")
    if url.scheme not in ("http", "https") or not url.host:
        return f"{without_password(text)!r} is not an http:// or https:// URL"
    return None


def call(http: httpx.Client, request: Request) -> httpx.Response:
    """Send a request, and return its answer, which has been read.

    httpx limits only the silence before each part of an answer. So the time is checked after each part of the body; the
    head can't be bounded in this way. Raises: httpx.RequestError.
    """
    ends_at = time.monotonic() + request.call_seconds_max
    parts: list[bytes] = []
    with http.stream(**call_arguments(request)) as answer:
        for part in answer.iter_bytes():
            parts.append(part)
            ends_at += len(part) / BYTES_PER_SECOND_MIN
            if time.monotonic() > ends_at:
                raise _incomplete(request)
    return httpx.Response(answer.status_code, headers=answer.headers, content=b"".join(parts))


async def call_async(http: httpx.AsyncClient, request: Request) -> httpx.Response:
    """Do the same for `httpx.AsyncClient`. The time limit includes the head of the answer."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(request.call_seconds_max) as limit, http.stream(**call_arguments(request)) as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                limit.reschedule((limit.when() or 0.0) + len(part) / BYTES_PER_SECOND_MIN)
    except TimeoutError as error:
        raise _incomplete(request) from error
    return httpx.Response(answer.status_code, headers=answer.headers, content=b"".join(parts))


def _incomplete(request: Request) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"the answer was not complete after {request.call_seconds_max:g} s")


def call_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments for `httpx.Client.request` and its asyncio twin."""
    connect_seconds = min(CONNECT_SECONDS, request.silence_seconds)
    return {
        "method": request.method,
        "url": request.path,
        "content": request.content,
        "headers": {
            **({} if request.content is None else {"content-type": "application/json"}),
            **(request.headers or {}),
        },
        "timeout": httpx.Timeout(request.silence_seconds, connect=connect_seconds, pool=connect_seconds),
    }
