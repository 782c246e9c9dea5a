"""Messages as every broker carries them.

Owns the shape of a message and its limits. How it is encoded on a wire is the adapters' affair.
"""

import secrets
from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple, TypeGuard, cast

from popgate.domain.names import CopyId

HeaderValue = object
"""On publish a str, int, float, bool or None; from foreign publishers also lists and dicts of these."""

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
HEADERS_BYTES_MAX = 64 * 1024
"""AMQP carries headers in one frame, 128 KiB by default: half of it leaves room for everything else."""
SHORT_STRING_BYTES_MAX = 255
"""AMQP's limit for a short string: message ids, header names, ordering keys."""
BATCH_COUNT_MAX = 256
HEADER_NESTING_MAX = 32
"""Maximum depth of lists and maps in a header's value."""
TIME_MAX = 253_402_300_799.0
"""Latest time that a message may carry, in Unix seconds: the end of the year 9999."""
COPY_ID_DIGITS = 32
MINTED_AT_DIGITS = 12
"""So begins a copy id: the milliseconds, in hexadecimal."""
RESERVED_HEADER_PREFIX = "x-popgate-"
_TIMESTAMP_SECONDS_MAX = 0xFFFF_FFFF
"""Latest time of a timestamp (the year 2106), in seconds: a larger count has a smaller unit."""
_UNITS_PER_SECOND = (1, 1_000, 1_000_000, 1_000_000_000)


class Message(NamedTuple):
    """One copy of a message. ``published_at`` is in Unix seconds; ``copy_id`` is minted by popgate.

    ``visible_at`` (Unix seconds): when a delayed publish was to become visible; None where it was so at once.
    ``expires_at`` (Unix seconds): from when on it is not handed out any more; None: never.
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
        """When it became visible for the first time."""
        return self.published_at if self.visible_at is None else self.visible_at


def is_copy_id(text: str) -> bool:
    """Whether ``text`` has the form of what ``copy_id_minter`` mints."""
    return len(text) == COPY_ID_DIGITS and not text.strip("0123456789abcdef")


def is_time(value: HeaderValue) -> TypeGuard[float]:
    """Whether ``value`` is a number of Unix seconds that every part of popgate can represent.

    Whole seconds are fine: pika turns doubles into integers when it publishes a message again that it has read.
    """
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= TIME_MAX


def is_header_value(value: object, depth: int = 1) -> bool:
    """Whether every broker and every format of popgate can represent ``value`` as a header's value."""
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
    """Whether ``text`` has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seconds_of_timestamp(count: int) -> float | None:
    """The Unix seconds of a publisher's timestamp (0..2**64-1), or None where it is no time.

    AMQP counts seconds. Some publishers count milliseconds, microseconds or nanoseconds: these numbers are larger.
    """
    for units_per_second in _UNITS_PER_SECOND:
        if count <= _TIMESTAMP_SECONDS_MAX * units_per_second:
            return count / units_per_second
    return None


def place_of(message: Message) -> tuple[int, CopyId]:
    """Sorts messages of one ordering key as they came into their queue: by when they became visible there.

    Exact for one publisher that waits for each answer, as long as popgate's clocks agree.
    """
    minted_at = int(message.copy_id[:MINTED_AT_DIGITS], 16)
    return max(minted_at, int((message.visible_at or 0.0) * 1000)), message.copy_id


def copy_id_minter(wall: Callable[[], float]) -> Callable[[], CopyId]:
    """Return a function that mints copy ids: 32 hexadecimal digits, unique everywhere, rising within a process.

    48 bits of milliseconds, then 40 bits of the process's own, then a counter of 40 bits. Rising ids keep the inserts
    into the store's index at its end. Restarts draw a new process part, so a clock set back repeats nothing.
    """
    process = secrets.token_hex(5)
    counter = int.from_bytes(secrets.token_bytes(3), "big")
    latest = 0

    def mint() -> CopyId:
        nonlocal counter, latest
        latest = max(latest, int(wall() * 1000))
        counter = (counter + 1) & 0xFF_FFFF_FFFF
        return CopyId(f"{latest:012x}{process}{counter:010x}")

    return mint
