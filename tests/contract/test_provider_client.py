"""Fetching the keys of an OpenID provider over https: which addresses are asked, and which answers are accepted."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from popgate.auth.provider_client import ANSWER_BYTES_MAX, DISCOVERY_PATH, Provider, ProviderClient, ProviderError
from popgate.domain.errors import StartupError
from support.tls import Authority

KEYS = b'{"keys":[]}'


class Site:
    """An https server on 127.0.0.1 that sends ``answers`` as they are, by path, and closes the connection."""

    def __init__(self, authority: Authority) -> None:
        self.ca_file = authority.certificate
        self.answers: dict[str, bytes] = {}
        self.requests: list[bytes] = []
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*authority.certify("site"))

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.discover({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})
        self.answers["/keys"] = ok(KEYS)
        return server

    def discover(self, document: object) -> None:
        self.answers[DISCOVERY_PATH] = ok(json.dumps(document).encode())

    def client(self, *, jwks_url: str | None = None, issuer: str | None = None, trusted: bool = True) -> ProviderClient:
        ca_file = self.ca_file if trusted else None
        return ProviderClient(Provider(issuer=issuer or self.url, jwks_url=jwks_url, ca_file=ca_file))

    @property
    def paths(self) -> list[str]:
        return [request.split(b" ")[1].decode() for request in self.requests]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            answer = self.answers.get(request.split(b" ")[1].decode())
            if answer is None:
                await reader.read()  # never answer
                return
            writer.write(answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has closed the connection
        finally:
            writer.close()


def ok(body: bytes, *headers: str) -> bytes:
    head = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", "connection: close", *headers, "", ""]
    return "\r\n".join(head).encode() + body


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("site") / "authority")


@pytest_asyncio.fixture
async def site(authority: Authority) -> AsyncIterator[Site]:
    site = Site(authority)
    async with await site.start():
        yield site


async def fails(client: ProviderClient) -> str:
    with pytest.raises(ProviderError) as raised:
        await client.key_set()
    return str(raised.value)


async def test_the_keys_are_where_the_providers_configuration_says(site: Site) -> None:
    assert await site.client().key_set() == KEYS
    assert site.paths == [DISCOVERY_PATH, "/keys"]
    for request in site.requests:
        assert b"authorization" not in request.lower()


async def test_a_configured_address_is_used_without_discovery(site: Site) -> None:
    assert await site.client(jwks_url=f"{site.url}/keys").key_set() == KEYS
    assert site.paths == ["/keys"]


async def test_the_path_of_the_issuer_precedes_the_path_of_its_configuration(site: Site) -> None:
    issuer = f"{site.url}/realms/main/"
    document = {"issuer": issuer, "jwks_uri": f"{site.url}/keys"}
    site.answers[f"/realms/main{DISCOVERY_PATH}"] = ok(json.dumps(document).encode())
    assert await site.client(issuer=issuer).key_set() == KEYS


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "URL/", "jwks_uri": "URL/keys"},
        {"issuer": "https://other.example.org", "jwks_uri": "URL/keys"},
        {"jwks_uri": "URL/keys"},
        {"issuer": ["URL"], "jwks_uri": "URL/keys"},
        {"issuer": "URL"},
        {"issuer": "URL", "jwks_uri": 7},
        {"issuer": "URL", "jwks_uri": "http://127.0.0.1/keys"},
        {"issuer": "URL", "jwks_uri": "https://user:password@127.0.0.1/keys"},
        {"issuer": "URL", "jwks_uri": "file:///etc/passwd"},
        {"issuer": "URL", "jwks_uri": "/keys"},
        {"issuer": "URL", "jwks_uri": "https://[::1"},
        {"issuer": "URL", "jwks_uri": "https://127.0.0.1:99999/keys"},
        {"issuer": "URL", "jwks_uri": "https://127.0.0.1:0/keys"},
        {"issuer": "URL", "jwks_uri": "https://127.0.0.1/\ud800"},
        [],
        None,
    ],
    ids=ascii,
)
async def test_another_configuration_is_refused(site: Site, document: object) -> None:
    site.answers[DISCOVERY_PATH] = ok(json.dumps(document).replace("URL", site.url).encode())
    assert "configuration" in await fails(site.client())
    assert site.paths == [DISCOVERY_PATH]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n", "302"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "404"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "204"),
        (ok(b"x" * (ANSWER_BYTES_MAX + 1)), "more than"),
        (ok(KEYS, "content-encoding: gzip"), "compressed"),
        (ok(KEYS)[:-3], "without sending complete"),
        (b"not http\r\n\r\n", ""),
        (b"", ""),
    ],
    ids=lambda value: value[:24].decode() if isinstance(value, bytes) else value,
)
async def test_an_answer_that_can_not_be_used_is_an_error(site: Site, answer: bytes, told: str) -> None:
    site.answers["/other"] = ok(KEYS)
    for path, client in (("/keys", site.client()), (DISCOVERY_PATH, site.client())):
        site.answers[path] = answer
        assert told in await fails(client)
    assert "/other" not in site.paths


async def test_the_largest_answer_is_accepted(site: Site) -> None:
    site.answers["/keys"] = ok(KEYS.ljust(ANSWER_BYTES_MAX))
    assert len(await site.client().key_set()) == ANSWER_BYTES_MAX


async def test_an_answer_without_end_is_cut_off(site: Site) -> None:
    part = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    site.answers["/keys"] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + part * 10
    assert "more than" in await fails(site.client())


async def test_a_provider_that_does_not_answer_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.auth.provider_client.FETCH_SECONDS", 0.2)
    del site.answers["/keys"]
    assert await fails(site.client())


async def test_a_certificate_of_another_authority_is_refused(site: Site, tmp_path: Path) -> None:
    assert "verify" in (await fails(site.client(trusted=False))).lower()
    other = Authority(tmp_path / "other")
    client = ProviderClient(Provider(issuer=site.url, ca_file=other.certificate))
    assert "verify" in (await fails(client)).lower()
    assert site.requests == []


async def test_a_certificate_of_another_name_is_refused(site: Site) -> None:
    issuer = site.url.replace("127.0.0.1", "localhost")
    assert "verify" in (await fails(site.client(issuer=issuer))).lower()
    assert site.requests == []


async def test_a_changed_file_of_authorities_is_used(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(Authority(tmp_path / "other").certificate.read_bytes())
    client = ProviderClient(Provider(issuer=site.url, ca_file=file))
    await fails(client)
    file.write_bytes(site.ca_file.read_bytes())
    assert await client.key_set() == KEYS
    file.write_text("broken")
    await fails(client)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_of_authorities_that_can_not_be_used_is_named_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match=r"--oidc-ca-file"):
        ProviderClient(Provider(issuer="https://login.example.org", ca_file=file))
