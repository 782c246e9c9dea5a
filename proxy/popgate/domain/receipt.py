"""Receipt handles: opaque, signed tokens that name one lease.

A handle is base64url of: version byte, a keyed BLAKE2b tag of 16 bytes, then the lease's fields. The tag keeps clients
from forging or mixing up leases; it hides nothing. Whoever holds the secret can read a handle: any proxy of a cluster.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BinasciiError
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from popgate.domain.names import CopyId, GroupName, LeaseId, QueueId, TopicName

RECEIPT_LENGTH_MAX = 1024
SECRET_BYTES_MIN = 16

_VERSION = b"\x01"
_TAG_BYTES = 16
_FIELDS = 6


class Receipt(NamedTuple):
    """One lease: of copy ``copy_id`` on ``queue``, given under the claim ``epoch``."""

    queue: QueueId
    lease_id: LeaseId
    epoch: int
    copy_id: CopyId


class ReceiptSigner:
    """Turns receipts into handles and back. ``secret`` is at least 16 bytes and the same on every proxy."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the secret must be at least {SECRET_BYTES_MIN} bytes")
        self._key = blake2b(secret, digest_size=32, person=b"popgate-receipt"[:16]).digest()

    def sign(self, receipt: Receipt) -> str:
        (topic, group, number), lease_id, epoch, copy_id = receipt
        fields = f"{topic}|{group}|{number}|{lease_id}|{epoch}|{copy_id}".encode()
        tag = blake2b(fields, key=self._key, digest_size=_TAG_BYTES).digest()
        return urlsafe_b64encode(_VERSION + tag + fields).rstrip(b"=").decode()

    def verify(self, handle: str) -> Receipt | None:
        """The receipt that ``handle`` names, or None where it is forged, truncated or not a handle at all."""
        if len(handle) > RECEIPT_LENGTH_MAX:
            return None
        try:
            raw = urlsafe_b64decode(handle.encode("ascii") + b"=" * (-len(handle) % 4))
        except (BinasciiError, ValueError):
            return None
        fields = raw[1 + _TAG_BYTES :]
        tag = blake2b(fields, key=self._key, digest_size=_TAG_BYTES).digest()
        canonical = urlsafe_b64encode(raw).rstrip(b"=").decode() == handle  # the decoder skips foreign characters
        if not canonical or raw[:1] != _VERSION or not compare_digest(tag, raw[1 : 1 + _TAG_BYTES]):
            return None
        topic, group, number, lease_id, epoch, copy_id = fields.decode().split("|", _FIELDS - 1)
        queue = QueueId(TopicName(topic), GroupName(group), int(number))
        return Receipt(queue, LeaseId(lease_id), int(epoch), CopyId(copy_id))
