"""Defines messages in the form that is common to all brokers.

This module defines the fields of a message and their limits. The adapters encode messages for the wire.
"""

import secrets
from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple, TypeGuard, cast

from popgate.domain.names import CopyId

HeaderValue = object
"""The value of a header. Publishers that use popgate send a str, int, float, bool or None. Messages of other publishers
may also have lists and dicts of these."""

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
"""Maximum size of a message's headers in bytes. AMQP carries them in one frame, 128 KiB by default. Half of the frame
is left for the other properties of the message."""
SHORT_STRING_BYTES_MAX = 255
"""AMQP's maximum length of a short string in bytes. Message ids, header names and ordering keys are short strings."""
BATCH_COUNT_MAX = 256
HEADER_NESTING_MAX = 32
"""Maximum depth of lists and maps in a header's value."""
TIME_MAX = 253_402_300_799.0
"""Latest time that a message may carry, in Unix seconds: the end of the year 9999."""
COPY_ID_DIGITS = 32
MINTED_AT_DIGITS = 12
"""Number of hexadecimal digits at the beginning of a copy id that contain its time of minting in milliseconds."""
RESERVED_HEADER_PREFIX = "x-popgate-"
_TIMESTAMP_SECONDS_MAX = 0xFFFF_FFFF
"""The latest timestamp that is read as seconds (in the year 2106). A larger number is read in a smaller unit."""
_UNITS_PER_SECOND = (1, 1_000, 1_000_000, 1_000_000_000)


class Message(NamedTuple):
    """One copy of a message. All times are in Unix seconds.

    ``copy_id`` identifies the copy. popgate mints it, unless an admin has declared that the ``message_id`` of other
    publishers is unique (``domain.names.Layout``), or the message is transient. ``visible_at``: when a delayed message
    becomes visible; None if the message is not delayed. ``expires_at``: the time after which the message is not
    delivered; None if there is no such time.
    """

    copy_id: CopyId
    message_id: str
    body: bytes
    headers: Mapping[str, HeaderValue]
    ordering_key: str | None
    published_at: float
    visible_at: float | None = None
    expires_at: float | None = None

    @property
    def waiting_since(self) -> float:
        """When the message became visible for the first time."""
        return self.published_at if self.visible_at is None else self.visible_at


def is_copy_id(text: str) -> bool:
    """Return whether ``text`` has the form of the copy ids that ``copy_id_minter`` mints."""
    return len(text) == COPY_ID_DIGITS and not text.strip("0123456789abcdef")


def is_time(value: HeaderValue) -> TypeGuard[float]:
    """Return whether ``value`` is a number of Unix seconds that every part of popgate can represent.

    Integers are accepted, because pika turns doubles into integers when it republishes a message that it has read.
    """
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= TIME_MAX


def is_header_value(value: object, depth: int = 1) -> bool:
    """Return whether every broker and every format of popgate can represent ``value`` as a header's value."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return value.isascii() or _has_characters_only(value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, float):
        return isfinite(value)
    if depth > HEADER_NESTING_MAX:
        return False
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return all(
            isinstance(key, str) and is_header_value(key) and is_header_value(one, depth + 1) for key, one in entries
        )
    return isinstance(value, list) and all(is_header_value(one, depth + 1) for one in cast("list[object]", value))


def _has_characters_only(text: str) -> bool:
    """Return whether ``text`` has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seconds_of_timestamp(count: int) -> float | None:
    """Return a publisher's timestamp (0..2**64-1) in Unix seconds, or None if it is not a valid time.

    AMQP timestamps are in seconds. Some publishers send milliseconds, microseconds or nanoseconds, which are recognized
    because these numbers are larger.
    """
    for units_per_second in _UNITS_PER_SECOND:
        if count <= _TIMESTAMP_SECONDS_MAX * units_per_second:
            return count / units_per_second
    return None


def place_of(message: Message) -> tuple[int, CopyId]:
    """Return the key that sorts messages with one ordering key by the time at which they became visible in their queue.

    The order of the messages of one publisher is exact if the publisher waits for the answer to each publish, and if
    the clocks of the proxies agree.
    """
    minted_at = int(message.copy_id[:MINTED_AT_DIGITS], 16)
    return max(minted_at, int((message.visible_at or 0.0) * 1000)), message.copy_id


def copy_id_minter(wall: Callable[[], float]) -> Callable[[], CopyId]:
    """Return a function that mints copy ids: 32 hexadecimal digits, globally unique, ascending within a process.

    An id consists of 48 bits of milliseconds, 40 random bits that identify the process, and a 40-bit counter. Because
    ids ascend, the store inserts them at the end of its index. Each start of a process draws new random bits, so ids
    are not repeated after a clock was set back.
    """
    process = secrets.token_hex(5)
    counter = int.from_bytes(secrets.token_bytes(3), "big")
    latest, prefix = 0, f"{0:012x}{process}"

    def mint() -> CopyId:
        nonlocal counter, latest, prefix
        now = int(wall() * 1000)
        if now > latest:
            latest, prefix = now, f"{now:012x}{process}"
        counter = (counter + 1) & 0xFF_FFFF_FFFF
        return CopyId(f"{prefix}{counter:010x}")

    return mint
