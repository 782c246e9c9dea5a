"""The TLS transport: how it reports the end of a connection."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from popgate.runtime.tls_transport import TlsTransport
from support.tls import Authority


class Answering(asyncio.Protocol):
    """Answers each request, and notes how the connection ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(b"answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)


@pytest.mark.parametrize("pause_seconds", [0.0, 0.05])
async def test_a_client_that_closes_in_order_has_not_reset_the_connection(tmp_path: Path, pause_seconds: float) -> None:
    """It closes its socket a moment after its close_notify. An answer to that, unread, would make its kernel send RST,
    and the newest answer would count as unread.
    """
    authority = Authority(tmp_path / "authority")
    own, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    own.load_cert_chain(*authority.certify("server"))
    client.load_verify_locations(authority.certificate)
    protocol = Answering()

    def accepted() -> TlsTransport:
        return TlsTransport(own, server_side=True, on_open=lambda _: protocol, on_failed=lambda error: None)

    async with await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        async def ask() -> None:
            connection = client.wrap_socket(
                await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port)),
                server_hostname="127.0.0.1",
                do_handshake_on_connect=False,
            )
            await asyncio.to_thread(connection.do_handshake)
            await asyncio.to_thread(connection.sendall, b"request")
            assert await asyncio.to_thread(connection.recv, 100) == b"answer"
            connection.setblocking(False)
            with pytest.raises(ssl.SSLWantReadError):
                connection.unwrap()  # sends close_notify
            await asyncio.sleep(pause_seconds)
            connection.close()

        await ask()
        assert await asyncio.wait_for(protocol.ended, 5) is None
