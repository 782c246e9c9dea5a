"""Makes and verifies receipt handles, which are opaque, signed tokens. Each handle identifies one lease.

A handle is the base64url encoding of a version byte, a key id, a keyed BLAKE2b tag of 16 bytes, and the fields of the
lease. The tag prevents clients from forging handles. The fields are not encrypted. All proxies of a cluster have the
same secrets, so every proxy can verify the handles of all others. The key id names the secret that signed the handle. A
proxy signs with the first of its secrets and verifies with all of them, so secrets can be changed while handles made
with earlier ones stay valid.
"""

from binascii import Error as BinasciiError
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from popgate.domain.derived_keys import KEY_ID_BYTES, derived_key, key_id
from popgate.domain.names import CopyId, GroupName, LeaseId, QueueId, TopicName

RECEIPT_LENGTH_MAX = 1024
SECRET_BYTES_MIN = 16
REMEMBERED_MAX = 16_384
"""Maximum number of handles that a signer caches, about 8 MB. The cache contains handles that this signer made, because
most handles return once, to the proxy that made them."""

_VERSION = b"\x02"
_PURPOSE = "popgate receipt handles"
_TAG_BYTES = 16
_NAME_BYTES = len(_VERSION) + KEY_ID_BYTES
_HEAD_BYTES = _NAME_BYTES + _TAG_BYTES
_FIELDS = 6
_FILLER = (b"", b"  ", b" ")
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
    """Converts receipts to handles and back.

    The first of the ``secrets`` signs, and handles of all of them are valid. Each must have at least 16 bytes. Every
    proxy must have the first secrets of all others.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets or any(len(secret) < SECRET_BYTES_MIN for secret in secrets):
            raise ValueError(f"at least one secret is needed, and each must be at least {SECRET_BYTES_MIN} bytes")
        self._keys: dict[bytes, list[bytes]] = {}
        """The keys by the first bytes of their handles. Several secrets may have the same key id by chance."""
        for secret in secrets:
            self._keys.setdefault(_VERSION + key_id(secret), []).append(derived_key(secret, _PURPOSE))
        self._name = next(iter(self._keys))
        self._key = self._keys[self._name][0]
        self._signed: dict[str, Receipt] = {}
        self._signed_before: dict[str, Receipt] = {}

    def sign(self, receipt: Receipt) -> str:
        (topic, group, number), lease_id, epoch, copy_id = receipt
        fields = f"{topic}|{group}|{number}|{lease_id}|{epoch}|{copy_id}".encode()
        fields = _FILLER[len(fields) % 3] + fields
        tag = blake2b(fields, key=self._key, digest_size=_TAG_BYTES).digest()
        handle = b2a_base64(self._name + tag + fields, newline=False).translate(_TO_URL).decode()
        if len(self._signed) >= REMEMBERED_MAX // 2:
            self._signed, self._signed_before = {}, self._signed
        self._signed[handle] = receipt
        return handle

    def verify(self, handle: str) -> Receipt | None:
        """Return the receipt that ``handle`` names, or None if it is forged, truncated or not a handle."""
        return self._signed.pop(handle, None) or self._signed_before.pop(handle, None) or self._read(handle)

    def _read(self, handle: str) -> Receipt | None:
        if len(handle) > RECEIPT_LENGTH_MAX or "=" in handle:  # some versions of Python accept further padding
            return None
        try:
            raw = a2b_base64(handle.encode("ascii").translate(_FROM_URL), strict_mode=True)
        except (BinasciiError, ValueError):
            return None
        fields = raw[_HEAD_BYTES:]
        for key in self._keys.get(raw[:_NAME_BYTES], ()):
            tag = blake2b(fields, key=key, digest_size=_TAG_BYTES).digest()
            if compare_digest(tag, raw[_NAME_BYTES:_HEAD_BYTES]):
                break
        else:
            return None
        topic, group, number, lease_id, epoch, copy_id = fields.decode().lstrip(" ").split("|", _FIELDS - 1)
        queue = QueueId(TopicName(topic), GroupName(group), int(number))
        return Receipt(queue, LeaseId(lease_id), int(epoch), CopyId(copy_id))
