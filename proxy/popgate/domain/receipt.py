"""Makes and verifies receipt handles, which are opaque, signed tokens. Each handle identifies one lease.

A handle is the base64url encoding of a version byte, a keyed BLAKE2b tag of 16 bytes, and the fields of the lease. The
tag prevents clients from forging handles. The fields are not encrypted. All proxies of a cluster have the same secret,
so every proxy can verify the handles of all others.
"""

from binascii import Error as BinasciiError
from binascii import a2b_base64, b2a_base64
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from popgate.domain.names import CopyId, GroupName, LeaseId, QueueId, TopicName

RECEIPT_LENGTH_MAX = 1024
SECRET_BYTES_MIN = 16
REMEMBERED_MAX = 16_384
"""Maximum number of handles that a signer caches, about 8 MB. The cache contains handles that this signer made, because
most handles return once, to the proxy that made them."""

_VERSION = b"\x01"
_TAG_BYTES = 16
_FIELDS = 6
_FILLER = (b" ", b"", b"  ")
"""The padding for each length of the fields modulo 3. It completes the last base64 group. So a handle has only one
spelling, and no ``=``."""
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_+/", b"+/!!")


class Receipt(NamedTuple):
    """Identifies one lease of copy ``copy_id`` on ``queue``. ``epoch`` is the epoch of the claim under which it was
    granted."""

    queue: QueueId
    lease_id: LeaseId
    epoch: int
    copy_id: CopyId


class ReceiptSigner:
    """Converts receipts to handles and back. ``secret`` must have at least 16 bytes and be the same on every proxy."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"the secret must be at least {SECRET_BYTES_MIN} bytes")
        self._key = blake2b(secret, digest_size=32, person=b"popgate-receipt"[:16]).digest()
        self._signed: dict[str, Receipt] = {}
        self._signed_before: dict[str, Receipt] = {}

    def sign(self, receipt: Receipt) -> str:
        (topic, group, number), lease_id, epoch, copy_id = receipt
        fields = f"{topic}|{group}|{number}|{lease_id}|{epoch}|{copy_id}".encode()
        fields = _FILLER[len(fields) % 3] + fields
        tag = blake2b(fields, key=self._key, digest_size=_TAG_BYTES).digest()
        handle = b2a_base64(_VERSION + tag + fields, newline=False).translate(_TO_URL).decode()
        if len(self._signed) >= REMEMBERED_MAX // 2:
            self._signed, self._signed_before = {}, self._signed
        self._signed[handle] = receipt
        return handle

    def verify(self, handle: str) -> Receipt | None:
        """Return the receipt that ``handle`` names, or None if it is forged, truncated or not a handle."""
        return self._signed.pop(handle, None) or self._signed_before.pop(handle, None) or self._read(handle)

    def _read(self, handle: str) -> Receipt | None:
        if len(handle) > RECEIPT_LENGTH_MAX:
            return None
        try:
            raw = a2b_base64(handle.encode("ascii").translate(_FROM_URL), strict_mode=True)
        except (BinasciiError, ValueError):
            return None
        fields = raw[1 + _TAG_BYTES :]
        tag = blake2b(fields, key=self._key, digest_size=_TAG_BYTES).digest()
        if not compare_digest(_VERSION + tag, raw[: 1 + _TAG_BYTES]) or len(handle) % 4:
            return None
        topic, group, number, lease_id, epoch, copy_id = fields.decode().lstrip(" ").split("|", _FIELDS - 1)
        queue = QueueId(TopicName(topic), GroupName(group), int(number))
        return Receipt(queue, LeaseId(lease_id), int(epoch), CopyId(copy_id))
