"""Certificates that proxies make from their cluster's secrets, and what each side of a connection accepts."""

import asyncio
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from popgate.adapters.peers.identity import named_instance
from popgate.bootstrap.peer_tls import Authority, PeerTls, authority, peer_tls, tls_of
from popgate.domain.names import InstanceId
from popgate.runtime.tls_transport import TlsTransport

A, B = InstanceId("a"), InstanceId("b")
ONE, TWO = authority(b"a secret of sixteen bytes"), authority(b"another secret of this length")


def public(one: Authority) -> bytes:
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return one.key.public_key().public_bytes(*form)


def shake(client: PeerTls, server: PeerTls) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Return both sides of a connection after its handshake. Raises: ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.client.wrap_bio(to_client, to_server),
        server.server.wrap_bio(to_server, to_client, server_side=True),
    )
    done: set[ssl.SSLObject] = set()
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert len(done) == 2
    return sides


def test_the_same_secret_gives_the_same_authority_and_another_secret_another_one() -> None:
    again = authority(b"a secret of sixteen bytes")
    assert public(again) == public(ONE) != public(TWO)
    assert again.certificate.subject == ONE.certificate.subject != TWO.certificate.subject
    (name,) = (str(part.value) for part in ONE.certificate.subject)
    assert name.startswith("popgate cluster ")


def test_the_secret_is_not_in_a_certificate() -> None:
    assert b"a secret of sixteen bytes" not in ONE.certificate.public_bytes(serialization.Encoding.DER)


def test_proxies_of_a_cluster_know_each_other_by_their_instances() -> None:
    client, server = shake(tls_of(A, ONE, [ONE]), tls_of(B, ONE, [ONE]))
    assert (named_instance(client), named_instance(server)) == (B, A)
    assert client.version() == server.version() == "TLSv1.3"


def test_each_start_has_a_key_of_its_own() -> None:
    keys: set[bytes] = set()
    for _ in range(2):
        client, _ = shake(tls_of(A, ONE, [ONE]), tls_of(B, ONE, [ONE]))
        found = client.getpeercert(binary_form=True)
        assert found is not None
        certificate = x509.load_der_x509_certificate(found)
        form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        keys.add(certificate.public_key().public_bytes(*form))
    assert len(keys) == 2


def test_the_first_secret_issues_and_all_are_trusted() -> None:
    first, second = b"a secret of sixteen bytes", b"another secret of this length"
    both, only_new = peer_tls(A, [first, second]), tls_of(B, TWO, [TWO, ONE])
    shake(both, only_new)
    shake(only_new, both)
    found = shake(both, only_new)[1].getpeercert()
    assert found is not None
    assert ONE.certificate.subject.rfc4514_string() == f"CN={found['issuer'][0][0][1]}"


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (tls_of(A, TWO, [TWO]), tls_of(B, ONE, [ONE])),
        (tls_of(A, TWO, [TWO, ONE]), tls_of(B, ONE, [ONE])),
        (tls_of(A, ONE, [ONE]), tls_of(B, TWO, [TWO, ONE])),
    ],
)
def test_proxies_without_a_common_secret_do_not_connect(mine: PeerTls, theirs: PeerTls) -> None:
    with pytest.raises(ssl.SSLError):
        shake(mine, theirs)


def test_old_versions_are_not_spoken_and_a_certificate_is_required() -> None:
    tls = tls_of(B, ONE, [ONE])
    for context in (tls.client, tls.server):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        shake(PeerTls(client=stranger, server=tls.server), tls)


# ---------------------------------------------------------------- the transport


class Wire(asyncio.Transport):
    """An inner transport that passes bytes to the other side when `deliver` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = self.has_eof = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        self.has_eof = True


class Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.events: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.events.append(data)

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(exc)


class Side:
    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.protocol, self.wire, self.failures = Recorder(), Wire(), list[Exception]()
        self.tls = TlsTransport(
            context, server_side=server_side, on_open=lambda _: self.protocol, on_failed=self.failures.append
        )
        self.tls.connection_made(self.wire)


def deliver(*sides: Side) -> None:
    one, other = sides
    while one.wire.written or other.wire.written:
        for source, target in ((one, other), (other, one)):
            data, source.wire.written = b"".join(source.wire.written), []
            if data:
                target.tls.data_received(data)


@pytest.fixture
def sides() -> tuple[Side, Side]:
    client = Side(tls_of(A, ONE, [ONE]).client, server_side=False)
    server = Side(tls_of(B, ONE, [ONE]).server, server_side=True)
    deliver(client, server)
    assert client.protocol.events == server.protocol.events == ["made"]
    return client, server


async def test_bytes_of_any_number_arrive_in_order(sides: tuple[Side, Side]) -> None:
    client, server = sides
    sent = bytes(range(256)) * 4_000
    client.tls.write(sent[:1])
    client.tls.write(memoryview(sent)[1:])
    assert client.tls.wire_bytes > len(sent)
    deliver(client, server)
    assert b"".join(one for one in server.protocol.events if isinstance(one, bytes)) == sent
    server.tls.writelines([b"an", b"swer"])
    deliver(client, server)
    assert client.protocol.events == ["made", b"answer"]


async def test_what_is_behind_the_handshake_in_one_read_is_not_lost() -> None:
    client = Side(tls_of(A, ONE, [ONE]).client, server_side=False)
    server = Side(tls_of(B, ONE, [ONE]).server, server_side=True)
    server.tls.data_received(b"".join(client.wire.written))
    client.wire.written = []
    client.tls.data_received(b"".join(server.wire.written))
    client.tls.write(b"request")
    server.tls.data_received(b"".join(client.wire.written))
    assert server.protocol.events == ["made", b"request"]


async def test_a_close_is_announced_answered_and_reported_once(sides: tuple[Side, Side]) -> None:
    client, server = sides
    client.tls.write(b"last")
    client.tls.close()
    client.tls.write(b"too late")
    deliver(client, server)
    assert client.wire.is_closed
    assert server.protocol.events == ["made", b"last"], "a reset may still come"
    assert server.tls.is_closing()
    server.tls.eof_received()
    server.tls.connection_lost(None)
    assert server.protocol.events == ["made", b"last", "eof", None]


async def test_a_reset_behind_the_announced_end_is_reported_as_a_reset(sides: tuple[Side, Side]) -> None:
    client, server = sides
    client.tls.close()
    deliver(client, server)
    reset = ConnectionResetError()
    server.tls.connection_lost(reset)
    assert server.protocol.events == ["made", reset]


async def test_an_altered_byte_ends_the_connection(sides: tuple[Side, Side]) -> None:
    client, server = sides
    client.tls.write(b"request")
    data = bytearray(b"".join(client.wire.written))
    data[-1] ^= 1
    server.tls.data_received(bytes(data))
    assert server.wire.is_closed
    server.tls.connection_lost(None)
    assert isinstance(server.protocol.events[1], ssl.SSLError)


async def test_a_recorded_connection_can_not_be_replayed() -> None:
    recorded: list[bytes] = []
    client = Side(tls_of(A, ONE, [ONE]).client, server_side=False)
    tls = tls_of(B, ONE, [ONE])
    first = Side(tls.server, server_side=True)
    client.protocol.connection_made = lambda transport: client.tls.write(b"purge")  # type: ignore[method-assign]
    while client.wire.written or first.wire.written:
        recorded += client.wire.written
        data, client.wire.written = b"".join(client.wire.written), []
        if data:
            first.tls.data_received(data)
        data, first.wire.written = b"".join(first.wire.written), []
        if data:
            client.tls.data_received(data)
    assert first.protocol.events == ["made", b"purge"]
    second = Side(tls.server, server_side=True)
    for data in recorded:
        second.tls.data_received(data)
    assert second.protocol.events == []
    assert len(second.failures) == 1
