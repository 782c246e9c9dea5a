"""Defines the bodies of data plane answers. One definition determines both the encoding and the OpenAPI schema.

Times are Unix seconds. A field that is UNSET is omitted from the answer.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from popgate.domain.message import Message
from popgate.engine.queue.buffered import size_of

SETTLE_STATUSES = ("acked", "already_acked", "released", "extended", "rejected", "expired", "invalid", "unavailable")

SettleStatus: TypeAlias = Annotated[
    str,
    Meta(
        description="expired: the lease has ended; invalid: not a receipt handle of this group; unavailable: try again",
        extra_json_schema={"enum": list(SETTLE_STATUSES)},
    ),
]
GivenMessageId: TypeAlias = (
    Annotated[str, Meta(description="absent if the publisher of an adopted queue set none")] | UnsetType
)
TextBody: TypeAlias = Annotated[
    Any, Meta(description="the body, if it is valid UTF-8", extra_json_schema={"type": "string"})
]
EncodedBody: TypeAlias = Annotated[str, Meta(description="the body, if it is not valid UTF-8")] | UnsetType
QueueIndex: TypeAlias = Annotated[int, Meta(description="the index of the queue")]
GivenTime: TypeAlias = (
    Annotated[float, Meta(description="absent if the publisher of an adopted queue set no timestamp")] | UnsetType
)
ModeName: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": ["pop", "draining", "pull"]})]

ESCAPED_LENGTH_MAX = 6
"""Maximum number of bytes that JSON needs for one byte of text: it writes a control character as ``\u0000``."""
PLAIN_BYTES_MAX = 4 * 1024
"""Maximum size in bytes of a body that is not scanned for characters to escape. Even if every byte is escaped, 256
bodies of this size fit into an answer."""
FIELDS_BYTES_MAX = 1024
"""Maximum size in bytes of a popped message's fields except for its body and headers: names, receipt handle, ids,
numbers."""
_CONTROLS = bytes(byte for byte in range(0x20))


class PublishError(Struct, kw_only=True, gc=False):
    code: str
    detail: str


class PublishResult(Struct, kw_only=True, gc=False):
    status: Annotated[
        Literal["published", "duplicate", "failed"],
        Meta(description="duplicate: its dedup_id was published before; nothing was stored again"),
    ]
    message_id: Annotated[str, Meta(description="for a duplicate, that of the first message")]
    error: PublishError | UnsetType = UNSET


class PublishAnswer(Struct, gc=False):
    results: Annotated[list[PublishResult], Meta(description="one per message, in the order of the request")]


class PoppedMessage(Struct, kw_only=True, gc=False):
    message_id: GivenMessageId = UNSET
    receipt_handle: str
    body: TextBody = UNSET
    body_base64: EncodedBody = UNSET
    headers: Mapping[str, Any]
    ordering_key: str | UnsetType = UNSET
    queue: QueueIndex
    delivery_count: Annotated[int, Meta(ge=1, description="number of times that it was handed out, including this one")]
    published_at: GivenTime = UNSET
    first_delivered_at: float
    invisible_until: float


class SettleResult(Struct, gc=False):
    status: SettleStatus
    invisible_until: Annotated[float, Meta(description="the new end of an extended lease")] | UnsetType = UNSET


_Settled: TypeAlias = (
    Annotated[list[SettleResult], Meta(description="one per entry of this field of the request, in its order")]
    | UnsetType
)


class PopAnswer(Struct, gc=False):
    messages: Annotated[list[PoppedMessage], Meta(description="empty if the wait ended without a message")]
    ack: _Settled = UNSET
    release: _Settled = UNSET
    extend: _Settled = UNSET
    reject: _Settled = UNSET


class SettleAnswer(Struct, gc=False):
    results: Annotated[list[SettleResult], Meta(description="one per entry, in the order of the request")]


class QueueState(Struct, kw_only=True, gc=False):
    queue: int
    broker_queue: str
    ready: Annotated[int | None, Meta(description="null: the queue does not exist on the broker")]
    in_flight: int
    delayed: int
    blocked: int
    owned: Annotated[bool, Meta(description="whether this proxy consumes the queue now")]


class RetryState(Struct, kw_only=True, gc=False):
    initial_seconds: float
    multiplier: float
    max_seconds: float


class PolicyState(Struct, kw_only=True, gc=False):
    invisibility_seconds: float
    max_lease_seconds: Annotated[float, Meta(description="maximum age of a lease with extensions")]
    max_deliveries: Annotated[int | None, Meta(description="null: no limit")]
    retry: RetryState
    max_in_flight: Annotated[int | None, Meta(description="null: no limit")]
    paused: bool
    min_replicas: Annotated[int | None, Meta(description="null: not set for this group")]


_COUNTED = "since the proxies have started; null: the group has no counts of its own (--metrics-groups-max)"


class SubscriptionState(Struct, kw_only=True, gc=False):
    mode: ModeName
    ready: int
    in_flight: int
    delayed: int
    blocked: Annotated[
        int, Meta(description="ready messages that wait behind an earlier one with the same ordering key")
    ]
    dead: int
    oldest_age_seconds: Annotated[
        float | None, Meta(description="the oldest message waits at least so long; null: none is known to wait")
    ]
    backlog: Annotated[int, Meta(description="ready and in flight together, for autoscalers")]
    pollers: Annotated[int, Meta(description="pops and pulls that wait now")]
    polls_count: Annotated[int, Meta(description="pops and pulls since the proxies have started")]
    published_count: Annotated[int | None, Meta(description="messages published to the topic; " + _COUNTED)]
    delivered_count: Annotated[int | None, Meta(description="leases given; " + _COUNTED)]
    settled_count: Annotated[
        int | None, Meta(description="messages acked, dead-lettered or dropped at the end of their ttl; " + _COUNTED)
    ]
    expired_count: Annotated[int | None, Meta(description="leases that expired; " + _COUNTED)]
    redelivered_count: Annotated[
        int | None, Meta(description="deliveries of messages that had been delivered before; " + _COUNTED)
    ]
    dead_lettered_count: Annotated[int | None, Meta(description="messages dead-lettered; " + _COUNTED)]
    queues: list[QueueState]
    policy: PolicyState


class LeaseGroupAnswer(Struct, kw_only=True, gc=False):
    count: Annotated[
        int,
        Meta(ge=0, description="number of messages in the slices; 0: no message was ready, and the group was not kept"),
    ]
    slices: int
    lost: Annotated[
        int, Meta(ge=0, description="members that were leased by other clients after the leases had expired")
    ]
    existing: Annotated[bool, Meta(description="the group existed already; its membership never changes")]


class LeaseGroupMessage(Struct, kw_only=True, gc=False):
    position: Annotated[int, Meta(ge=0, description="the position in the group")]
    message_id: GivenMessageId = UNSET
    body: TextBody = UNSET
    body_base64: EncodedBody = UNSET
    headers: Mapping[str, Any]
    ordering_key: str | UnsetType = UNSET
    queue: QueueIndex
    delivery_count: Annotated[int, Meta(ge=1, description="at the time when the group was formed")]
    published_at: GivenTime = UNSET
    first_delivered_at: float


class LeaseGroupMessages(Struct, gc=False):
    messages: Annotated[list[LeaseGroupMessage], Meta(description="the same messages in the same order each time")]


class LeaseGroupsAcked(Struct, kw_only=True, gc=False):
    acked: int
    already_acked: Annotated[int, Meta(description="acked by earlier requests with the same through_epoch")]
    lost: Annotated[int, Meta(description="members that were leased by other clients, and were not acked here")]


class ExtendedLeaseGroup(Struct, kw_only=True, gc=False):
    epoch: int
    status: Literal["extended", "expired"]
    count: int
    lost: int
    remaining_seconds: float


class LeaseGroupsExtended(Struct, gc=False):
    lease_groups: Annotated[
        list[ExtendedLeaseGroup],
        Meta(
            description="sorted by epoch; expired: the leases have expired, PUT the group to lease its messages again"
        ),
    ]


class LeaseGroupsReleased(Struct, gc=False):
    released: Annotated[int, Meta(description="messages that are visible again")]


LeaseGroupStateName: TypeAlias = Literal["forming", "leased", "expired"]


class LeaseGroupState(Struct, kw_only=True, gc=False):
    stream: str
    epoch: int
    state: Annotated[
        LeaseGroupStateName,
        Meta(description="forming: its PUT has not been answered; expired: its leases have expired"),
    ]
    count: int
    slices: int
    lost: int
    remaining_seconds: float
    age_seconds: float
    held_seconds: Annotated[float, Meta(description="seconds for which it has been leased without a break")]


class LeaseGroupList(Struct, gc=False):
    lease_groups: Annotated[
        list[LeaseGroupState], Meta(description="the unacked lease groups, sorted by stream and epoch")
    ]


class _Shown(Protocol):
    body: Any
    body_base64: Any


ShownT = TypeVar("ShownT", bound=_Shown)


def in_json(shown: ShownT, body: bytes) -> ShownT:
    """Set the body of ``shown`` to ``body`` as text or, if ``body`` is not UTF-8, in base64. Return ``shown``."""
    try:
        shown.body = body.decode()
    except UnicodeDecodeError:
        shown.body = UNSET
        shown.body_base64 = b64encode(body).decode()
    return shown


def packed_bytes(message: Message) -> int:
    """Return an upper bound in bytes for the size that ``message`` takes in a MessagePack answer."""
    return size_of(message) + FIELDS_BYTES_MAX


def json_bytes(message: Message) -> int:
    """Return an upper bound in bytes for the size that ``message`` takes in a JSON answer. JSON contains binary bodies
    in base64, and texts with escapes."""
    body = message.body
    size = len(body)
    around = (size_of(message) - size) * ESCAPED_LENGTH_MAX + FIELDS_BYTES_MAX
    if size <= PLAIN_BYTES_MAX:
        return around + size * ESCAPED_LENGTH_MAX
    try:
        body.decode()
    except UnicodeDecodeError:
        return around + (size + 2) // 3 * 4
    controls = size - len(body.translate(None, _CONTROLS))
    return around + size + controls * (ESCAPED_LENGTH_MAX - 1) + body.count(b'"') + body.count(b"\\")
