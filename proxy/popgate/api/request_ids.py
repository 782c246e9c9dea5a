"""Defines the ids of requests: which ones a client may give, and how new ones are made.

A client gives an id in ``X-Request-Id``. Without one, a request gets an id only if a log line or an answer needs it.
"""

import re
import secrets
from collections.abc import Iterable

from popgate.wire.admission import REQUEST_ID

REQUEST_ID_LENGTH_MAX = 128
"""Maximum length of an id that a client gives."""
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,%d}" % REQUEST_ID_LENGTH_MAX)
_RANDOM_BYTES = 8


def given_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the id in the headers of a request, or None if there is none, or several, or one with other characters."""
    values = [value for name, value in headers if name == REQUEST_ID]
    return values[0].decode("ascii") if len(values) == 1 and _VALID.fullmatch(values[0]) else None


def id_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the header with the id of a request, for a request without a body that is made for it."""
    return [header for header in headers if header[0] == REQUEST_ID]


def new_request_id() -> str:
    """Return an id that no other request has."""
    return secrets.token_hex(_RANDOM_BYTES)
