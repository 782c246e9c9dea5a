"""Defines API keys: ``pg_<id>_<secret>``.

The id is public: lists, logs and the audit log name a key by it. The secret has 256 random bits. popgate stores only
the SHA-256 of the whole key. A hash without salt and without delay is enough, because 256 random bits can't be guessed.
"""

import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256

PREFIX = "pg_"
"""A credential that begins with this is an API key, and not a token of an OpenID provider."""
ID_PATTERN = re.compile(r"[a-z0-9]{6,32}")
ID_LENGTH = 10
SECRET_BYTES = 32
DIGEST_BYTES = 32

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_KEY = re.compile(rf"{PREFIX}({ID_PATTERN.pattern})_[A-Za-z0-9_-]{{43}}")
_KEY_IN_TEXT = re.compile(rf"{PREFIX}{ID_PATTERN.pattern}_[A-Za-z0-9_-]{{32,}}")
"""Also matches a key that more characters follow, and one that has lost so few characters that they can be guessed."""
_TOKEN_IN_TEXT = re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
"""Matches a JWT that begins at the start of a word. Otherwise the search would take quadratic time."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just created. ``text`` is the whole key, which is secret."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> bytes:
        return digest_of(self.text)


def new_key() -> NewKey:
    id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))
    return NewKey(id, f"{PREFIX}{id}_{secrets.token_urlsafe(SECRET_BYTES)}")


def key_id_in(text: str) -> str | None:
    """Return the id in a key, or None if ``text`` does not have the form of a key."""
    match = _KEY.fullmatch(text)
    return None if match is None else match[1]


def digest_of(key: str) -> bytes:
    """Return what is stored of a key: its SHA-256."""
    return sha256(key.encode()).digest()


def without_credentials(text: str) -> str:
    """Return ``text`` with ``pg_...`` in place of each key, and ``eyJ...`` in place of each token of a provider."""
    return _TOKEN_IN_TEXT.sub("eyJ...", _KEY_IN_TEXT.sub(f"{PREFIX}...", text))
