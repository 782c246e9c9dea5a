"""Defines the bodies of pull clients' requests and of the answers. One definition determines decoding, encoding and the
OpenAPI schema."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from popgate.api.answers import EncodedBody, GivenMessageId, GivenTime, ModeName, QueueIndex, TextBody
from popgate.api.requests import WaitSeconds
from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import NAME_PATTERN

GENERATION_MAX = 2**53 - 1
"""Maximum generation: the largest integer that every JSON decoder represents exactly."""

ClientName: TypeAlias = Annotated[
    str,
    Meta(
        description="name of the client: unique to one running program, and unchanged while it runs",
        extra_json_schema={"pattern": NAME_PATTERN},
    ),
]
Generation: TypeAlias = Annotated[float, Meta(ge=0, le=GENERATION_MAX, description="from the latest assignment answer")]
PulledHandle: TypeAlias = Annotated[str, Meta(description="as returned by a pull")]


class AssignmentRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    client_id: ClientName
    supports: Annotated[
        list[Literal["pop", "pull"]], Meta(min_length=1, max_length=8, description="modes that the client supports")
    ]
    generation: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=GENERATION_MAX,
                description="from the latest answer: confirms that the client has dropped all queues that are not in "
                "that answer. Without it the client starts over, and its queues return",
            ),
        ]
        | UnsetType
    ) = UNSET


class PullRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    client_id: ClientName
    generation: Generation
    max_messages: Annotated[float, Meta(ge=1, le=BATCH_COUNT_MAX, extra_json_schema={"default": 1})] | UnsetType = UNSET
    wait_seconds: WaitSeconds | UnsetType = UNSET
    after: (
        Annotated[
            str,
            Meta(
                description="receipt handle of the last received message; the answer starts behind it. Without it, all "
                "uncommitted messages are answered again, from the beginning"
            ),
        ]
        | UnsetType
    ) = UNSET


class CommitRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    client_id: ClientName
    generation: Generation
    receipt_handle: PulledHandle


class AssignmentAnswer(Struct, kw_only=True, gc=False):
    mode: ModeName
    generation: int
    queues: Annotated[list[int], Meta(description="queues from which the client may pull; empty in any mode but pull")]
    heartbeat_seconds: Annotated[
        float, Meta(description="seconds until the next request; the session lasts at least three times as long")
    ]


class AssignmentLeft(Struct, gc=False):
    left: bool


class PulledMessage(Struct, kw_only=True, gc=False):
    message_id: GivenMessageId = UNSET
    receipt_handle: str
    body: TextBody = UNSET
    body_base64: EncodedBody = UNSET
    headers: Mapping[str, Any]
    ordering_key: str | UnsetType = UNSET
    queue: QueueIndex
    delivery_count: Annotated[
        int, Meta(ge=1, description="number of sessions to which it was handed out, including this one")
    ]
    published_at: GivenTime = UNSET
    first_delivered_at: float


class PullAnswer(Struct, gc=False):
    messages: Annotated[list[PulledMessage], Meta(description="in order; empty if the wait ended without a message")]


class CommitAnswer(Struct, gc=False):
    committed: Annotated[
        int, Meta(description="number of messages that this request has settled; 0: all were settled before")
    ]
