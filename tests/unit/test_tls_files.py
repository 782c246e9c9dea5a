"""The files of a server's certificate: what is refused at the start, and what happens when they change."""

import asyncio
import contextlib
import logging
import os
import resource
import ssl
import threading
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from popgate.api.connection import PeerCertificate, certificate_of
from popgate.bootstrap.tls import ServerTls, TlsFiles, server_context
from popgate.domain.errors import StartupError
from popgate.runtime.tls_transport import TlsTransport
from support.certificates import MemoryAuthority, write
from unit.test_peer_tls import Side, deliver

AUTHORITY = MemoryAuthority()


def files(folder: Path, *, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(*write(folder, *AUTHORITY.issue()), client_ca)


def why(files: TlsFiles) -> str:
    with pytest.raises(StartupError) as caught:
        ServerTls(files)
    return caught.value.detail


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    right = files(tmp_path)
    missing = tmp_path / "missing.pem"
    for field in ("certificate", "key", "client_ca"):
        assert why(right._replace(**{field: missing})) == f"{missing} does not exist; create it, or name another file"
    assert why(right._replace(key=tmp_path)) == f"{tmp_path} can't be read (Is a directory)"
    large = tmp_path / "large.pem"
    large.write_bytes(b"x" * (1 << 21))
    assert "is larger than" in why(right._replace(certificate=large))


def test_a_file_with_something_else_is_named(tmp_path: Path) -> None:
    right = files(tmp_path)
    assert why(right._replace(certificate=right.key)) == f"{right.key} contains no certificate in PEM form"
    assert why(right._replace(key=right.certificate)).startswith(f"{right.certificate} contains no private key")
    assert why(right._replace(client_ca=right.key)) == f"{right.key} contains no certificate in PEM form"


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one, other = files(tmp_path / "one"), files(tmp_path / "other")
    assert why(one._replace(key=other.key)).startswith(f"{other.key} is not the key of the first certificate in")


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    found = TlsFiles(*write(tmp_path, *AUTHORITY.issue(password=b"x")))
    assert why(found).startswith(f"{found.key} is encrypted; decrypt it")


@pytest.mark.parametrize("valid_for", [timedelta(days=1), timedelta(hours=-1)])
def test_an_expired_certificate_is_a_warning(
    tmp_path: Path, valid_for: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    ServerTls(TlsFiles(*write(tmp_path, *AUTHORITY.issue(valid_for=valid_for))))
    expected = ["the TLS certificate has expired: clients will refuse it"] if valid_for < timedelta() else []
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_key_that_everybody_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = files(tmp_path)
    found.key.chmod(0o644)
    ServerTls(found)
    assert [record.getMessage() for record in caplog.records] == [
        "other users of this machine can read the TLS key: run chmod 600"
    ]


def is_stale(tls: ServerTls) -> bool:
    return tls.is_stale  # otherwise mypy considers it constant


def test_changed_files_are_used_once_they_are_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "popgate.bootstrap.tls")
    found = files(tmp_path)
    tls = ServerTls(found)
    first = tls.context()
    tls.look()
    assert tls.context() is first
    certificate, key = AUTHORITY.issue()
    found.certificate.write_bytes(certificate)
    for _ in range(3):
        tls.look()
    assert tls.context() is first
    assert is_stale(tls)
    assert [record.getMessage() for record in caplog.records] == [
        "the changed TLS files are wrong: the earlier ones stay in use"
    ]
    found.key.write_bytes(key)
    tls.look()
    assert tls.context() is first, "the files may still change"
    tls.look()
    assert tls.context() is not first
    assert not is_stale(tls)
    found.key.unlink()
    second = tls.context()
    for _ in range(3):
        tls.look()
    assert tls.context() is second
    assert is_stale(tls)


@contextlib.contextmanager
def few_descriptors(further: int) -> Generator[None]:
    """Let this process open only so many further files at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + further, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("further", [0, 1])  # with one, the files can be read, but OpenSSL can't open its own
def test_changed_files_that_could_not_be_used_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, further: int
) -> None:
    found = files(tmp_path)
    tls = ServerTls(found)
    first = tls.context()
    files(tmp_path)
    with few_descriptors(further):
        for _ in range(6):
            tls.look()
    assert is_stale(tls)
    assert len(caplog.records) == 1
    tls.look()
    tls.look()
    assert not is_stale(tls)
    assert tls.context() is not first


def test_a_folder_in_place_of_a_file_takes_no_descriptors(tmp_path: Path) -> None:
    found = files(tmp_path)
    tls = ServerTls(found)
    found.key.rename(tmp_path / "earlier.pem")
    found.key.mkdir()
    before = [*Path("/proc/self/fd").iterdir()]
    for _ in range(6):
        tls.look()
    assert is_stale(tls)
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_an_empty_pipe_is_a_wrong_file(tmp_path: Path) -> None:
    right, pipe = files(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        assert why(right._replace(key=pipe)) == f"{pipe} contains no private key in PEM form"
    finally:
        os.close(writer)


def test_a_link_to_other_files_is_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces a secret this way."""
    one, other, link = files(tmp_path / "one"), files(tmp_path / "other"), tmp_path / "data"
    link.symlink_to(tmp_path / "one")
    tls = ServerTls(TlsFiles(link / one.certificate.name, link / one.key.name))
    first = tls.context()
    link.unlink()
    link.symlink_to(other.key.parent)
    tls.look()
    tls.look()
    assert tls.context() is not first


def client_context(certificate: tuple[bytes, bytes] | None, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=AUTHORITY.pem.decode())
    if certificate is not None:
        context.load_cert_chain(*write(folder, *certificate, name="client"))
    return context


NAMES = (
    x509.DNSName("billing.example"),
    x509.UniformResourceIdentifier("spiffe://example/billing"),
    x509.RFC822Name("ann@example"),
)


def certificate_at_server(tmp_path: Path, certificate: tuple[bytes, bytes] | None) -> PeerCertificate | None:
    """Return the certificate that the server sees. Raises: the reason why the handshake failed."""
    authority = tmp_path / "clients.pem"
    authority.write_bytes(AUTHORITY.pem)
    server = Side(server_context(files(tmp_path, client_ca=authority)), server_side=True)
    client = Side(client_context(certificate, tmp_path), server_side=False)
    deliver(client, server)
    for failure in server.failures:
        raise failure
    assert isinstance(server.tls, TlsTransport)
    return certificate_of(server.tls)


def test_a_client_certificate_is_optional_and_its_names_are_known(tmp_path: Path) -> None:
    assert certificate_at_server(tmp_path, None) is None
    found = certificate_at_server(tmp_path, AUTHORITY.issue(*NAMES))
    assert found is not None
    assert set(found.names) == {"billing.example", "spiffe://example/billing", "ann@example"}
    assert found.expires_at > 0


def test_authorities_may_have_comments_in_any_language(tmp_path: Path) -> None:
    authority = tmp_path / "clients.pem"
    for bom in ("", "\ufeff"):
        authority.write_text(f"{bom}# Autorit\u00e9 \u8a8d\u8a3c\u5c40\n{AUTHORITY.pem.decode()}", encoding="utf-8")
        assert server_context(files(tmp_path, client_ca=authority)).get_ca_certs()


def test_no_session_of_a_client_certificate_is_resumed(tmp_path: Path) -> None:
    """A resumed session would not be verified again, such as after its authority has expired."""
    authority = tmp_path / "clients.pem"
    authority.write_bytes(AUTHORITY.pem)
    context = server_context(files(tmp_path, client_ca=authority))
    assert context.num_tickets == 0
    assert context.options & ssl.OP_NO_TICKET


def test_a_foreign_or_expired_client_certificate_ends_the_handshake(tmp_path: Path) -> None:
    for wrong in (MemoryAuthority().issue(*NAMES), AUTHORITY.issue(*NAMES, valid_for=timedelta(hours=-1))):
        with pytest.raises(ssl.SSLCertVerificationError):
            certificate_at_server(tmp_path, wrong)


def test_a_name_of_one_kind_does_not_count_as_one_of_another_kind(tmp_path: Path) -> None:
    crossed = (
        x509.UniformResourceIdentifier("orders.example.org"),
        x509.UniformResourceIdentifier("ann@example.org"),
        x509.UniformResourceIdentifier("mailto:ann@example.org"),
        x509.DNSName("bob@example.org"),
        x509.DNSName("spiffe://example.org/orders"),
        x509.DNSName("popgate:instance:b"),
        x509.RFC822Name("billing.example.org"),
        x509.RFC822Name("spiffe://ann@example.org"),
        # In lower case, the Kelvin sign is a k. The library refuses to make such a name in the usual way.
        x509.DNSName._init_without_validation("\u212aafka.example.org"),  # pyright: ignore[reportPrivateUsage]
    )
    own = (*NAMES, x509.UniformResourceIdentifier("popgate:instance:a"))
    found = certificate_at_server(tmp_path, AUTHORITY.issue(*crossed, *own))
    assert found is not None
    assert set(found.names) == {"billing.example", "spiffe://example/billing", "ann@example", "popgate:instance:a"}


async def test_changed_files_do_not_wait_for_the_threads_of_other_work(tmp_path: Path) -> None:
    """asyncio's threads look up host names, and a name server that does not answer keeps all of them waiting."""
    tls, release = ServerTls(files(tmp_path)), threading.Event()
    before, loop = tls.context(), asyncio.get_running_loop()
    lookups = [loop.run_in_executor(None, release.wait) for _ in range(64)]
    watching = asyncio.create_task(tls.run())
    try:
        files(tmp_path)
        async with asyncio.timeout(5):
            while tls.context() is before:  # noqa: ASYNC110 - the files change without an event
                await asyncio.sleep(0.05)
    finally:
        watching.cancel()
        release.set()
        await asyncio.gather(*lookups)
