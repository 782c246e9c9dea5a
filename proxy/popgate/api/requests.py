"""Defines the bodies of data plane requests: field names, types and limits.

One definition determines decoding from JSON, decoding from MessagePack, and the OpenAPI schema. ``reading`` checks the
rules that a type can't express (the size of a text in bytes, exactly one of two fields, header values).
"""

from typing import Annotated, Any, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from popgate.domain.filters import FILTER_HEADERS_MAX, FILTER_VALUES_MAX, FilterValue
from popgate.domain.lease_group import EPOCH_MAX, GROUP_MESSAGES_MAX, SLICES_MAX
from popgate.domain.message import BATCH_COUNT_MAX, SHORT_STRING_BYTES_MAX
from popgate.domain.names import NAME_PATTERN
from popgate.domain.quotas import HEADERS_MAX
from popgate.domain.topics import (
    DELAY_SECONDS_MAX,
    INVISIBILITY_SECONDS_MAX,
    RELEASE_DELAY_SECONDS_MAX,
    TTL_SECONDS_MAX,
    WAIT_SECONDS_MAX,
)
from popgate.engine.lease.moves import REASON_LENGTH_MAX

REQUEST_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of a publish. The headers and texts of 256 messages fit."""
SMALL_REQUEST_BYTES_MAX = 2 * 1024 * 1024
"""Maximum size of any other request. 256 entries fit, whatever their texts are."""
WAITING_REQUEST_BYTES_MAX = 256 * 1024
"""Maximum size of a request that waits: its body stays in memory for as long."""
CAUSE_LENGTH_MAX = 4_096
"""Maximum number of characters of an error's type and text in a request. A record keeps fewer of them."""
ATTEMPT_ID_LENGTH_MAX = 128
DEDUP_ID_LENGTH_MAX = 128
BASE64_PATTERN = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

ReceiptHandle: TypeAlias = Annotated[str, Meta(description="as returned by a pop")]
WaitSeconds: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        le=WAIT_SECONDS_MAX,
        description="how long to wait for the first message, or for the lock",
        extra_json_schema={"default": 0},
    ),
]
Reason: TypeAlias = Annotated[str, Meta(max_length=REASON_LENGTH_MAX, description="the reason, for later inspection")]


class PublishEntry(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One message to publish, with exactly one of ``body`` and ``body_base64``."""

    body: Annotated[
        Any,
        Meta(
            description="the body as text, may be empty; in MessagePack also as raw bytes (bin)",
            extra_json_schema={"type": "string"},
        ),
    ] = UNSET
    body_base64: (
        Annotated[
            str,
            Meta(
                description="the body as standard base64 with padding, for binary data",
                extra_json_schema={"pattern": BASE64_PATTERN},
            ),
        ]
        | UnsetType
    ) = UNSET
    headers: (
        Annotated[
            dict[str, Any],
            Meta(
                description="names of 1 to 255 bytes that don't begin with x-popgate-; 64 KiB in total",
                extra_json_schema={
                    "propertyNames": {
                        "minLength": 1,
                        "maxLength": SHORT_STRING_BYTES_MAX,
                        "pattern": "^(?![xX]-[pP][oO][pP][gG][aA][tT][eE]-)",
                    },
                    "additionalProperties": {
                        "type": ["string", "number", "boolean", "null"],
                        "minimum": -(2**63),
                        "maximum": 2**63 - 1,
                    },
                },
            ),
        ]
        | UnsetType
    ) = UNSET
    message_id: (
        Annotated[
            str,
            Meta(min_length=1, max_length=SHORT_STRING_BYTES_MAX, description="at most 255 bytes; minted if absent"),
        ]
        | UnsetType
    ) = UNSET
    ordering_key: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=SHORT_STRING_BYTES_MAX,
                description="at most 255 bytes; messages with the same key go to the same queue",
            ),
        ]
        | UnsetType
    ) = UNSET
    dedup_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=DEDUP_ID_LENGTH_MAX,
                description="another message with the same dedup_id for the same topic is a duplicate, within the "
                "server's --dedup-seconds (default: 5 minutes)",
            ),
        ]
        | UnsetType
    ) = UNSET
    delay_seconds: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=DELAY_SECONDS_MAX,
                description="delay until it becomes visible, for the groups that exist then; on RabbitMQ in whole "
                "seconds, rounded up",
                extra_json_schema={"default": 0},
            ),
        ]
        | UnsetType
    ) = UNSET
    ttl_seconds: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=TTL_SECONDS_MAX,
                description=(
                    "time after which it is discarded if it has not been leased, counted from when it became visible"
                ),
            ),
        ]
        | UnsetType
    ) = UNSET


class PackedEntry(PublishEntry, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One message to publish in MessagePack, in which a single byte can stand for a list or a map.

    So bodies and the values of headers are not decoded here, because they may be of types that are not permitted.
    """

    body: Raw = UNSET  # type: ignore[assignment]
    headers: Annotated[dict[str, Raw], Meta(max_length=HEADERS_MAX)] | UnsetType = UNSET


class PublishRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    messages: Annotated[list[PublishEntry], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


class PackedPublishRequest(PublishRequest, forbid_unknown_fields=True, kw_only=True, gc=False):
    messages: Annotated[list[PackedEntry], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]  # type: ignore[assignment]


class AckRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    receipt_handles: Annotated[list[ReceiptHandle], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


class ErrorEntry(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The error because of which a client gives a message back. Longer texts are cut."""

    type: Annotated[str, Meta(max_length=CAUSE_LENGTH_MAX, description="for example the name of the exception")] = ""
    text: Annotated[str, Meta(max_length=CAUSE_LENGTH_MAX, description="what it says")] = ""


Error: TypeAlias = Annotated[ErrorEntry, Meta(description="why, for the dead letter and `explain`")]
Client: TypeAlias = Annotated[
    str, Meta(description="name of the client, for the dead letter", extra_json_schema={"pattern": NAME_PATTERN})
]


class ReleaseEntry(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    receipt_handle: ReceiptHandle
    delay_seconds: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=RELEASE_DELAY_SECONDS_MAX,
                description="delay until it is visible again; default: from the policy's retry",
            ),
        ]
        | UnsetType
    ) = UNSET
    reason: Reason | UnsetType = UNSET
    error: Error | UnsetType = UNSET
    client_id: Client | UnsetType = UNSET


class ReleaseRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    entries: Annotated[list[ReleaseEntry], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


class ExtendEntry(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    receipt_handle: ReceiptHandle
    invisibility_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=INVISIBILITY_SECONDS_MAX,
            description="time from now after which the lease ends, limited by the policy's max_lease_seconds",
        ),
    ]


class ExtendRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    entries: Annotated[list[ExtendEntry], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


class RejectEntry(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    receipt_handle: ReceiptHandle
    reason: Reason | UnsetType = UNSET
    error: Error | UnsetType = UNSET
    client_id: Client | UnsetType = UNSET


class RejectRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    entries: Annotated[list[RejectEntry], Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


_SETTLED_FIRST = "messages of this group to settle before the pop, as in the request of this name"


class PopRequestBody(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    max_messages: Annotated[float, Meta(ge=1, le=BATCH_COUNT_MAX, extra_json_schema={"default": 1})] | UnsetType = UNSET
    wait_seconds: WaitSeconds | UnsetType = UNSET
    invisibility_seconds: (
        Annotated[
            float,
            Meta(
                ge=1, le=INVISIBILITY_SECONDS_MAX, description="how long the lease lasts; default: the policy's value"
            ),
        ]
        | UnsetType
    ) = UNSET
    attempt_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=ATTEMPT_ID_LENGTH_MAX,
                description="a pop that repeats it gets the same messages while their leases last",
            ),
        ]
        | UnsetType
    ) = UNSET
    client_id: (
        Annotated[
            str,
            Meta(
                description="name of the client, for the journal",
                extra_json_schema={"pattern": NAME_PATTERN},
            ),
        ]
        | UnsetType
    ) = UNSET
    filter: (
        Annotated[
            dict[str, FilterValue | Annotated[list[FilterValue], Meta(min_length=1, max_length=FILTER_VALUES_MAX)]],
            Meta(
                max_length=FILTER_HEADERS_MAX,
                description="header: its required value, or a list of allowed values; null means an absent header. "
                "Other messages stay for other pops",
            ),
        ]
        | UnsetType
    ) = UNSET
    ack: Annotated[list[ReceiptHandle], Meta(max_length=BATCH_COUNT_MAX, description=_SETTLED_FIRST)] | UnsetType = (
        UNSET
    )
    release: Annotated[list[ReleaseEntry], Meta(max_length=BATCH_COUNT_MAX, description=_SETTLED_FIRST)] | UnsetType = (
        UNSET
    )
    extend: Annotated[list[ExtendEntry], Meta(max_length=BATCH_COUNT_MAX, description=_SETTLED_FIRST)] | UnsetType = (
        UNSET
    )
    reject: Annotated[list[RejectEntry], Meta(max_length=BATCH_COUNT_MAX, description=_SETTLED_FIRST)] | UnsetType = (
        UNSET
    )


class LeaseGroupRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    max_messages: Annotated[
        float,
        Meta(
            ge=0,
            le=GROUP_MESSAGES_MAX,
            description="maximum number of messages to lease; 0: only find an existing group",
        ),
    ]
    slices: (
        Annotated[
            float,
            Meta(
                ge=1,
                le=SLICES_MAX,
                description="number of parts in which the group is read",
                extra_json_schema={"default": 1},
            ),
        ]
        | UnsetType
    ) = UNSET
    invisibility_seconds: (
        Annotated[
            float,
            Meta(
                ge=1, le=INVISIBILITY_SECONDS_MAX, description="how long the leases last; default: the policy's value"
            ),
        ]
        | UnsetType
    ) = UNSET


class LeaseGroupAckRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    through_epoch: (
        Annotated[int, Meta(ge=0, le=EPOCH_MAX, description="settle every lease group up to this epoch")]
        | Annotated[float, Meta(ge=0, lt=2.0**63)]
    )


class LeaseGroupExtendRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    invisibility_seconds: Annotated[
        float, Meta(ge=1, le=INVISIBILITY_SECONDS_MAX, description="time from now after which the leases end")
    ]


class LeaseGroupReleaseRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    after_epoch: (
        Annotated[int, Meta(ge=-1, le=EPOCH_MAX, description="give back every lease group of a later epoch; -1: all")]
        | Annotated[float, Meta(ge=-1, lt=2.0**63)]
    )
