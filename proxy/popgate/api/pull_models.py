"""The requests and answers of pull clients. One definition serves the readers, the answers and the OpenAPI schema."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from popgate.api.answers import EncodedBody, GivenMessageId, GivenTime, ModeName, QueueIndex, TextBody
from popgate.api.requests import WaitSeconds
from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import NAME_PATTERN

GENERATION_MAX = 2**53 - 1
"""The largest number that every reader of JSON represents exactly."""

ClientName: TypeAlias = Annotated[
    str,
    Meta(
        description="what the client calls itself: one running program, and the same name as long as it runs",
        extra_json_schema={"pattern": NAME_PATTERN},
    ),
]
Generation: TypeAlias = Annotated[
    float, Meta(ge=0, le=GENERATION_MAX, description="as the assignment was answered last")
]
PulledHandle: TypeAlias = Annotated[str, Meta(description="as a pull gave it")]


class AssignmentRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    client_id: ClientName
    supports: Annotated[
        list[Literal["pop", "pull"]], Meta(min_length=1, max_length=8, description="what the client can do")
    ]
    generation: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=GENERATION_MAX,
                description="as it was answered last: the client has let go of all that is not in that answer. Without "
                "it the client begins anew, and what it had returns",
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
                description="the receipt handle of the last message that was seen: what comes behind it is answered. "
                "Without it all that is not committed is answered again, from its beginning"
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
    queues: Annotated[
        list[int], Meta(description="those that the client may pull from; none in another mode than pull")
    ]
    heartbeat_seconds: Annotated[
        float, Meta(description="ask again after that long; the session lasts at least thrice")
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
    delivery_count: Annotated[int, Meta(ge=1, description="to how many sessions it was handed out, this one included")]
    published_at: GivenTime = UNSET
    first_delivered_at: float


class PullAnswer(Struct, gc=False):
    messages: Annotated[list[PulledMessage], Meta(description="in order; empty when the wait ended without one")]


class CommitAnswer(Struct, gc=False):
    committed: Annotated[int, Meta(description="messages that this request has settled; 0: all were settled before")]
