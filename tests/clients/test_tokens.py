"""Tokens of the clients: from the environment, a file or a function; renewed, refused, and never sent elsewhere.

The proxies are real, and their keys are made by `popgate keys`.
"""

import asyncio
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from popgate_client import AsyncClient, Client, Consumer, Forbidden, Message, RequestInvalid, Unauthorized, token_in
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
    for token in ("with\nline end", "pässword", "tab\t"):
        with pytest.raises(RequestInvalid) as refused:
            Client(guarded.url, token=token)
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
        with Client(url, token=guarded.key) as client, pytest.raises(RequestInvalid):
            client.info()
    finally:
        server.shutdown()
        server.server_close()
    assert seen == [f"Bearer {guarded.key}"]


def test_a_token_over_http_to_another_machine_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Client("http://popgate.example.org", token="s3cret").close()
        assert "without encryption" in caplog.text
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
    forbidden = run("publish", "payroll", "x", POPGATE_TOKEN=guarded.key)
    assert forbidden.returncode == 1
    assert "publish" in forbidden.stderr
    popped = run("pop", TOPIC, "--ack", "--output", "json", POPGATE_TOKEN=guarded.key)
    assert json.loads(popped.stdout.splitlines()[0])["body"] == "x"
    for one in (refused, forbidden, popped):
        assert guarded.key not in one.stdout + one.stderr
