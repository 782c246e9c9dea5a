"""Supplies the token that the client sends as `Authorization: Bearer`: a text, a function, or a file.

A function is called for each request, so a token that is renewed meanwhile is used at once. If popgate answers 401, and
the function then returns another token, the request is sent once more with this token: it was not begun before.
"""

import inspect
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

import httpx

from popgate_client.errors import RequestInvalid, RetryLater
from popgate_client.facts import FactLogger

_log = FactLogger(__name__)

TOKEN_VARIABLE = "POPGATE_TOKEN"
TOKEN_FILE_VARIABLE = "POPGATE_TOKEN_FILE"
FILE_BYTES_MAX = 64 * 1024
WARNED_HOSTS_MAX = 64
"""Maximum number of hosts about which the client warns, once for each."""
_REFUSED = 401
_warned_hosts: set[str] = set()

TokenSource: TypeAlias = str | Callable[[], str]
"""A token, or a function that returns the token of the moment. It is called for each request, so it must be fast: it
returns a stored token, and renews it when it is about to expire."""
AsyncTokenSource: TypeAlias = str | Callable[[], str | Awaitable[str]]
"""The same for the asyncio client, whose function may be `async`."""


_Mark: TypeAlias = tuple[int, ...]
"""Device, inode, size, and the times in nanoseconds at which the content and the status of a file changed. Tools may
restore the first time, but not the second one."""


def token_in(path: str | Path) -> Callable[[], str]:
    """Return a function that returns the token in a file. The file is read again only if it has changed, or if popgate
    has answered 401.

    Tools such as Kubernetes replace the file when they renew the token. White space around the token is ignored. The
    function raises RequestInvalid if the file has no token. Once it has had one, the function keeps returning that
    token and logs a warning instead, because a tool may remove the file and create it anew.
    """
    return _TokenFile(Path(path))


class _TokenFile:
    """A function that returns the token in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # One attribute, because several threads may call `read`: a token must not get the mark of another content.
        self._last: tuple[_Mark | None, str] | None = None
        self._complaint = ""

    def doubt(self) -> None:
        """Read the file again at the next call. Some file systems count the times of changes in coarse steps."""
        if self._last is not None:
            self._last = None, self._last[1]

    def __call__(self) -> str:
        last = self._last
        try:
            mark = self._mark()
            if last is None or mark != last[0]:
                last = self._last = mark, self._content()
                self._complaint = ""
        except RequestInvalid as error:
            if last is None:
                raise
            if error.detail != self._complaint:
                self._complaint = error.detail
                _log.warning("the previous token remains in use", extra={"reason": error.detail})
        return last[1]

    def _mark(self) -> _Mark:
        """Return values that change with the content. Raises: RequestInvalid."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        if status.st_size > FILE_BYTES_MAX:
            raise _unusable(f"the token file {self._path} is larger than {FILE_BYTES_MAX} bytes")
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _content(self) -> str:
        try:
            token = self._path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise self._unreadable(error) from error
        except UnicodeDecodeError:  # its text contains the bytes
            raise _unusable(f"the token file {self._path} does not contain a token") from None
        if not token:
            raise _unusable(f"the token file {self._path} is empty")
        if not token.isprintable():
            raise _unusable(
                f"the token file {self._path} has several lines, or characters that no HTTP header can carry"
            )
        return token

    def _unreadable(self, error: OSError) -> RequestInvalid:
        return _unusable(f"the token file {self._path} can't be read: {error.strerror or error}")


def token_of_environment() -> TokenSource:
    """Return the token in POPGATE_TOKEN, else a function that reads the file that POPGATE_TOKEN_FILE names, else an
    empty text."""
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    return os.environ.get(TOKEN_VARIABLE) or (token_in(file) if file else "")


def current_token(source: TokenSource) -> str:
    """Return the token of the moment. Raises: RequestInvalid, without the token in its text, if it can't be sent."""
    return checked(source if isinstance(source, str) else source())


class BearerAuth(httpx.Auth):
    """Adds the token to each request of a client."""

    def __init__(self, source: AsyncTokenSource) -> None:
        self._source = source
        if isinstance(source, str):
            checked(source)

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._now()
        response = yield _with_token(request, token)
        if self._is_refused(response) and (fresh := self._now()) != token:
            yield _with_token(request, fresh)

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        token = await self._soon()
        response = yield _with_token(request, token)
        if self._is_refused(response) and (fresh := await self._soon()) != token:
            yield _with_token(request, fresh)

    def _is_refused(self, response: httpx.Response) -> bool:
        """Return whether popgate refused the token. If it is from a file, the file is read again at the next use."""
        if response.status_code == _REFUSED and isinstance(self._source, _TokenFile):
            self._source.doubt()
        return response.status_code == _REFUSED

    def _now(self) -> str:
        try:
            given = self._source if isinstance(self._source, str) else self._source()
        except httpx.HTTPError as error:
            raise _not_renewed(error) from error
        if inspect.isawaitable(given):
            if inspect.iscoroutine(given):
                given.close()
            raise _unusable("the function for the token is async, which only AsyncClient supports")
        return checked(given)

    async def _soon(self) -> str:
        try:
            given = self._source if isinstance(self._source, str) else self._source()
            return checked(await given if inspect.isawaitable(given) else given)
        except httpx.HTTPError as error:
            raise _not_renewed(error) from error


def bearer_auth(token: AsyncTokenSource | None, url: httpx.URL) -> BearerAuth | None:
    """Return the authentication of a client, or None if it has no token. Raises: RequestInvalid.

    None: as `token_of_environment`. An empty text: no token.
    """
    source = token_of_environment() if token is None else token
    if source == "":
        return None
    if url.scheme == "http" and not _is_loopback(url.host):
        _warn_of_clear_text(url.host)
    return BearerAuth(source)


def checked(token: object) -> str:
    """Return the token. Raises: RequestInvalid, without the token in its text, if it can't be sent."""
    if not isinstance(token, str) or not token:
        raise _unusable("the token must be a text that is not empty")
    if not (token.isascii() and token.isprintable()) or " " in token:  # usually a line end from a file
        raise _unusable("the token has characters that no token can have, such as a space or a line end")
    return token


def _warn_of_clear_text(host: str) -> None:
    """Log once for each host: a Spark task or a web request may make a client of its own."""
    if host in _warned_hosts or len(_warned_hosts) >= WARNED_HOSTS_MAX:
        return
    _warned_hosts.add(host)
    _log.warning("the token is sent without encryption, because the URL begins with http", extra={"host": host})


def _with_token(request: httpx.Request, token: str) -> httpx.Request:
    request.headers["authorization"] = f"Bearer {token}"
    return request


def _not_renewed(error: httpx.HTTPError) -> RetryLater:
    """Return the error for a token that could not be fetched. Otherwise the client would report that popgate did not
    answer. The text of `error` may contain an address with a secret."""
    return RetryLater("token_unavailable", f"the function for the token failed: {type(error).__name__}")


def _unusable(detail: str) -> RequestInvalid:
    return RequestInvalid("invalid_request", detail)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
