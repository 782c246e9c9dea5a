"""The AMQP consumer and RabbitMQ's management interface: the password stays secret, and the server is verified."""

import logging
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from popgate_client.amqp.management import Management, ManagementUnreachable
from support.certificates import MemoryAuthority, write
from support.rabbitmq import RabbitNode

USER, PASSWORD = "hunter", "hunter2/+p@ss"
USERINFO = "hunter:hunter2%2F%2Bp%40ss"


@contextmanager
def answering(status: int, content: bytes = b"[]", context: ssl.SSLContext | None = None) -> Generator[int]:
    """Run a server that gives one answer to every request, and yield its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


async def members(url: str) -> list[str]:
    """Return the members of a group that has none besides the caller."""
    management = Management(url, "/")
    try:
        return [*(await management.look("me", [])).members]
    finally:
        await management.close()


async def test_neither_the_log_nor_an_error_contains_the_password(
    rabbitmq: RabbitNode, caplog: pytest.LogCaptureFixture
) -> None:
    rabbitmq.api("PUT", "users", USER, body={"password": PASSWORD, "tags": "administrator"})
    rabbitmq.api("PUT", "permissions", "/", USER, body={"configure": "", "write": "", "read": ".*"})
    said: list[str] = []
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="httpx"), answering(500) as port:
        try:
            assert await members(f"http://{USERINFO}@127.0.0.1:{rabbitmq.management_port}") == ["me"]
        finally:
            rabbitmq.api("DELETE", "users", USER)
        for failing in (port, 1):
            with pytest.raises(ManagementUnreachable) as raised:
                await members(f"http://{USERINFO}@127.0.0.1:{failing}")
            said.append(str(raised.value))
    assert "/api/consumers" in caplog.text
    assert "500 Internal Server Error" in said[0]
    assert "hunter2" not in caplog.text + "".join(said)


async def test_the_server_must_have_a_certificate_of_a_trusted_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = MemoryAuthority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*write(tmp_path, *authority.issue()))
    with answering(200, context=context) as port:
        url = f"https://{USERINFO}@127.0.0.1:{port}"
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(ManagementUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            await members(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await members(url) == ["me"]
