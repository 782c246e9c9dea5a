"""Signs and checks identity tags, which prove that popgate gave a message its copy id.

The copy id of a message decides which lease record, settlement and dead letter belong to it. Any publisher that reaches
a queue can write any header. So popgate adds a tag to each copy: a keyed hash of the copy's target and its copy id. A
reader trusts a copy id only with the tag for the queue that it reads from. A tag that was copied together with its copy
id names the same copy again; it can't name a copy in another queue.

    tag = VERSION ":" key id ":" BLAKE2s(key, target NUL copy id)

The key is derived from the proxies' secret. The key id says which secret was used.
"""

from collections.abc import Callable
from hashlib import blake2s
from hmac import compare_digest, digest

from popgate.domain.names import BrokerQueue

VERSION = "1"
KEY_ID_DIGITS, HASH_BYTES = 8, 16
_PURPOSE = b"popgate identity of copies"

Signer = Callable[[str], str]
"""Returns the tag of a copy id."""
TagChecker = Callable[[str, str | None], str]
"""Returns why a copy id with this tag (None: without a tag) can't be trusted, or an empty string if it can."""


class IdentityKeys:
    """Signs and checks the tags of copies.

    Signs with ``secret``. Trusts tags of ``secret`` and ``former_secret``. With ``accepts_untagged``, also trusts copy
    ids without a tag, which popgate published before it had tags.
    """

    def __init__(self, secret: bytes, *, former_secret: bytes | None = None, accepts_untagged: bool = False) -> None:
        self._keys = [_Key(secret)] + ([] if former_secret is None else [_Key(former_secret)])
        self._accepts_untagged = accepts_untagged

    def signer(self, target: BrokerQueue) -> Signer:
        """Return the signer of copies that go to ``target``: one queue, or ``bound_queue`` of a topic."""
        return self._keys[0].signer(target)

    def checker(self, *targets: BrokerQueue) -> TagChecker:
        """Return the check of copies that a queue delivers. ``targets``: the most frequent target first."""
        known = {key.prefix: [key.signer(target) for target in targets] for key in self._keys}
        prefix_length = len(self._keys[0].prefix)

        def check_tag(copy_id: str, tag: str | None) -> str:
            if tag is None:
                return "" if self._accepts_untagged else "it has no identity tag (see --accept-untagged)"
            signers = known.get(tag[:prefix_length])
            if signers is None:
                return "its identity tag was made with another secret (see --former-secret)"
            if tag.isascii() and any(compare_digest(signer(copy_id), tag) for signer in signers):
                return ""
            return "its identity tag is not the one for this queue and copy id"

        return check_tag


class _Key:
    def __init__(self, secret: bytes) -> None:
        self._key = digest(secret, _PURPOSE, "sha256")
        key_id = blake2s(self._key, digest_size=KEY_ID_DIGITS // 2).hexdigest()
        self.prefix = f"{VERSION}:{key_id}:"

    def signer(self, target: BrokerQueue) -> Signer:
        prefix = self.prefix
        begun = blake2s(target.encode() + b"\0", key=self._key, digest_size=HASH_BYTES)

        def sign(copy_id: str) -> str:
            hashing = begun.copy()
            hashing.update(copy_id.encode())
            return prefix + hashing.hexdigest()

        return sign
