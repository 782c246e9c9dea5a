"""Proxies that the environment names, such as HTTP_PROXY, receive no token, password or body from the clients."""

import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from popgate_client import AsyncClient, Client, GroupNotFound, RequestInvalid, ServerUnreachable
from popgate_client.amqp.management import Management, ManagementUnreachable
from popgate_spark.options import Place
from popgate_spark.proxies import Proxies
from support.proxy import ProxyProcess, popgate_command

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ELSEWHERE = "http://elsewhere.example.org"
TOPIC = "orders.eu"


class CompanyProxy(ThreadingHTTPServer):
    """An HTTP proxy. It answers requests itself, and records them with their credentials."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, CompanyProxy)
        self.server.seen.append((self.path, self.headers["authorization"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.do_GET()

    def do_CONNECT(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def company_proxy() -> Iterator[CompanyProxy]:
    with CompanyProxy() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(params=["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def named(request: pytest.FixtureRequest, company_proxy: CompanyProxy, monkeypatch: pytest.MonkeyPatch) -> CompanyProxy:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(request.param, company_proxy.url)
    return company_proxy


@pytest.fixture(scope="module")
def key_and_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ProxyProcess]]:
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "keys.toml"
    command = popgate_command("keys", "add", "app", "--role", "worker,creator", "--file", str(file))
    key = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with ProxyProcess(folder, "--keys-file", str(file)) as process:
        yield key, process


def publish(url: str, key: str) -> None:
    with Client(url, token=key, retry_seconds_max=0) as client:
        assert client.publish(TOPIC, "x")[0].status == "published"


def publish_with_a_command(url: str, key: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POPGATE_")}
    subprocess.run(
        popgate_command("publish", TOPIC, "x", "--url", url),
        env={**environment, "POPGATE_TOKEN": key},
        check=True,
        capture_output=True,
    )


def read_from_spark(url: str, key: str) -> None:
    place = Place(urls=(url,), token=key, topic=TOPIC, retry_seconds=0.0)
    with Proxies(place) as proxies, pytest.raises(GroupNotFound):
        proxies.lease_stream("billing", "a-stream").groups()


@pytest.mark.parametrize("use", [publish, publish_with_a_command, read_from_spark])
def test_a_token_goes_to_popgate_and_not_to_the_proxy_of_the_environment(
    named: CompanyProxy, key_and_proxy: tuple[str, ProxyProcess], use: Callable[[str, str], None]
) -> None:
    key, process = key_and_proxy
    use(process.url, key)
    assert named.seen == []


async def test_the_asyncio_client_uses_no_proxy_of_the_environment(
    named: CompanyProxy, key_and_proxy: tuple[str, ProxyProcess]
) -> None:
    key, process = key_and_proxy
    async with AsyncClient(process.url, token=key) as client:
        assert (await client.publish(TOPIC, "x"))[0].status == "published"
    assert named.seen == []


@pytest.mark.parametrize("url", [ELSEWHERE, ELSEWHERE.replace("//", "//user:password@")])
def test_a_token_or_a_password_for_another_machine_is_not_sent_to_it_either(named: CompanyProxy, url: str) -> None:
    token = "" if "@" in url else "s3cret"
    with Client(url, token=token, retry_seconds_max=0) as client, pytest.raises(ServerUnreachable):
        client.info()
    assert named.seen == []


async def test_the_password_of_rabbitmqs_management_interface_is_not_sent_to_it(named: CompanyProxy) -> None:
    management = Management("http://user:password@127.0.0.1:1", "/")
    with pytest.raises(ManagementUnreachable, match="ConnectError"):
        await management.look("me", [])
    await management.close()
    assert named.seen == []


def test_a_context_that_a_transport_would_not_use_is_refused() -> None:
    context = ssl.create_default_context()
    with httpx.HTTPTransport() as transport, pytest.raises(RequestInvalid, match="verify=ssl_context"):
        Client("https://popgate.example.org", ssl_context=context, transport=transport)
    with pytest.raises(RequestInvalid, match="verify=ssl_context"):
        AsyncClient("https://popgate.example.org", ssl_context=context, transport=httpx.AsyncHTTPTransport())


def test_a_proxy_that_the_caller_passes_is_used(company_proxy: CompanyProxy) -> None:
    with (
        httpx.HTTPTransport(proxy=company_proxy.url) as transport,
        Client(ELSEWHERE, token="s3cret", transport=transport) as client,
    ):
        client.info()
    assert company_proxy.seen == [(f"{ELSEWHERE}/v1", "Bearer s3cret")]
