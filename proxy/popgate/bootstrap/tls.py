"""Provides TLS for the socket for clients, and reads its certificate again when the files change.

Theory of operation. ``run`` looks at the files twice a second, in a thread of its own, so that it does not wait for
slow look-ups of host names in asyncio's threads. Files that have changed are read when they have stayed the same
between two looks, because a certificate and its key are seldom replaced at the same moment. If they are right, new
connections use them, and existing connections stay as they are. If they can't be used, the known ones stay in use, one
warning for each reason says why, and they are read again every second, because the reason may pass without a change of
the files: for example, too many open files.
"""

import asyncio
import contextlib
import logging
import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509 import Certificate

from popgate.bootstrap.pem import readable_by_ssl
from popgate.config import ServeOptions
from popgate.domain.errors import StartupError

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Seconds between two looks at the files."""
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""The ciphers of TLS 1.2, all with forward secrecy and authenticated encryption. Those of TLS 1.3 need no choice."""
FILE_BYTES_MAX = 1 << 20
PROTOCOL = "http/1.1"


class TlsFiles(NamedTuple):
    """The files (PEM) of a server: its certificate chain, its private key, and the authorities of its clients."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class TlsFileError(ValueError):
    """A file can't be used. The text names the file and says what is wrong with it."""


_Mark = tuple[tuple[int, ...], ...]
"""Device, inode, times of change and size of each file. Files with another mark may have another content."""


class ServerTls:
    """The context for TLS on the socket for clients. Raises: StartupError."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="TLS files")
        self._mark: _Mark | None = _mark(files)
        """The mark of the files in use. None: the files must be read again."""
        self._unsettled: _Mark | None = None
        self._problem: str | None = None
        try:
            self._context, self._ends_at = server_context(files), _ends_at(files)
        except TlsFileError as error:
            raise StartupError(str(error)) from error

    @property
    def is_stale(self) -> bool:
        """Whether the files are wrong or missing at present, so that older ones are in use."""
        return self._problem is not None

    @property
    def ends_at(self) -> float:
        """When the certificate in use stops being valid, in Unix seconds."""
        return self._ends_at

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        return self._context

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.get_running_loop().run_in_executor(self._thread, self.look)

    def look(self) -> None:
        """Look once. Read the files if they have changed, and have been the same at the last two looks."""
        mark = _mark(self._files)
        if mark == self._mark:
            self._unsettled = None
        elif mark != self._unsettled:
            self._unsettled = mark
        else:
            self._unsettled = None
            self._mark = mark if self._read() else None

    def _read(self) -> bool:
        """Return whether the files can be used."""
        try:
            self._context, self._ends_at = server_context(self._files), _ends_at(self._files)
        except Exception as error:  # of any reason, the operator must learn
            problem = str(error) if isinstance(error, TlsFileError) else repr(error)
            if problem != self._problem:
                _log.warning("the changed TLS files are wrong: the earlier ones stay in use", extra={"why": problem})
            self._problem = problem
            return False
        self._problem = None
        _log.info("the TLS files have changed: new connections use them")
        return True


def server_tls(options: ServeOptions) -> ServerTls | None:
    """Return the TLS that the options ask for, or None if clients are served without TLS. Raises: StartupError."""
    certificate, key = options.tls_certificate_file, options.tls_key_file
    if certificate is None or key is None:
        return None
    return ServerTls(TlsFiles(certificate, key, options.tls_client_ca_file))


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context with the content of the files. Log a warning if the certificate is not valid now, or if other
    users can read the key. Raises: TlsFileError."""
    chain, key = _read(files.certificate), _read(files.key)
    certificate = _certificates(files.certificate, chain)[0]
    _check(files, certificate, _private_key(files.key, key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols([PROTOCOL])
    try:
        with readable_by_ssl(key + b"\n" + chain) as path:
            context.load_cert_chain(path, password=b"")  # without a password, OpenSSL would ask for it
    except ssl.SSLError as error:
        raise TlsFileError(f"{files.certificate} can't be used: {_words(error)}") from error
    if files.client_ca is not None:
        authorities = _certificates(files.client_ca, _read(files.client_ca))
        context.options |= ssl.OP_NO_TICKET  # a resumed session would not be verified again
        context.num_tickets = 0
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority may be trusted alone
        try:
            pem = (one.public_bytes(serialization.Encoding.PEM).decode() for one in authorities)
            context.load_verify_locations(cadata="".join(pem))
        except ssl.SSLError as error:
            raise TlsFileError(f"{files.client_ca} can't be used: {_words(error)}") from error
    _warn(files, certificate)
    return context


def _read(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a named pipe would wait
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as stream:  # it would leave that of a folder open
                content = stream.read(FILE_BYTES_MAX + 1) or b""  # None from an empty pipe
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise TlsFileError(f"{file} does not exist; create it, or name another file") from error
    except OSError as error:
        raise TlsFileError(f"{file} can't be read ({error.strerror})") from error
    if len(content) > FILE_BYTES_MAX:
        raise TlsFileError(f"{file} is larger than {FILE_BYTES_MAX} bytes; name the right file")
    return content


def _certificates(file: Path, content: bytes) -> list[Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsFileError(f"{file} contains no certificate in PEM form") from error


def _ends_at(files: TlsFiles) -> float:
    """Return when the first certificate of the chain ends, in Unix seconds. Raises: TlsFileError."""
    chain = _certificates(files.certificate, _read(files.certificate))
    return min(one.not_valid_after_utc for one in chain).timestamp()


def _private_key(file: Path, content: bytes) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(content, None)
    except TypeError as error:
        raise TlsFileError(f"{file} is encrypted; decrypt it, for example with: openssl pkey -in {file}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsFileError(f"{file} contains no private key in PEM form") from error


def _check(files: TlsFiles, certificate: Certificate, key: PrivateKeyTypes) -> None:
    """Raises: TlsFileError if the key is not that of the certificate."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        known = certificate.public_key().public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsFileError(f"{files.certificate} has a key of an unknown kind ({error})") from error
    if known != key.public_key().public_bytes(*form):
        raise TlsFileError(
            f"{files.key} is not the key of the first certificate in {files.certificate}; the server's own certificate "
            "must be the first"
        )


def _warn(files: TlsFiles, certificate: Certificate) -> None:
    """Warn of what may be a mistake in files that can be used."""
    now, fields = datetime.now(UTC), {"file": str(files.certificate)}
    if certificate.not_valid_after_utc < now:
        _log.warning("the TLS certificate has expired: clients will refuse it", extra=fields)
    elif certificate.not_valid_before_utc > now:
        _log.warning("the TLS certificate is not valid yet: clients will refuse it", extra=fields)
    with contextlib.suppress(OSError):  # it was read, and may just be replaced
        _warn_of_readers(files.key)


def _warn_of_readers(key: Path) -> None:
    if key.stat().st_mode & stat.S_IROTH:
        _log.error("other users of this machine can read the TLS key: run chmod 600", extra={"file": str(key)})


def _mark(files: TlsFiles) -> _Mark:
    marks: list[tuple[int, ...]] = []
    for file in files:
        try:
            found = None if file is None else file.stat()
        except OSError:
            found = None
        marks.append(
            () if found is None else (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        )
    return tuple(marks)


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
