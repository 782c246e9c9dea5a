"""Creates an HTTP client for a URL that may contain credentials.

Another program may listen where RabbitMQ or a proxy did. So an answer may neither be large nor take long.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import httpx

from popgate.domain.errors import StartupError

ANSWER_BYTES_MAX = 32 << 20
"""Maximum size of an answer in bytes. RabbitMQ's list of 10,000 queues takes a quarter of that."""
ANSWER_SECONDS_MAX = 60.0
"""Maximum seconds until the head of an answer has arrived, and from then on to its end."""


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
        headers={**(headers or {}), "accept-encoding": "identity"},
        timeout=timeout_seconds,
        trust_env=False,
        transport=_BoundedTransport(
            # Loading the certificates is the slowest step.
            verify=_trusting(authorities[-1]) if authorities else parts.scheme == "https",
            trust_env=False,
        ),
    )


class _BoundedTransport(httpx.AsyncHTTPTransport):
    """Raises httpx.ReadTimeout if the head of an answer takes too long, and httpx.ReadError while an answer is read
    that is too large, takes too long, or is compressed."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):  # httpx limits only the pause before each part of a head
                response = await super().handle_async_request(request)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer had begun after {ANSWER_SECONDS_MAX:g} s") from error
        assert isinstance(response.stream, httpx.AsyncByteStream), "it is that of an asynchronous transport"
        is_compressed = response.headers.get("content-encoding", "identity").lower() != "identity"
        response.stream = _BoundedStream(response.stream, 0 if is_compressed else ANSWER_BYTES_MAX)
        return response


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, bytes_max: int) -> None:
        self._stream = stream
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, ends_at = 0, time.monotonic() + ANSWER_SECONDS_MAX
        async for part in self._stream:
            size += len(part)
            if size > self._bytes_max:
                raise httpx.ReadError("the answer is too large, or compressed")
            if time.monotonic() > ends_at:
                raise httpx.ReadError(f"the answer was not complete after {ANSWER_SECONDS_MAX:g} s")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _trusting(authorities: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:  # an SSLError is an OSError
        raise StartupError(
            f"the authorities in {authorities} (cafile of the management URL) can't be used ({error.strerror or error})"
        ) from error
