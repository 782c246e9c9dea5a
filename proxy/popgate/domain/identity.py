"""Signs and checks identity tags, which prove that popgate gave a message its copy id.

The copy id of a message decides which lease record, which settlement and which dead letter apply to the message. Any
program that can publish to a queue can write any header. So popgate adds a tag to each copy: a keyed hash of the copy's
target and copy id. A proxy trusts a copy id only if its tag is valid for the queue that delivered the message. If a
program copies a tag together with the copy id, they identify the same copy again, and never a copy in another queue.

    tag = VERSION ":" key id ":" BLAKE2s(key, target NUL copy id)

The key is derived from a secret of the proxies. The key id identifies the secret. Messages outlive a change of secrets
and of popgate itself, so tags of all secrets are trusted, and also tags of version 1, whose keys were derived in
another way.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2s
from hmac import compare_digest, digest

from popgate.domain.derived_keys import KEY_ID_BYTES, derived_key, key_id
from popgate.domain.names import BrokerQueue

VERSION, OLD_VERSION = "2", "1"
HASH_BYTES = 16
TAG_LENGTH = len(f"{VERSION}:") + 2 * KEY_ID_BYTES + len(":") + 2 * HASH_BYTES
_PURPOSE = "popgate identity of copies"

Signer = Callable[[str], str]
"""Returns the tag of a copy id."""
TagChecker = Callable[[str, str | None], str]
"""Returns why a copy id with the given tag can't be trusted, or an empty string if it can be trusted.

The tag is None if the copy has no tag.
"""


class IdentityKeys:
    """Signs and checks the tags of copies.

    New tags are made with the first of the ``secrets``. Tags that were made with any of them are trusted. With
    ``accepts_untagged``, copy ids without a tag are trusted too, because earlier versions of popgate did not add tags.
    """

    def __init__(self, secrets: Sequence[bytes], *, accepts_untagged: bool = False) -> None:
        self._keys = [_new_key(secret) for secret in secrets]
        self._trusted = [*self._keys, *(_old_key(secret) for secret in secrets)]
        self._accepts_untagged = accepts_untagged

    def signer(self, target: BrokerQueue) -> Signer:
        """Return the function that signs copies for ``target``: one queue, or a name made by ``bound_queue``."""
        return self._keys[0].signer(target)

    def checker(self, *targets: BrokerQueue) -> TagChecker:
        """Return the function that checks the tags of copies that one queue delivers.

        ``targets``: the targets for which these tags may have been made, the most frequent one first.
        """
        known: dict[str, list[Signer]] = {}
        for key in self._trusted:
            known.setdefault(key.prefix, []).extend(key.signer(target) for target in targets)
        prefix_length = len(self._keys[0].prefix)

        def check_tag(copy_id: str, tag: str | None) -> str:
            if tag is None:
                return "" if self._accepts_untagged else "it has no identity tag (see --accept-untagged)"
            signers = known.get(tag[:prefix_length])
            if signers is None:
                return "its identity tag was made with another secret (see --secret-file)"
            if tag.isascii():
                for signer in signers:
                    if compare_digest(signer(copy_id), tag):
                        return ""
            return "its identity tag is not the one for this queue and copy id"

        return check_tag


class _Key:
    def __init__(self, version: str, key_id: bytes, key: bytes) -> None:
        self._key = key
        self.prefix = f"{version}:{key_id.hex()}:"

    def signer(self, target: BrokerQueue) -> Signer:
        prefix = self.prefix
        begun = blake2s(target.encode() + b"\0", key=self._key, digest_size=HASH_BYTES)

        def sign(copy_id: str) -> str:
            hashing = begun.copy()
            hashing.update(copy_id.encode())
            return prefix + hashing.hexdigest()

        return sign


def _new_key(secret: bytes) -> _Key:
    return _Key(VERSION, key_id(secret), derived_key(secret, _PURPOSE))


def _old_key(secret: bytes) -> _Key:
    key = digest(secret, _PURPOSE.encode(), "sha256")
    return _Key(OLD_VERSION, blake2s(key, digest_size=KEY_ID_BYTES).digest(), key)
