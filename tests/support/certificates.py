"""A private certificate authority in memory: for certificates that are expired, of clients, or wrong in another way."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class MemoryAuthority:
    """Issues certificates. ``pem`` is its own certificate."""

    def __init__(self, name: str = "authority of a test") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self, *names: x509.GeneralName, valid_for: timedelta = DAY, password: bytes | None = None
    ) -> tuple[bytes, bytes]:
        """Return a new certificate with these subject alternative names, and its key, both as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name("a test"), self._name, key.public_key(), valid_for)
        builder = builder.add_extension(x509.SubjectAlternativeName(names or [LOOPBACK]), critical=False)
        encryption = (
            serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
        )
        return (
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption),
        )


LOOPBACK = x509.IPAddress(ip_address("127.0.0.1"))


def write(folder: Path, certificate: bytes, key: bytes, name: str = "server") -> tuple[Path, Path]:
    """Write a certificate and its key, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}.pem", folder / f"{name}-key.pem"
    for file, content in zip(files, (certificate, key), strict=True):
        file.write_bytes(content)
        file.chmod(0o600)
    return files


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, valid_for: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + valid_for)
