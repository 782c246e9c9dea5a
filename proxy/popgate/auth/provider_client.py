"""Fetches the public keys of an OpenID provider, over https only.

All addresses come from the configuration, or from the provider's own configuration document (OpenID Connect Discovery
1.0). Nothing in a token has an influence on them. Redirects are not followed.
"""

import asyncio
import json
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx

from popgate.domain.errors import StartupError

FETCH_SECONDS = 8.0
"""Maximum seconds to fetch the keys, with the provider's configuration."""
CONNECT_SECONDS = 4.0
ANSWER_BYTES_MAX = 256 * 1024
"""Maximum size of an answer of the provider, in bytes."""
DISCOVERY_PATH = "/.well-known/openid-configuration"


class ProviderError(Exception):
    """The provider can't be reached, or its answer can't be used. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Where a provider is. ``jwks_url`` None: the provider's configuration names it. ``ca_file`` contains the
    authorities (PEM) that signed its certificate; None stands for the system's authorities."""

    issuer: str
    jwks_url: str | None = None
    ca_file: Path | None = None


class ProviderClient:
    """Fetches from one provider. Raises: StartupError if the file of authorities can't be used."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        try:
            self._context()
        except OSError as error:  # an SSLError is an OSError
            raise StartupError(
                f"the authorities in {provider.ca_file} (--oidc-ca-file) can't be used ({error.strerror or error})"
            ) from error

    async def key_set(self) -> bytes:
        """Return the provider's set of keys as it is, at most ``ANSWER_BYTES_MAX``. Raises: ProviderError."""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                # read again each time, because authorities change; this takes too long for the event loop
                context = await asyncio.to_thread(self._context)
                async with httpx.AsyncClient(
                    verify=context,
                    follow_redirects=False,
                    trust_env=False,
                    timeout=httpx.Timeout(FETCH_SECONDS, connect=CONNECT_SECONDS),
                    headers={"accept": "application/json", "accept-encoding": "identity"},
                ) as client:
                    url = self._provider.jwks_url or await self._discovered(client)
                    return await _fetched(client, url)
        except TimeoutError as error:
            raise ProviderError(f"no answer within {FETCH_SECONDS:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ProviderError(str(error) or type(error).__name__) from error

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._provider.ca_file)

    async def _discovered(self, client: httpx.AsyncClient) -> str:
        """Return the address of the keys from the provider's configuration. Raises: ProviderError."""
        content = await _fetched(client, self._provider.issuer.removesuffix("/") + DISCOVERY_PATH)
        try:
            document: object = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ProviderError("the provider's configuration is not JSON") from error
        fields = cast("dict[str, object]", document) if isinstance(document, dict) else {}
        if fields.get("issuer") != self._provider.issuer:
            raise ProviderError("the provider's configuration names another issuer than --oidc-issuer")
        url = fields.get("jwks_uri")
        if not isinstance(url, str) or not _is_https(url):
            raise ProviderError("the provider's configuration has no https address of its keys (jwks_uri)")
        return url


async def _fetched(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url) as response:
        if response.status_code != HTTPStatus.OK:
            raise ProviderError(f"{url} answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ProviderError(f"{url} answered with a compressed body")  # it could become arbitrarily large
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if len(content) > ANSWER_BYTES_MAX:
                raise ProviderError(f"{url} answered with more than {ANSWER_BYTES_MAX} bytes")
    return bytes(content)


def _is_https(url: str) -> bool:
    try:
        url.encode("ascii")
        parts = urlsplit(url)
        return parts.scheme == "https" and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False
