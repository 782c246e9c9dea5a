"""The sockets on which proxies talk to each other, attacked from outside, with real processes."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.bootstrap.peer_tls import PeerTls, authority, tls_of
from popgate.domain.names import InstanceId
from popgate.ports.claims import Member
from popgate.ports.peers import Learned
from popgate.wire.codec import CODEC
from support.processes import wait_until
from support.proxy import CLUSTER_SECRET
from support.proxy_cluster import ProxyCluster, instance
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

pytestmark = pytest.mark.slow

OURS, FOREIGN = authority(CLUSTER_SECRET.encode()), authority(b"a secret of another cluster")
TOPIC = "/v1/topics/t"
POP = f"{TOPIC}/groups/default/pop"


@pytest.fixture(scope="module")
def proxies(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_server: RedisServer
) -> Iterator[ProxyCluster]:
    folder = tmp_path_factory.mktemp("sockets")
    with ProxyCluster(folder, "--auto-create", "true", nodes=(rabbitmq,), redis=redis_server, size=2) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def claims_of(cluster: ProxyCluster, redis: RedisServer) -> AsyncGenerator[RedisClaims]:
    connection = RedisConnection(parse_address(redis.url()), cluster.vhost)
    try:
        yield RedisClaims(connection)
    finally:
        await connection.close()


@pytest.fixture
def member(proxies: ProxyCluster, redis_server: RedisServer) -> Member:
    """The first proxy, as it is known to the others."""

    async def find() -> Member:
        async with claims_of(proxies, redis_server) as claims:
            observer = Member(InstanceId("observer"), "https://127.0.0.1:1", (1, 1), False)
            view = await claims.join(observer)
            await claims.remove(observer.instance)
            return view.members[InstanceId(instance(proxies.proxies[0]))]

    return asyncio.run(find())


def place(member: Member) -> tuple[str, int]:
    parts = urlsplit(member.address)
    assert (parts.scheme, parts.hostname, parts.port) == ("https", parts.hostname, parts.port)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def request(
    member: Member, tls: PeerTls, path: str = "/v1/peers", body: bytes = b"", *headers: str
) -> tuple[int, dict[str, object]]:
    """Send one request with this certificate, and return the status and the problem. Raises: OSError."""
    with (
        socket.create_connection(place(member), timeout=10) as inner,
        tls.client.wrap_socket(inner) as connection,
    ):
        method = "POST" if body else "GET"
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"popgate-to: {member.instance}", *headers]
        connection.sendall("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            part = connection.recv(65_536)
            if not part:
                raise ConnectionError("it closed the connection")
            answer += part
    head, _, document = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(document)


def without_certificate() -> PeerTls:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.load_verify_locations(cadata=_pem())
    return PeerTls(client=stranger, server=stranger)


def _pem() -> str:
    return OURS.certificate.public_bytes(Encoding.PEM).decode()


def test_members_reach_each_other_over_tls_only(member: Member) -> None:
    with socket.create_connection(place(member), timeout=10) as connection:
        connection.sendall(b"GET /v1/peers HTTP/1.1\r\nhost: localhost\r\npopgate-to: x\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"https_required" in answer


@pytest.mark.parametrize("wrong", ["no certificate", "a foreign authority"])
def test_a_client_without_a_certificate_of_the_cluster_is_refused(member: Member, wrong: str) -> None:
    tls = without_certificate() if wrong == "no certificate" else tls_of(InstanceId("x"), FOREIGN, [OURS])
    with pytest.raises(OSError, match=r"(?i)alert|closed|reset"):
        request(member, tls)


def test_a_foreign_cluster_does_not_trust_it(member: Member) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        request(member, tls_of(InstanceId("x"), FOREIGN, [FOREIGN]))


def test_a_certificate_speaks_for_its_own_instance_only(member: Member, proxies: ProxyCluster) -> None:
    other = instance(proxies.proxies[1])
    tls = tls_of(InstanceId("x"), OURS, [OURS])
    assert request(member, tls, POP, b"{}", f"popgate-passed-by: {other}")[0] == 401
    body = CODEC.encode_message(1, InstanceId(other), Learned(records=()))
    assert request(member, tls, "/v1/peers", body)[0] == 401
    status, problem = request(member, tls, POP, b"{}")
    assert (status, problem["code"]) == (404, "not_found"), "a client's request is not served there"


def test_the_socket_for_clients_ignores_the_headers_of_peers(proxies: ProxyCluster) -> None:
    client, other = proxies.proxies[0].client, instance(proxies.proxies[1])
    forged = {"popgate-passed-by": other, "popgate-wait-seconds": "0", "popgate-to": instance(proxies.proxies[0])}
    assert client.get("/v1/peers", headers=forged).status_code == 404
    assert client.post("/v1/peers", headers=forged, content=b"x").status_code == 404
    client.post(f"{TOPIC}/messages", json={"messages": [{"body": "x"}]})
    client.post(POP, json={"wait_seconds": 2})
    began = time.monotonic()
    caller = {**forged, "popgate-caller": '{"n":"root","c":"k"}', "popgate-client-id": "eve"}
    assert client.post(POP, json={"wait_seconds": 0.5}, headers=caller).status_code == 200
    assert time.monotonic() - began >= 0.4


def test_a_recorded_connection_can_not_be_replayed(member: Member) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = tls_of(InstanceId("x"), OURS, [OURS]).client.wrap_bio(incoming, outgoing)
    recorded: list[bytes] = []
    with socket.create_connection(place(member), timeout=10) as connection:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                recorded.append(outgoing.read())
                connection.sendall(recorded[-1])
                incoming.write(connection.recv(65_536))
            else:
                break
        wrapped.write(f"GET /v1/peers HTTP/1.1\r\nhost: x\r\npopgate-to: {member.instance}\r\n\r\n".encode())
        recorded.append(outgoing.read())
        connection.sendall(recorded[-1])
        incoming.write(connection.recv(65_536))
        assert wrapped.read(12) == b"HTTP/1.1 200"
    with socket.create_connection(place(member), timeout=10) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for data in recorded:
                connection.sendall(data)
                time.sleep(0.1)
            while part := connection.recv(65_536):
                answer += part
    assert b"HTTP/1.1" not in answer
    assert len(answer) < 8_192, "the server's part of a handshake, and an alert"


class Listener:
    """A program at an address, which records every byte that it receives."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.received: list[bytes] = []
        self.decrypted: list[bytes] = []
        self._context = context
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"https://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        with connection, contextlib.suppress(OSError):
            if self._context is None:
                while data := connection.recv(65_536):
                    self.received.append(data)
                return
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            wrapped = self._context.wrap_bio(incoming, outgoing, server_side=True)
            while data := connection.recv(65_536):
                self.received.append(data)
                incoming.write(data)
                with contextlib.suppress(ssl.SSLWantReadError):
                    wrapped.do_handshake()
                    self.decrypted.append(wrapped.read(65_536))
                connection.sendall(outgoing.read())

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None) -> Generator[Listener]:
    listener = Listener(context)
    try:
        yield listener
    finally:
        listener.close()


def careless() -> ssl.SSLContext:
    """Return the context of a server with a foreign certificate, which lets every client in."""
    context = tls_of(InstanceId("false"), FOREIGN, [FOREIGN]).server
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("kind", ["plain", "foreign certificate"])
def test_a_false_address_in_redis_gets_no_request(
    tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer, kind: str
) -> None:
    with (
        ProxyCluster(tmp_path, "--auto-create", "true", nodes=(rabbitmq,), redis=redis_server, size=2) as cluster,
        listening(None if kind == "plain" else careless()) as listener,
    ):
        client = cluster.proxies[0].client
        for number in range(8):
            client.post(f"/v1/topics/t{number}/messages", json={"messages": [{"body": "a secret body"}]})

        async def pretend() -> None:
            async with claims_of(cluster, redis_server) as claims:
                false = Member(InstanceId("false"), listener.address, (1, 1))
                version = (await claims.join(false)).version
                for _ in range(8):
                    view = await claims.beat(false.instance, version)
                    if view is not None:
                        version = view.version
                        mine = [queue for queue, owner in view.owners.items() if owner == false.instance]
                        await claims.claim(false.instance, [*view.owners, *mine])
                    for number in range(8):
                        await asyncio.to_thread(
                            client.post,
                            f"/v1/topics/t{number}/groups/default/pop",
                            json={"wait_seconds": 0},
                            headers={"authorization": "Bearer pg_not_for_the_listener"},
                        )
                    await asyncio.sleep(0.25)
                await claims.remove(false.instance)

        asyncio.run(pretend())
        assert listener.received, "the proxies tried to reach it"
        assert listener.decrypted == []
        for data in listener.received:
            assert data[0] in (0x14, 0x15, 0x16), "records of a handshake, or an alert"
            for word in (b"popgate-", b"POST", b"GET", b"pg_", b"a secret body", b"msgpack"):
                assert word not in data
        if kind == "foreign certificate":
            wanted = "a proxy has another secret, or another program is at its address"
            wait_until(
                lambda: any(wanted in proxy.output for proxy in cluster.proxies),
                timeout_seconds=5,
                what="the log to say it",
            )
