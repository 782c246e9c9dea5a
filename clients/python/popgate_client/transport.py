"""Between the values of `wire` and httpx: where the server is, how long to wait, what an httpx error means.

Owns everything about httpx that the synchronous and the asyncio client share. It holds no connection.
"""

import os
from typing import Any, TypedDict

import httpx

from popgate_client.errors import RequestInvalid
from popgate_client.wire import Answer, Request, Unanswered

URL_VARIABLE = "POPGATE_URL"
URL_DEFAULT = "http://127.0.0.1:8080"
CONNECT_SECONDS = 5.0
CONNECTIONS_MAX = 256
KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which common servers close an idle connection: a publish sent into one that is just being
closed could not be repeated safely."""

LIMITS = httpx.Limits(
    max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX, keepalive_expiry=KEEPALIVE_SECONDS
)
# With these nothing has been written yet: no connection was made, or none was free.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def server_url(base_url: str | None) -> str:
    """The given URL, else POPGATE_URL, else the local default.

    Raises: RequestInvalid when it is not an http or https URL.
    """
    url = base_url or os.environ.get(URL_VARIABLE) or URL_DEFAULT
    if not url.startswith(("http://", "https://")):
        raise RequestInvalid("invalid_request", f"{url!r} is not an http:// or https:// URL")
    return url


class Connection(TypedDict):
    """What both kinds of httpx client are made from."""

    base_url: str
    headers: dict[str, str]
    limits: httpx.Limits


def connection(base_url: str | None, token: str | None) -> Connection:
    """The settings of a connection pool. Raises: RequestInvalid for a bad URL."""
    return {"base_url": server_url(base_url), "headers": fixed_headers(token), "limits": LIMITS}


def fixed_headers(token: str | None) -> dict[str, str]:
    """What every request carries."""
    headers = {"accept": "application/json", "user-agent": "popgate-client-python"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    return headers


def call_arguments(request: Request) -> dict[str, Any]:
    """The keyword arguments for `httpx.Client.request` and its asyncio twin."""
    return {
        "method": request.method,
        "url": request.path,
        "content": request.content,
        "headers": {"content-type": "application/json"} if request.content is not None else None,
        "timeout": httpx.Timeout(request.silence_seconds, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
    }


def answer_from(response: httpx.Response) -> Answer:
    """The answer as a plain value."""
    try:
        retry_after_seconds = max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # the header's other form is a date; popgate never sends it
        retry_after_seconds = 0.0
    return Answer(status=response.status_code, body=response.content, retry_after_seconds=retry_after_seconds)


def unanswered_from(error: httpx.RequestError) -> Unanswered:
    """What is known about a request that got no answer."""
    return Unanswered(sent=not isinstance(error, _UNSENT), cause=error)
