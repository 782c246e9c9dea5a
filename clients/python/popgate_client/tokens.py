"""Supplies the token that the client sends as `Authorization: Bearer`: a text, a function, or a file.

A function is called for each request, so a token that is renewed meanwhile is used at once. If popgate answers 401, and
the function then returns another token, the request is sent once more with this token: it was not begun before.
"""

import inspect
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

import httpx

from popgate_client.errors import RequestInvalid

_log = logging.getLogger(__name__)

TOKEN_VARIABLE = "POPGATE_TOKEN"
FILE_BYTES_MAX = 64 * 1024
_REFUSED = 401

TokenSource: TypeAlias = str | Callable[[], str]
"""A token, or a function that returns the token of the moment. It is called for each request, so it must be fast."""
AsyncTokenSource: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""The same for the asyncio client, whose function may be `async`."""


def token_in(path: str | Path) -> Callable[[], str]:
    """Return a function that returns the token in a file. The file is read again only if it has changed.

    Tools such as Kubernetes replace the file when they renew the token. White space around the token is ignored. The
    function raises RequestInvalid if the file can't be read.
    """
    return _TokenFile(Path(path)).read


class _TokenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._token = ""

    def read(self) -> str:
        try:
            status = self._path.stat()
            mark = (status.st_ino, status.st_mtime_ns, status.st_size)
            if mark != self._mark:
                if status.st_size > FILE_BYTES_MAX:
                    raise _unusable(f"the token file {self._path} is larger than {FILE_BYTES_MAX} bytes")
                self._token = self._path.read_text(encoding="ascii").strip()
                self._mark = mark
        except OSError as error:
            raise _unusable(f"the token file {self._path} can't be read: {error.strerror or error}") from error
        except UnicodeDecodeError:
            raise _unusable(f"the token file {self._path} does not contain a token") from None
        if not self._token:
            raise _unusable(f"the token file {self._path} is empty")
        return self._token


class BearerAuth(httpx.Auth):
    """Adds the token to each request of a client."""

    def __init__(self, source: AsyncTokenSource) -> None:
        self._source = source
        if isinstance(source, str):
            checked(source)

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._now()
        response = yield _with_token(request, token)
        if response.status_code == _REFUSED and (fresh := self._now()) != token:
            yield _with_token(request, fresh)

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = await self._soon()
        response = yield _with_token(request, token)
        if response.status_code == _REFUSED and (fresh := await self._soon()) != token:
            yield _with_token(request, fresh)

    def _now(self) -> str:
        given = self._source if isinstance(self._source, str) else self._source()
        if inspect.isawaitable(given):
            if inspect.iscoroutine(given):
                given.close()
            raise _unusable("the function for the token is async, which only AsyncClient supports")
        return checked(given)

    async def _soon(self) -> str:
        given = self._source if isinstance(self._source, str) else self._source()
        return checked(await given if inspect.isawaitable(given) else given)


def bearer_auth(token: AsyncTokenSource | None, url: httpx.URL) -> BearerAuth | None:
    """Return the authentication of a client, or None if it has no token. Raises: RequestInvalid.

    None: the token is in POPGATE_TOKEN, if that is set. An empty text: no token.
    """
    source = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if source == "":
        return None
    if url.scheme == "http" and not _is_loopback(url.host):
        _log.warning("the token is sent without encryption, because the URL begins with http", extra={"host": url.host})
    return BearerAuth(source)


def checked(token: object) -> str:
    """Return the token. Raises: RequestInvalid, without the token in its text, if it can't be sent."""
    if not isinstance(token, str) or not token:
        raise _unusable("the token must be a text that is not empty")
    if not (token.isascii() and token.isprintable()):  # usually a line end from a file
        raise _unusable("the token has characters that no HTTP header can carry")
    return token


def _with_token(request: httpx.Request, token: str) -> httpx.Request:
    request.headers["authorization"] = f"Bearer {token}"
    return request


def _unusable(detail: str) -> RequestInvalid:
    return RequestInvalid("invalid_request", detail)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
