"""The HTTP interface over TLS, over real sockets: handshakes, large answers, and clients that leave or do not read."""

import _ssl
import contextlib
import ctypes
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from contract.http_server import Topic, put
from popgate.cli.endings import ExitCode
from support.certificates import MemoryAuthority, write
from support.key_files import KeyFile, everything
from support.processes import wait_until
from support.proxy import ProxyProcess

MIB = 1 << 20
HEAD_SECONDS = 1.0
IDLE_SECONDS = 2.0
CONNECTIONS_MAX = 200
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
AUTHORITY = MemoryAuthority()


class TlsProxy(ProxyProcess):
    """A proxy that serves https with a certificate of ``AUTHORITY``."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.certificate_file, self.key_file = write(folder, *AUTHORITY.issue())
        files = ("--tls-certificate-file", str(self.certificate_file), "--tls-key-file", str(self.key_file))
        super().__init__(folder, "--auto-create", "true", *files, *arguments)
        self.url = f"https://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=40, trust_env=False, verify=trusting(AUTHORITY))


def trusting(authority: MemoryAuthority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.pem.decode())
    return context


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsProxy]:
    limits = ("--head-seconds", str(HEAD_SECONDS), "--connection-idle-seconds", str(IDLE_SECONDS))
    folder = tmp_path_factory.mktemp("tls")
    with TlsProxy(folder, *limits, "--connections-max", str(CONNECTIONS_MAX)) as process:
        yield process


@pytest.fixture
def topic(proxy: TlsProxy) -> Topic:
    topic = Topic(proxy.client, f"t-{time.monotonic_ns()}")
    put(topic.client, topic.admin_path, {"queues": 1})
    put(topic.client, f"{topic.admin_path}/groups/default")
    topic.pop()
    return topic


@contextlib.contextmanager
def tcp(proxy: ProxyProcess, *, window: int | None = None) -> Generator[socket.socket]:
    with socket.socket() as connection:
        if window is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        connection.settimeout(15)
        connection.connect(("127.0.0.1", proxy.port))
        yield connection


@contextlib.contextmanager
def tls(
    proxy: ProxyProcess, context: ssl.SSLContext | None = None, *, window: int | None = None
) -> Generator[ssl.SSLSocket]:
    with (
        tcp(proxy, window=window) as inner,
        (context or trusting(AUTHORITY)).wrap_socket(inner, server_hostname="127.0.0.1") as connection,
    ):
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server ends the connection, which TLS must do with close_notify."""
    data = b""
    while part := connection.recv(65_536):
        data += part
    return data


def open_connections(proxy: ProxyProcess) -> int:
    found = proxy.client.get("/metrics").text.splitlines()
    return int(float(next(line for line in found if line.startswith("popgate_http_conn")).rpartition(" ")[2])) - 1


# ---------------------------------------------------------------- the handshake


def test_new_versions_of_tls_are_spoken_and_old_ones_are_not(proxy: TlsProxy) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = trusting(AUTHORITY)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        with tls(proxy, context) as connection:
            assert connection.selected_alpn_protocol() == "http/1.1"
            assert connection.compression() is None
            cipher = connection.cipher()
            assert cipher is not None
            assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
            connection.sendall(HEALTH)
            assert connection.recv(12) == b"HTTP/1.1 200"
    context = trusting(AUTHORITY)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError), tls(proxy, context):
        pass
    context = trusting(AUTHORITY)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA:ECDHE-ECDSA-AES128-SHA256")
    with pytest.raises(ssl.SSLError, match=r"(?i)handshake.failure"), tls(proxy, context):
        pass


def test_plain_http_is_answered_with_a_hint(proxy: TlsProxy) -> None:
    answer = httpx.get(f"http://127.0.0.1:{proxy.port}/healthz", trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (400, "https_required")


@pytest.mark.parametrize("garbage", [b"\x00" * 100, b"\x16\x03\x01\x00\x05hello", b"\x80\x2e\x01", b"\xff" * 70_000])
def test_garbage_ends_the_connection_at_once(proxy: TlsProxy, garbage: bytes) -> None:
    with tcp(proxy) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            connection.sendall(garbage)
            read_all(connection)
        # An incomplete record is only known to be one when its time is up.
        assert time.monotonic() - began < HEAD_SECONDS + 1


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_does_not_go_on_ends_in_time(proxy: TlsProxy, sent: bytes) -> None:
    with tcp(proxy) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert HEAD_SECONDS / 2 < time.monotonic() - began < HEAD_SECONDS + 1.5


def test_a_slow_handshake_does_not_get_more_time(proxy: TlsProxy) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = trusting(AUTHORITY).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        wrapped.do_handshake()
    hello = outgoing.read()
    with tcp(proxy) as connection:
        began = time.monotonic()
        sent = 0
        with contextlib.suppress(ConnectionError):
            for sent in range(len(hello)):
                connection.sendall(hello[sent : sent + 1])
                time.sleep(0.1)
        assert sent < len(hello) - 1
        assert time.monotonic() - began < HEAD_SECONDS + 1.5


KEY_UPDATES = 100_000


@contextlib.contextmanager
def openssl(proxy: TlsProxy, *, window: int | None = None) -> Generator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    """Connect with the OpenSSL library that Python uses, because Python offers no KeyUpdate."""
    library = ctypes.CDLL(_ssl.__file__)
    if not hasattr(library, "SSL_key_update"):
        pytest.skip("Python's OpenSSL is not a shared library")
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
    client = ctypes.c_void_p(library.SSL_new(context))
    with tcp(proxy, window=window) as connection:
        connection.settimeout(None)  # OpenSSL uses the descriptor itself
        library.SSL_set_fd(client, connection.fileno())
        assert library.SSL_connect(client) == 1
        yield library, client
    library.SSL_free(client)
    library.SSL_CTX_free(context)


@pytest.mark.parametrize("head_bytes_every", [KEY_UPDATES, 1_000], ids=["nothing else", "and a byte of a head"])
def test_a_flood_of_key_updates_ends_the_connection(proxy: TlsProxy, head_bytes_every: int) -> None:
    with openssl(proxy) as (library, client):
        sent = 0
        while sent < KEY_UPDATES and library.SSL_key_update(client, 0) == 1 and library.SSL_do_handshake(client) == 1:
            sent += 1
            if sent % head_bytes_every == 0 and library.SSL_write(client, b"G", 1) != 1:
                break
    assert 0 < sent < KEY_UPDATES
    wait_until(lambda: open_connections(proxy) == 0, timeout_seconds=5, what="the connection to end")


def test_a_client_that_does_not_read_the_answers_to_its_key_updates_is_ended(proxy: TlsProxy) -> None:
    """Each byte of the body permits more of them."""
    head = b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    with openssl(proxy, window=4_096) as (library, client):
        assert library.SSL_write(client, head, len(head)) == len(head)
        sent = 0
        while (
            sent < 8 * KEY_UPDATES and library.SSL_key_update(client, 1) == 1 and library.SSL_do_handshake(client) == 1
        ):
            sent += 1
            if library.SSL_write(client, b" ", 1) != 1:
                break
    assert 0 < sent < 8 * KEY_UPDATES


def test_many_tiny_records_are_no_flood(proxy: TlsProxy) -> None:
    with tls(proxy) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            for byte in HEALTH:
                connection.sendall(bytes([byte]))
            answer = b""
            while not answer.endswith(b"}"):
                part = connection.recv(4_096)
                assert part, "the connection ended"
                answer += part


def test_silent_handshakes_do_not_keep_a_client_out(proxy: TlsProxy) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * CONNECTIONS_MAX):
            stack.enter_context(tcp(proxy))
        for _ in range(3):
            began = time.monotonic()
            with tls(proxy) as connection:
                connection.sendall(HEALTH)
                assert connection.recv(12) == b"HTTP/1.1 200"
            assert time.monotonic() - began < 2
    wait_until(lambda: open_connections(proxy) == 0, timeout_seconds=5, what="the handshakes to end")


def test_a_client_beyond_the_limit_reads_why_it_is_refused(tmp_path: Path) -> None:
    head = b"POST /v1/topics/t/groups/g/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n"
    pop = head + b'{"wait_seconds": 30}'
    with TlsProxy(tmp_path, "--connections-max", "8") as proxy, contextlib.ExitStack() as stack:
        proxy.client.close()
        parked = [stack.enter_context(tls(proxy)) for _ in range(6)]
        answered = [stack.enter_context(tls(proxy)) for _ in range(2)]
        for connection in parked:
            connection.sendall(pop)
        for connection in answered:  # such clients are not closed for room
            connection.sendall(HEALTH)
            assert connection.recv(12) == b"HTTP/1.1 200"
        with tls(proxy) as connection:
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"overloaded"' in answer


# ---------------------------------------------------------------- answers


def test_a_large_answer_arrives_whole_although_the_server_closes_and_the_client_reads_slowly(
    proxy: TlsProxy, topic: Topic
) -> None:
    topic.publish("x" * 8 * MIB)
    body = b'{"wait_seconds": 2}'
    with tls(proxy, window=8_192) as connection:
        head = f"POST {topic.group_path}/pop HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received, began = b"", time.monotonic()
        while part := connection.recv(65_536):
            received += part
            if time.monotonic() - began < 4:  # longer than the server waits for a client that reads nothing
                time.sleep(0.2)
    assert received.count(b"x") >= 8 * MIB
    assert received.endswith(b"}")


def test_a_refusal_behind_answers_that_were_not_read_cuts_nothing_off(proxy: TlsProxy, topic: Topic) -> None:
    """The client pipelines a pop and an invalid request, and begins to read only after the goodbye's time."""
    topic.publish("x" * 4 * MIB)
    body = b'{"wait_seconds": 2}'
    with tls(proxy, window=8_192) as connection:
        head = f"POST {topic.group_path}/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = connection.recv(1_000)
        connection.sendall(b"nonsense\r\n\r\n")
        began = time.monotonic()
        while part := connection.recv(65_536):
            received += part
            if time.monotonic() - began < 3:
                time.sleep(0.1)
    assert received.count(b"x") >= 4 * MIB
    assert b"HTTP/1.1 400" in received


def test_a_client_that_does_not_read_is_noticed_and_costs_no_more_memory(proxy: TlsProxy, topic: Topic) -> None:
    topic.publish("x" * 4 * MIB)
    process = psutil.Process(proxy.pid)
    body = b'{"wait_seconds": 2, "invisibility_seconds": 300}'
    head = f"POST {topic.group_path}/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with tls(proxy, window=4_096) as connection:
        connection.sendall(head.encode() + body)
        connection.recv(100)
        before = process.memory_info().rss
        asked = 0
        with contextlib.suppress(OSError):
            connection.settimeout(1)
            for _ in range(100_000):  # none of them is answered before the first answer is read
                asked += connection.send(HEALTH * 100)
        assert asked < 16 * MIB
        assert process.memory_info().rss - before < 32 * MIB
        wait_until(
            lambda: topic.state()["ready"] == 1, timeout_seconds=2 * IDLE_SECONDS + 3, what="the lease to be undone"
        )
    wait_until(lambda: open_connections(proxy) == 0, timeout_seconds=5, what="the connection to end")


def test_a_large_body_is_received_whole(topic: Topic) -> None:
    body = "".join(chr(97 + number % 26) for number in range(8 * MIB))
    topic.publish(body)
    assert topic.pop_one(wait_seconds=5)["body"] == body


# ---------------------------------------------------------------- clients that leave


def close_notify(connection: ssl.SSLSocket) -> None:
    """End TLS in order, and then the connection, as most libraries do."""
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        connection.unwrap()
    connection.close()


def fin(connection: ssl.SSLSocket) -> None:
    connection.close()


def reset(connection: ssl.SSLSocket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


ENDS: dict[str, Callable[[ssl.SSLSocket], None]] = {"close_notify": close_notify, "FIN": fin, "RST": reset}


def pop_request(topic: Topic, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {topic.group_path}/pop HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def send_pop(connection: ssl.SSLSocket, topic: Topic, **fields: Any) -> None:
    connection.sendall(pop_request(topic, **fields))


def parked_pops(topic: Topic) -> int:
    wanted = f'popgate_parked_pops{{group="{topic.group}",topic="{topic.name}"}} '
    lines = topic.client.get("/metrics").text.splitlines()
    return next(int(float(line.removeprefix(wanted))) for line in lines if line.startswith(wanted))


@pytest.mark.parametrize("end", ENDS)
def test_a_parked_pop_whose_client_has_gone_takes_no_message(proxy: TlsProxy, topic: Topic, end: str) -> None:
    with tls(proxy) as connection:
        send_pop(connection, topic, wait_seconds=30)
        wait_until(lambda: parked_pops(topic) == 1, timeout_seconds=5, what="the pop to wait")
        ENDS[end](connection)
        wait_until(lambda: parked_pops(topic) == 0, timeout_seconds=2, what="the pop to end")
    topic.publish("x")
    assert topic.pop_one()["delivery_count"] == 1


def test_leases_are_undone_if_the_client_has_ended_its_side_before_the_answer(proxy: TlsProxy, topic: Topic) -> None:
    topic.publish("x")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(AUTHORITY).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with tcp(proxy) as connection:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
            connection.sendall(outgoing.read())
            incoming.write(connection.recv(65_536))
        client.write(pop_request(topic))
        with contextlib.suppress(ssl.SSLWantReadError):
            client.unwrap()
        connection.sendall(outgoing.read())  # the request and close_notify together; the socket stays open
        time.sleep(0.1)
        assert topic.pop_one(wait_seconds=5)["delivery_count"] == 2


@pytest.mark.parametrize("end", ["FIN", "RST"])
@pytest.mark.parametrize("size", [1, MIB])
def test_leases_of_an_answer_that_was_not_read_are_undone(proxy: TlsProxy, topic: Topic, end: str, size: int) -> None:
    topic.publish("x" * size)
    with tls(proxy, window=4_096) as connection:
        send_pop(connection, topic, wait_seconds=2)
        wait_until(lambda: topic.state()["in_flight"] == 1, timeout_seconds=5, what="the answer")
        ENDS[end](connection)
    assert topic.pop_one(wait_seconds=5)["delivery_count"] == 2


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, MIB])
def test_a_client_that_read_its_answer_keeps_its_leases(proxy: TlsProxy, topic: Topic, end: str, size: int) -> None:
    topic.publish("x" * size)
    with tls(proxy) as connection:
        send_pop(connection, topic, wait_seconds=2)
        received = b""
        while received.count(b"}") < 2:
            received += connection.recv(65_536)
        if end == "RST":
            time.sleep(1.2)  # a reset right after an answer means that it was not read
        ENDS[end](connection)
    assert topic.pop(wait_seconds=0.5) == []


# ---------------------------------------------------------------- certificates


NAMES: dict[str, Callable[[], x509.GeneralName]] = {
    "a directory": lambda: x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "of a directory")])),
    "an OID": lambda: x509.RegisteredID(x509.ObjectIdentifier("1.2.3.4")),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_client_certificate_with_an_unusual_name_is_an_unknown_caller_and_keeps_no_place(
    tmp_path: Path, name: str
) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    admin = keys.principal("admin", everything())
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    files = write(tmp_path, *AUTHORITY.issue(NAMES[name](), x509.DNSName("client.example")), name="client")
    flags = ("--keys-file", str(keys.path), "--tls-client-ca-file", str(tmp_path / "ca.pem"), "--connections-max", "20")
    context = trusting(AUTHORITY)
    context.load_cert_chain(*files)
    with TlsProxy(tmp_path / "proxy", *flags) as guarded:
        for _ in range(25):
            with tls(guarded, context) as connection:
                connection.sendall(b"GET /v1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.1 401"
        assert guarded.client.get("/v1", headers=admin.headers).status_code == 200
        assert "Traceback" not in guarded.output


@pytest.mark.parametrize(
    ("authority", "valid_for", "reason"),
    [
        (MemoryAuthority("another authority"), timedelta(days=1), "unable to get local issuer certificate"),
        (AUTHORITY, timedelta(minutes=-1), "certificate has expired"),
    ],
)
def test_a_refused_client_certificate_is_in_the_audit_log(
    tmp_path: Path, authority: MemoryAuthority, valid_for: timedelta, reason: str
) -> None:
    keys, audit = KeyFile(tmp_path / "keys.toml"), tmp_path / "audit.jsonl"
    keys.principal("admin", everything())
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    context = trusting(AUTHORITY)
    context.load_cert_chain(
        *write(tmp_path, *authority.issue(x509.DNSName("client.example"), valid_for=valid_for), name="client")
    )
    flags = ("--keys-file", str(keys.path), "--tls-client-ca-file", str(tmp_path / "ca.pem"), "--audit-log", str(audit))
    with TlsProxy(tmp_path / "proxy", *flags) as guarded:
        with contextlib.suppress(ssl.SSLError, ConnectionError), tls(guarded, context) as connection:
            connection.sendall(HEALTH)
            connection.recv(1)
        wait_until(lambda: audit.read_bytes().endswith(b"\n"), timeout_seconds=10, what="the record")
    record = json.loads(audit.read_text())
    del record["time"]
    expected = {"event": "denied", "operation": "tls_handshake", "reason": reason, "address": "127.0.0.1"}
    assert record == expected


def served_serial(proxy: TlsProxy, authority: MemoryAuthority = AUTHORITY) -> str:
    with tls(proxy, trusting(authority)) as connection:
        found = connection.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_a_changed_certificate_is_used_for_new_connections_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    with TlsProxy(tmp_path) as proxy, tls(proxy) as connection:
        first = served_serial(proxy)
        write(tmp_path, *AUTHORITY.issue())
        wait_until(lambda: served_serial(proxy) != first, timeout_seconds=5, what="the new certificate")
        second = served_serial(proxy)
        proxy.key_file.write_bytes(b"nonsense")
        wait_until(lambda: "TLS files are wrong" in proxy.output, timeout_seconds=5, what="the warning")
        assert served_serial(proxy) == second
        write(tmp_path, *AUTHORITY.issue())
        wait_until(lambda: served_serial(proxy) != second, timeout_seconds=5, what="the third certificate")
        connection.sendall(HEALTH)
        assert connection.recv(12) == b"HTTP/1.1 200", "an open connection stays"


def test_many_connections_at_once_are_served(proxy: TlsProxy) -> None:
    context = trusting(AUTHORITY)
    failures: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(10):
                with tls(proxy, context) as connection:
                    connection.sendall(HEALTH)
                    assert connection.recv(12) == b"HTTP/1.1 200"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- what other machines can reach -------------------------------------------------------------------------------------


def test_a_proxy_that_other_machines_can_reach_requires_https_and_a_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    admin = keys.principal("admin", everything())
    with TlsProxy(tmp_path / "proxy", "--host", "0.0.0.0", "--keys-file", str(keys.path)) as proxy:
        assert "https://" in proxy.output
        other = f"https://127.0.0.2:{proxy.port}"  # another address of this machine, as a stranger's would be
        with httpx.Client(verify=False, trust_env=False) as client:  # its name is not in the certificate
            assert client.get(f"{other}/v1").status_code == 401
            assert client.get(f"{other}/v1", headers=admin.headers).status_code == 200
            plain = client.get(f"http://127.0.0.2:{proxy.port}/v1", headers=admin.headers)
        assert (plain.status_code, plain.json()["code"]) == (400, "https_required")
        metrics = proxy.client.get("/metrics", headers=admin.headers).text
        assert "popgate_insecure 0.0" in metrics
        assert "popgate_tls_stale 0.0" in metrics


def test_an_insecure_proxy_says_so_in_its_log_and_its_metrics(tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, "--host", "0.0.0.0", "--insecure", "--log-level", "error") as proxy:
        assert httpx.get(f"http://127.0.0.2:{proxy.port}/v1", trust_env=False).status_code == 200
        assert "popgate_insecure 1.0" in proxy.client.get("/metrics").text
        assert "--insecure: other machines can reach this proxy" in proxy.output


def test_a_proxy_with_keys_and_tls_is_not_insecure_whatever_its_flags_say(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    admin = keys.principal("admin", everything())
    flags = ["--host", "0.0.0.0", "--insecure", "--keys-file", str(keys.path)]
    with TlsProxy(tmp_path / "both", *flags) as proxy:
        assert "popgate_insecure 0.0" in proxy.client.get("/metrics", headers=admin.headers).text
        assert "without authentication or without TLS" not in proxy.output
    with ProxyProcess(tmp_path / "keys", *flags) as proxy:
        assert "popgate_insecure 1.0" in proxy.client.get("/metrics", headers=admin.headers).text
        assert "without authentication or without TLS" in proxy.output


MISLED = """
import os, socket
bind = socket.socket.bind
socket.socket.bind = lambda self, address: bind(self, (os.environ["LEADS_TO"], address[1]))
"""
"""Code that Python runs at startup: every host name leads to one address, as an entry in /etc/hosts may do."""


@pytest.mark.parametrize("host", ["localhost", "db.localhost"])
def test_a_name_of_this_machine_that_leads_elsewhere_is_refused(tmp_path: Path, host: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISLED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": paths, "LEADS_TO": "0.0.0.0"}
    proxy = ProxyProcess(tmp_path / "misled", "--host", host, environment=environment)
    try:
        proxy.launch()
        assert proxy.wait(20) == ExitCode.FAILED
        (line,) = proxy.output.splitlines()
        assert line.startswith(f"popgate: {host} leads to 0.0.0.0 on this machine, which other machines can reach")
    finally:
        proxy.close()
    environment["LEADS_TO"] = "127.0.0.1"
    with ProxyProcess(tmp_path / "right", "--host", host, environment=environment) as proxy:
        assert "popgate_insecure 0.0" in proxy.client.get("/metrics").text
