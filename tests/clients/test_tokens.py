"""Tokens of the clients: from the environment, a file or a function; renewed, refused, and never sent elsewhere.

The proxies are real, and their keys are made by `popgate keys`.
"""

import asyncio
import json
import logging
import os
import ssl
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from popgate_client import (
    AsyncClient,
    Client,
    Consumer,
    Forbidden,
    LimitExceeded,
    Message,
    RequestInvalid,
    RetryLater,
    ServerFault,
    ServerUnreachable,
    Unauthorized,
    token_in,
)
from support.certificates import MemoryAuthority, write
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command

TOPIC = "orders.eu"


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A proxy with keys. `key` may use topics that begin with `orders.`."""

    process: ProxyProcess
    file: Path
    key: str

    @property
    def url(self) -> str:
        return self.process.url

    def keys(self, *arguments: str) -> str:
        """Run `popgate keys` and return what it prints."""
        command = popgate_command("keys", *arguments, "--file", str(self.file))
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def waits_until_known(self, key: str) -> str:
        with Client(self.url, token=key) as client:
            wait_until(lambda: is_accepted(client), timeout_seconds=5, what="the key to count")
        return key


class TlsProxy(ProxyProcess):
    """A proxy that is ready when it listens, because this test's clients check its certificate."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        super().__init__(folder, *arguments)
        self.url = f"https://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, trust_env=False, verify=False)


def is_accepted(client: Client) -> bool:
    try:
        client.info()
    except Unauthorized:
        return False
    return True


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "keys.toml"
    command = popgate_command(
        "keys", "add", "app", "--role", "worker,creator", "--topics", "orders.*", "--file", str(file)
    )
    key = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with ProxyProcess(folder, "--keys-file", str(file)) as process:
        yield Guarded(process=process, file=file, key=key)


def test_a_token_is_a_text_or_comes_from_the_environment(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(guarded.url) as client, pytest.raises(Unauthorized):
        client.publish(TOPIC, "x")
    with Client(guarded.url, token=guarded.key) as client:
        assert client.publish(TOPIC, "x")[0].status == "published"
    monkeypatch.setenv("POPGATE_TOKEN", guarded.key)
    with Client(guarded.url) as client:
        assert client.publish(TOPIC, "x")[0].status == "published"
    with Client(guarded.url, token="") as client, pytest.raises(Unauthorized):
        client.publish(TOPIC, "x")


def test_the_environment_may_name_a_file(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(guarded.key)
    monkeypatch.setenv("POPGATE_TOKEN_FILE", str(file))
    with Client(guarded.url) as client:
        client.info()
    with Client(guarded.url, token="") as client, pytest.raises(Unauthorized):
        client.info()
    monkeypatch.setenv("POPGATE_TOKEN", "pg_wrong1_" + "a" * 43)
    with Client(guarded.url) as client, pytest.raises(Unauthorized):
        client.info()


def test_a_consumer_needs_no_more_than_the_role_of_that_name(
    guarded: Guarded, running: Callable[[Consumer], AbstractContextManager[Future[None]]]
) -> None:
    topic = "orders.role"
    key = guarded.keys("add", "only-consumer", "--role", "consumer", "--topics", topic)
    with Client(guarded.url, token=key) as own:
        wait_until(lambda: is_accepted(own), timeout_seconds=10, what="the key to count")
    with Client(guarded.url, token=guarded.key) as client:
        client.put_topic(topic, queues=1)
        client.put_group(topic, "only", max_deliveries=4)
        client.publish(topic, "x")
        seen: list[str] = []
        consumer = Consumer(topic, "only", lambda message: seen.append(message.text), base_url=guarded.url, token=key)
        with running(consumer) as run:
            wait_until(lambda: consumer.counters.acked >= 1 or run.done(), timeout_seconds=20, what="the ack")
        assert client.stats(topic, "only")["in_flight"] == 0
    assert seen[-1] == "x"


def test_what_the_key_does_not_allow_is_forbidden_and_names_the_action(guarded: Guarded) -> None:
    with Client(guarded.url, token=guarded.key) as client:
        with pytest.raises(Forbidden) as refused:
            client.publish("payroll", "x")
        assert refused.value.action == "publish"
        with pytest.raises(Forbidden) as refused:
            client.delete_topic(TOPIC)
        assert refused.value.action == "admin"
        assert guarded.key not in str(refused.value) + repr(client)


def test_a_replaced_token_file_leaves_no_gap(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "token"
    first = guarded.keys("add", "app")
    file.write_text(f"{first}\n")
    guarded.waits_until_known(first)
    failures: list[Exception] = []
    stop = threading.Event()

    def publish() -> None:
        with Client(guarded.url, token=token_in(file)) as client:
            while not stop.is_set():
                try:
                    client.publish(TOPIC, "x")
                except Exception as error:
                    failures.append(error)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    second = guarded.waits_until_known(guarded.keys("add", "app"))
    renewed = tmp_path / "renewed"
    renewed.write_text(second)
    renewed.rename(file)
    guarded.keys("revoke", first.split("_")[1])
    with Client(guarded.url, token=first) as client:
        wait_until(lambda: not is_accepted(client), timeout_seconds=5, what="the revocation")
    time.sleep(0.5)
    stop.set()
    thread.join()
    assert failures == []


def test_a_function_is_asked_again_after_a_refusal(guarded: Guarded) -> None:
    given = iter(["pg_wrong1_" + "a" * 43, guarded.key])
    with Client(guarded.url, token=lambda: next(given)) as client:
        assert client.publish(TOPIC, "x")[0].status == "published"
    calls: list[str] = []

    def wrong() -> str:
        calls.append("")
        return "pg_wrong1_" + "a" * 43

    with Client(guarded.url, token=wrong) as client, pytest.raises(Unauthorized):
        client.publish(TOPIC, "x")
    assert len(calls) == 2, "the same token is not tried twice"


def test_a_token_that_can_not_be_fetched_does_not_look_like_an_unreachable_proxy(guarded: Guarded) -> None:
    calls: list[str] = []

    def failing() -> str:
        calls.append("")
        raise httpx.ReadTimeout("https://login.example.org/?secret=s3cret")

    with Client(guarded.url, token=failing) as client, pytest.raises(RetryLater, match="ReadTimeout") as failed:
        client.publish(TOPIC, "x")
    assert not isinstance(failed.value, ServerUnreachable)
    assert not failed.value.outcome_unknown
    assert "s3cret" not in str(failed.value)
    assert len(calls) == 1


def test_a_file_that_is_being_replaced_does_not_end_access(
    guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, second = tmp_path / "token", guarded.waits_until_known(guarded.keys("add", "app"))
    file.write_text(guarded.key)
    with Client(guarded.url, token=token_in(file)) as client, caplog.at_level(logging.WARNING):
        client.info()
        file.unlink()
        client.info()
        client.info()
        assert caplog.text.count("the previous token remains in use") == 1
        for content in ("", "two\nlines", "pässword"):
            file.write_text(content, encoding="utf-8")
            client.info()
        assert caplog.text.count("the previous token remains in use") == 4
        file.write_text(second)
        client.info()
        guarded.keys("revoke", second.split("_")[1])
        wait_until(lambda: not is_accepted(client), timeout_seconds=5, what="the new token to be used")
    assert not [token for token in (guarded.key, second, "pässword") if token in caplog.text]


def test_requests_beyond_a_limit_are_repeated_when_the_server_allows_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    command = popgate_command("keys", "add", "slow", "--role", "worker,creator", "--file", str(file))
    key = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    limited = "[principals.slow]\nlimits = { requests_per_second = 10 }\n"
    assert "[principals.slow]\n" in file.read_text()
    file.write_text(file.read_text().replace("[principals.slow]\n", limited))
    with ProxyProcess(tmp_path, "--keys-file", str(file)) as process:
        with Client(process.url, token=key) as client:
            assert all(client.publish("t", "x")[0].ok for _ in range(25))
        with Client(process.url, token=key, retry_seconds_max=0) as client, pytest.raises(LimitExceeded) as refused:
            all(client.info() for _ in range(25))
    assert refused.value.status == 429
    assert refused.value.retry_after_seconds > 0
    assert "requests_per_second" in refused.value.detail


async def test_the_asyncio_client_and_the_consumer_await_their_token(guarded: Guarded) -> None:
    async def token() -> str:
        await asyncio.sleep(0)
        return guarded.key

    topic = "orders.consumed"
    async with AsyncClient(guarded.url, token=token) as client:
        assert (await client.publish(topic, "to be consumed"))[0].status == "published"
    handled: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(message: Message) -> None:
        handled.put_nowait(message.body)

    consumer = Consumer(topic, "default", handle, base_url=guarded.url, token=token)
    running = asyncio.create_task(consumer.run_async())
    assert await asyncio.wait_for(handled.get(), 20) == b"to be consumed"
    consumer.stop()
    await asyncio.wait_for(running, 20)
    with Client(guarded.url, token=token) as plain, pytest.raises(RequestInvalid, match="async"):  # type: ignore[arg-type]
        plain.info()


def test_a_token_that_can_not_be_sent_is_refused_and_not_shown(guarded: Guarded, tmp_path: Path) -> None:
    for token in ("with\nline end", "pässword", "tab\t", "s3cret ", "two words"):
        with pytest.raises(RequestInvalid) as refused:
            Client(guarded.url, token=token)
        assert refused.value.code == "invalid_request"
        assert token not in str(refused.value)
    missing, empty, other = tmp_path / "missing", tmp_path / "empty", tmp_path / "other"
    empty.touch()
    other.write_bytes(b"\xff\xfe s3cret")
    for file, word in ((missing, "No such file"), (empty, "is empty"), (other, "does not contain")):
        with Client(guarded.url, token=token_in(file)) as client, pytest.raises(RequestInvalid) as refused:
            client.info()
        assert word in str(refused.value)
        assert str(file) in str(refused.value)
        assert "s3cret" not in str(refused.value)


def test_a_redirect_does_not_carry_the_token_away(guarded: Guarded) -> None:
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["authorization"])
            self.send_response(307)
            self.send_header("location", f"http://127.0.0.2:{port}/v1")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("0.0.0.0", 0), Handler)
    port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{port}"
        with Client(url, token=guarded.key) as client, pytest.raises(ServerFault):
            client.info()
    finally:
        server.shutdown()
        server.server_close()
    assert seen == [f"Bearer {guarded.key}"]


async def test_neither_logs_nor_errors_contain_the_token(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    wrong = "pg_wrong1_" + "s3cret" * 7 + "a"
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="httpx"):  # which a test may have muted
        for url in (guarded.url, "http://127.0.0.1:1"):
            with Client(url, token=wrong, retry_seconds_max=0) as client:
                with pytest.raises((Unauthorized, ServerUnreachable)) as refused:
                    client.info()
                shown += [repr(client), *traceback.format_exception(refused.value)]
            async with AsyncClient(url, token=wrong, retry_seconds_max=0) as awaited:
                with pytest.raises((Unauthorized, ServerUnreachable)) as refused:
                    await awaited.info()
                shown += [repr(awaited), repr(refused.value), repr(refused.value.__cause__)]
    assert "HTTP Request: GET" in caplog.text
    assert "s3cret" not in caplog.text + "".join(shown)


def test_a_private_authority_and_a_clients_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, stranger = MemoryAuthority(), MemoryAuthority("another authority")
    certificate, key = write(tmp_path, *authority.issue())
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    file = tmp_path / "keys.toml"
    file.write_text('[principals.app]\nroles = ["worker", "creator"]\ncertificates = ["app.example.org"]\n')
    file.chmod(0o600)
    flags = [f"--tls-certificate-file={certificate}", f"--tls-key-file={key}", "--keys-file", str(file)]
    flags += ["--tls-client-ca-file", str(tmp_path / "ca.pem")]

    def context(*names: str) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        if names:
            issued = authority.issue(*map(x509.DNSName, names))
            made.load_cert_chain(*write(tmp_path, *issued, name="client"))
        return made

    with TlsProxy(tmp_path, *flags) as process:
        with Client(process.url, ssl_context=context("app.example.org")) as client:
            assert client.publish(TOPIC, "x")[0].status == "published"
        with Client(process.url, ssl_context=context("other.example.org")) as client, pytest.raises(Unauthorized):
            client.info()
        with Client(process.url, ssl_context=context()) as client, pytest.raises(Unauthorized):
            client.info()
        with Client(process.url, retry_seconds_max=0) as client, pytest.raises(ServerUnreachable, match="CERTIFICATE"):
            client.info()

        plain = {name: value for name, value in os.environ.items() if not name.startswith(("POPGATE_", "SSL_"))}
        command = popgate_command("topics", "list", "--url", process.url, "--timeout-seconds", "0")

        def said(file: Path | None) -> str:
            named = {} if file is None else {"SSL_CERT_FILE": str(file)}
            return subprocess.run(command, capture_output=True, text=True, env={**plain, **named}, check=False).stderr

        (tmp_path / "other.pem").write_bytes(stranger.pem)
        for file_of_authority in (None, tmp_path / "other.pem"):
            assert "no trusted certificate" in said(file_of_authority)
            assert "SSL_CERT_FILE" in said(file_of_authority)
        assert "can't be read: No such file" in said(tmp_path / "missing.pem")
        assert "requires a valid key" in said(tmp_path / "ca.pem"), "the connection is trusted"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(RequestInvalid, match="the certificates of SSL_CERT_FILE can't be read"):
        Client("https://127.0.0.1:1")


async def test_what_breaks_a_tls_connection_is_an_unreachable_server(tmp_path: Path) -> None:
    """A few bytes of somebody on the way, or of a broken machine there, must not end a consumer."""
    authority = MemoryAuthority()
    certificate, key = write(tmp_path, *authority.issue())
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    clients: list[asyncio.StreamWriter] = []
    relays: set[asyncio.Task[None]] = set()

    with TlsProxy(tmp_path, f"--tls-certificate-file={certificate}", f"--tls-key-file={key}") as process:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            clients.append(writer)
            answers, requests = await asyncio.open_connection("127.0.0.1", process.port)
            for source, sink in ((reader, requests), (answers, writer)):
                relays.add(asyncio.create_task(copied(source, sink)))

        async with await asyncio.start_server(relay, "127.0.0.1") as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
            async with AsyncClient(url, ssl_context=context, retry_seconds_max=0) as client:
                await client.put_topic("t", queues=1)
                await client.put_group("t", "g")
                for garbage in (b"\x17\x03\x03\x00\x20" + b"x" * 32, b"HTTP/1.1 400 Bad Request\r\n\r\n"):
                    waiting = asyncio.create_task(client.pop("t", "g", wait_seconds=20))
                    await asyncio.sleep(0.3)
                    clients[-1].write(garbage)
                    with pytest.raises(ServerUnreachable) as raised:
                        await waiting
                    assert raised.value.outcome_unknown
            for one in relays:
                one.cancel()
            await asyncio.wait(relays)


async def copied(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
    except OSError:
        pass
    finally:
        sink.close()


def test_a_token_over_http_to_another_machine_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Client("http://popgate.example.org", token="s3cret").close()
        assert caplog.text.count("without encryption") == 1, "each host is warned of once"
        assert "s3cret" not in caplog.text
        caplog.clear()
        for url in ("https://popgate.example.org", "http://127.0.0.1:1", "http://localhost", "http://[::1]:1"):
            Client(url, token="s3cret").close()
        assert caplog.text == ""


def test_commands_take_the_token_from_a_file_or_the_environment(guarded: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(guarded.key)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("POPGATE_")}

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = popgate_command(*words, "--url", guarded.url)
        return subprocess.run(command, capture_output=True, text=True, env={**plain, **environment}, check=False)

    refused = run("publish", TOPIC, "x")
    assert refused.returncode == 1
    assert "--token-file" in refused.stderr
    assert run("publish", TOPIC, "x", "--token-file", str(file)).returncode == 0
    assert run("publish", TOPIC, "x", POPGATE_TOKEN=guarded.key).returncode == 0
    assert run("publish", TOPIC, "x", POPGATE_TOKEN_FILE=str(file)).returncode == 0
    assert run("publish", TOPIC, "x", "--token-file", str(file), POPGATE_TOKEN="pg_wrong1_" + "a" * 43).returncode == 0
    forbidden = run("publish", "payroll", "x", POPGATE_TOKEN=guarded.key)
    assert forbidden.returncode == 1
    assert "'publish' on topic payroll" in forbidden.stderr
    assert "--token-file" in forbidden.stderr
    untailed = run("tail", "payroll", POPGATE_TOKEN=guarded.key)
    assert (untailed.returncode, untailed.stderr.count("\n")) == (1, 1), "no group was created that could be left"
    missing = run("topics", "list", "--token-file", str(tmp_path / "missing"))
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "missing can't be read: No such file" in missing.stderr
    unsendable = run("publish", TOPIC, "x", POPGATE_TOKEN=guarded.key + "\n")
    assert unsendable.returncode == 2
    assert "POPGATE_TOKEN" in unsendable.stderr
    popped = run("pop", TOPIC, "--ack", "--output", "json", POPGATE_TOKEN=guarded.key)
    assert json.loads(popped.stdout.splitlines()[0])["body"] == "x"
    for one in (refused, forbidden, missing, unsendable, popped):
        assert guarded.key not in one.stdout + one.stderr
