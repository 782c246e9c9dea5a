"""The arguments and results of the calls, as plain frozen values.

Owns the client's types (message, lease flag, results). Does no I/O: `wire` translates to the HTTP interface. Times are
Unix seconds, UTC, as floats, of the clock of the server's state store; the properties whose names end with `_datetime`
have them as datetimes.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import Any, TypeAlias

from popgate_client.causes import error_texts
from popgate_client.errors import LeaseLost, RetryLater, error_from

_DONE = frozenset({"acked", "already_acked", "released", "extended", "rejected"})


class LeaseFlag:
    """A flag that is set once, when the lease of this message is lost. Any thread may read it."""

    __slots__ = ("_raised",)

    def __init__(self) -> None:
        self._raised = False

    def set(self) -> None:
        """Set the flag; a second call has no effect."""
        self._raised = True

    def is_set(self) -> bool:
        """Whether the loss has been noticed."""
        return self._raised

    def __bool__(self) -> bool:
        return self._raised

    def __repr__(self) -> str:
        return f"LeaseFlag({self._raised})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message under one lease.

    `delivery_count` counts deliveries to clients, this one included. `invisible_until` is the end of the lease as it
    was granted; extensions don't change it here. `message_id` and `published_at` are None on an adopted queue whose
    publisher set none. `lease_lost` is set when a `Consumer` learns that the lease has ended during its handler.
    `deserializer` makes `data` of the body; the client passes it on.
    """

    topic: str
    group: str
    receipt_handle: str
    body: bytes
    headers: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    message_id: str | None = None
    ordering_key: str | None = None
    queue: int
    delivery_count: int
    published_at: float | None = None
    first_delivered_at: float
    invisible_until: float
    lease_lost: LeaseFlag = field(default_factory=LeaseFlag, compare=False, repr=False)
    deserializer: Callable[[bytes], Any] = field(default=json.loads, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The body as text.

        Raises: UnicodeDecodeError when the body is not UTF-8.
        """
        return self.body.decode("utf-8")

    @property
    def data(self) -> Any:
        """The value that the client's `deserializer` makes of the body; without one, the same as `json()`.

        Raises the errors of the deserializer.
        """
        return self.deserializer(self.body)

    def json(self) -> Any:
        """Return the body as a JSON value. Raises: ValueError if it is not JSON."""
        return json.loads(self.body)

    @property
    def published_datetime(self) -> datetime | None:
        """`published_at`, in UTC."""
        return None if self.published_at is None else datetime.fromtimestamp(self.published_at, UTC)

    @property
    def first_delivered_datetime(self) -> datetime:
        """`first_delivered_at`, in UTC."""
        return datetime.fromtimestamp(self.first_delivered_at, UTC)

    @property
    def invisible_until_datetime(self) -> datetime | None:
        """`invisible_until`, in UTC; None for a pulled message, which has no lease that ends."""
        return datetime.fromtimestamp(self.invisible_until, UTC) if isfinite(self.invisible_until) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to publish, with its options. Without options of its own, a plain body is enough.

    body: text, or bytes for anything that is not UTF-8; or a value for the client's `serializer`, by default anything
        that JSON can represent.
    headers: JSON values by name.
    ordering_key: messages with the same key go to the same queue.
    dedup_id: a repeat with the same id is answered `duplicate`; if every message has one, a publish is safe to repeat.
    delay_seconds: the message becomes visible after this time, 0 to 2,592,000 (30 days).
    ttl_seconds: the message is discarded if it is not delivered this long after it became visible, up to 365 days.

    A server that does not support an option rejects it by name (RequestInvalid); it never ignores one.
    """

    body: Any
    headers: Mapping[str, Any] | None = field(default=None, hash=False)
    message_id: str | None = None
    ordering_key: str | None = None
    dedup_id: str | None = None
    delay_seconds: float | None = None
    ttl_seconds: float | None = None

    def with_body(self, body: str | bytes) -> "OutgoingMessage":
        """Return the message with another body."""
        return replace(self, body=body)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishResult:
    """The result for one message: `status` is `published`, `duplicate` or `failed`.

    `error` is `{"code", "detail"}` for `failed`, else None.
    """

    status: str
    message_id: str | None = None
    error: Mapping[str, str] | None = field(default=None, hash=False)

    @property
    def ok(self) -> bool:
        """Whether the message is on stable storage: `published` or `duplicate`."""
        return self.status in ("published", "duplicate")

    def raise_for_status(self) -> None:
        """Raise the `PopgateError` of `error["code"]` if the message is not stored."""
        if not self.ok:
            raise error_from(self.error or {"code": self.status})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleResult:
    """The result for one lease.

    `status` is the verb's success (`acked`, `released`, `extended`, `rejected`), `already_acked`, `expired` (the lease
    ended), `invalid` (no receipt handle of this subscription), or `unavailable` (not decided: repeat).
    `invisible_until` is the new end of an extended lease, else None.
    """

    status: str
    invisible_until: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the verb succeeded, or the message was acked before."""
        return self.status in _DONE

    def raise_for_status(self) -> None:
        """Raise RetryLater for `unavailable`, and LeaseLost for `expired`, `invalid` and any other failure."""
        if self.status == "unavailable":
            raise RetryLater(self.status, "nothing was decided about this lease; repeat the call")
        if not self.ok:
            raise LeaseLost(self.status, f"the lease could not be settled: {self.status}")


class Verb(StrEnum):
    """The operations on a lease; the values are the last part of the URL."""

    ACK = "ack"
    RELEASE = "release"
    EXTEND = "extend"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleEntry:
    """One lease in a list call, with its options; options that the verb does not use must be None.

    `error_type`, `error_text` and `client_id` are for a release or a rejection: the server keeps them for the dead
    letter. They need a server with `causes` among its features.
    """

    receipt_handle: str
    delay_seconds: float | None = None
    invisibility_seconds: float | None = None
    reason: str | None = None
    error_type: str | None = None
    error_text: str | None = None
    client_id: str | None = None


Leases: TypeAlias = Message | str | Iterable[Message | str]
"""One message or receipt handle, or several of them."""


def settle_entries(
    leases: Leases,
    *,
    delay_seconds: float | None = None,
    invisibility_seconds: float | None = None,
    reason: str | None = None,
    error: BaseException | None = None,
    client_id: str | None = None,
) -> list[SettleEntry]:
    """Return one entry per lease, in order, all with the same options. A plain string is one receipt handle."""
    texts = error_texts(error)
    many = (leases,) if isinstance(leases, Message | str) else leases
    return [
        SettleEntry(
            receipt_handle=lease.receipt_handle if isinstance(lease, Message) else lease,
            delay_seconds=delay_seconds,
            invisibility_seconds=invisibility_seconds,
            reason=reason,
            error_type=texts.type,
            error_text=texts.text,
            client_id=client_id,
        )
        for lease in many
    ]
