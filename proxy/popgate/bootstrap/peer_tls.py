"""Makes the certificates with which the proxies of a cluster authenticate to each other, from the cluster's secrets.

Theory of operation. The private key of a certificate authority is derived from each secret. So every proxy of the
cluster can issue a certificate for itself, without files and without an administrator. Its own key is new at each
start. A certificate names the instance of its proxy. The first secret issues, and the authorities of all secrets are
trusted, so that secrets can be changed one proxy after the other.

    secret --HKDF, scrypt--> key of the authority --issues--> certificate for the instance (new key)

A server shows its certificate to every client, which could guess a weak secret and compare keys. scrypt makes each
guess slow. Certificates are valid for as long as a process may live. They are not revoked: dropping a secret excludes
all proxies that only have this one.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import scrypt, sha256
from secrets import token_hex

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from popgate.bootstrap.pem import readable_by_ssl
from popgate.domain.derived_keys import derived_key
from popgate.domain.names import InstanceId
from popgate.wire.admission import instance_uri

PURPOSE = "popgate peers authority 1"
SALT = b"popgate peers authority 1"
SCRYPT_COST = 1 << 14
"""scrypt's parameter n. A derivation takes 16 MiB of memory, and about 50 ms."""
SCRYPT_BYTES_MAX = 64 << 20
KEY_BYTES = 48
"""Bytes from which a private key is derived: 16 more than a key has, so that no key is notably more likely."""
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256 (FIPS 186-4, D.1.2.3)."""
CURVE = ec.SECP256R1()
CLOCK_SKEW = timedelta(days=1)
VALID_FOR = timedelta(days=3_650)
ID_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """The contexts for connections to peers (``client``) and from peers (``server``)."""

    client: ssl.SSLContext
    server: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority of one secret."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def peer_tls(instance: InstanceId, secrets: Sequence[bytes]) -> PeerTls:
    """Return the contexts of the proxy ``instance``. It takes about 50 ms for each secret."""
    authorities = [authority(secret) for secret in secrets]
    return tls_of(instance, authorities[0], authorities)


def tls_of(instance: InstanceId, issuer: Authority, trusted: Sequence[Authority]) -> PeerTls:
    """Return the contexts of a proxy whose certificate ``issuer`` issues."""
    key = ec.generate_private_key(CURVE)
    certificate = _issued(instance, key, issuer)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname = False  # an address is no identity: the instance in the certificate is checked instead
    password = token_hex(32).encode()
    with readable_by_ssl(_pem(key, password) + certificate.public_bytes(serialization.Encoding.PEM)) as path:
        for context in (client, server):
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata="".join(_text(one.certificate) for one in trusted))
            context.load_cert_chain(path, password=password)
    server.num_tickets = 0  # peers keep their connections, and resume no session
    server.set_alpn_protocols(["http/1.1"])
    client.set_alpn_protocols(["http/1.1"])
    return PeerTls(client=client, server=server)


def authority(secret: bytes) -> Authority:
    """Return the certificate authority of a secret. Its key is the same in every process that has the secret."""
    seed = scrypt(
        derived_key(secret, PURPOSE),
        salt=SALT,
        n=SCRYPT_COST,
        r=8,
        p=1,
        maxmem=SCRYPT_BYTES_MAX,
        dklen=KEY_BYTES,
    )
    key = ec.derive_private_key(int.from_bytes(seed, "big") % (ORDER - 1) + 1, CURVE)
    name = _name(f"popgate cluster {_id(key.public_key())}")
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(own, critical=False)
    return Authority(key, builder.sign(key, hashes.SHA256()))


def _issued(instance: InstanceId, key: ec.EllipticCurvePrivateKey, issuer: Authority) -> x509.Certificate:
    public = key.public_key()
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    uri = x509.UniformResourceIdentifier(instance_uri(instance))
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
    builder = _builder(_name(f"popgate {instance}"), issuer.certificate.subject, public)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    builder = builder.add_extension(by, critical=False)
    return builder.sign(issuer.key, hashes.SHA256())


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + VALID_FOR)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _id(public: ec.EllipticCurvePublicKey) -> str:
    """Return the short id of an authority, which tells nothing about its private key."""
    encoded = public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    return sha256(encoded).hexdigest()[:ID_LENGTH]


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
