"""Describes a message as an administrator sees it who looks without leasing it.

These values are sent between proxies and to clients as they are, so each field has a plain JSON type. Times are Unix
seconds of the store's clock. A receipt handle is never part of them, because it is the power to settle the message.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from popgate.domain.errors import InvalidRequest
from popgate.domain.names import CopyId

PREVIEW_BYTES_MAX = 1_024
"""Maximum bytes of a body's beginning that a peek shows."""
PEEKED_MAX = 100
"""Maximum number of messages in one answer."""


class PeekState(StrEnum):
    """The states by which a peek selects messages."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    BLOCKED = "blocked"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedLease:
    """A lease: its client, if this is known, when it was granted, and its deadline. A pulled message has no
    deadline."""

    client: str | None
    leased_at: float
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedBy:
    """The message of the same ordering key that has to be settled first. ``ahead``: how many messages of the key are in
    front, counted up to a limit."""

    id: str
    message_id: str | None
    state: str
    client: str | None
    until: float | None
    ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedMessage:
    """One message in the memory of a queue's owner.

    ``id`` is popgate's own id of this copy. ``message_id`` and all that the publisher has sent are null if the content
    is not in memory. ``place`` is the position among the visible messages of its queue, from 1. ``attempt`` counts how
    often the message was handed out. ``visible_at`` is when a delay ends. ``cursor`` continues a peek behind this
    message. ``body_preview`` is the beginning of the body as text, ``body_preview_base64`` if it is no text.
    """

    id: str
    message_id: str | None
    queue: int
    state: str
    place: int | None = None
    attempt: int = 0
    published_at: float | None = None
    first_delivered_at: float | None = None
    visible_at: float | None = None
    expires_at: float | None = None
    lease: PeekedLease | None = None
    blocked_by: BlockedBy | None = None
    ordering_key: str | None = None
    headers: Mapping[str, Any] | None = None
    body_preview: str | None = None
    body_preview_base64: str | None = None
    body_bytes: int | None = None
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """One page of messages, oldest first.

    ``next``: the cursor of the next page, or null at the end. ``not_shown`` counts messages that wait at the broker and
    that no proxy has read; it is null if the broker does not answer.
    """

    messages: Sequence[PeekedMessage]
    next: str | None
    not_shown: int | None


Place = tuple[int, int, CopyId]
"""The place of a message among all messages of its group: the rank, the number of its queue, and its copy id."""

CURSOR_PATTERN = r"^[0-9a-f]{1,32}\.[0-9]{1,4}\.[A-Za-z0-9_.~%-]{1,800}$"
"""The form of a cursor: a rank, the number of a queue, and a copy id, of which all but letters and digits is quoted."""

_CURSOR = re.compile(CURSOR_PATTERN)
FIRST: Place = (-1, -1, CopyId(""))


def cursor_of(place: Place) -> str:
    """Return the text form of a place."""
    rank, queue, copy_id = place
    return f"{rank:x}.{queue}.{quote(copy_id, safe='', errors='surrogatepass')}"


def place_of_cursor(cursor: str) -> Place:
    """Return the place that a cursor names. Raises: InvalidRequest."""
    if _CURSOR.fullmatch(cursor) is None:
        raise InvalidRequest("after must be the next of an earlier answer", field="after")
    rank, queue, copy_id = cursor.split(".", 2)
    return int(rank, 16), int(queue), CopyId(unquote(copy_id, errors="surrogatepass"))
