"""Defines pydantic models for the requests and answers of the routes for dead letters and purges."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from popgate.domain.letter_filter import LetterFilter
from popgate.domain.message import BATCH_COUNT_MAX, MESSAGE_BYTES_MAX, SHORT_STRING_BYTES_MAX
from popgate.domain.names import NAME_PATTERN
from popgate.domain.topics import WAIT_SECONDS_MAX

LISTED_DEFAULT = 32
NAMED_MAX = 1_000
"""Maximum number of dead letters that a request may list by id."""
ID_LENGTH_MAX = 255
TEXT_LENGTH_MAX = 1_000
"""Maximum number of characters of a condition on dead letters."""
RATE_MAX = 100_000
SECONDS_MAX = 10 * 365 * 86_400
COUNT_MAX = 2**53


def _whole(value: object) -> object:
    """Convert a float without a fraction to an int, because JSON has only one type of number. Return other values
    unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
_Id = Annotated[str, Field(min_length=1, max_length=ID_LENGTH_MAX)]
_MessageId = Annotated[str, Field(min_length=1, max_length=SHORT_STRING_BYTES_MAX)]
_Ids = Annotated[
    list[_Id],
    Field(min_length=1, max_length=NAMED_MAX, description="the letters with these ids, as returned in a list"),
]
_MessageIds = Annotated[
    list[_MessageId],
    Field(min_length=1, max_length=NAMED_MAX, description="all letters with one of these message_ids"),
]
_NOT_BOTH: dict[str, Any] = {
    "not": {
        "required": ["ids", "message_ids"],
        "properties": {"ids": {"type": "array"}, "message_ids": {"type": "array"}},
    }
}
"""The part of the JSON schema that forbids a request to set both ``ids`` and ``message_ids``. A null field counts as
absent."""


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class LetterConditions(BaseModel):
    """Conditions on dead letters. A letter must meet all those that are set."""

    text: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=TEXT_LENGTH_MAX,
            description="occurs in its ids, key, cause, reason, error, client or headers, or in the first 4 KiB of its "
            "body, in upper or lower case",
        ),
    ] = None
    cause: Annotated[str | None, Field(min_length=1, max_length=TEXT_LENGTH_MAX, description="its cause")] = None
    reason: Annotated[
        str | None,
        Field(min_length=1, max_length=TEXT_LENGTH_MAX, description="occurs in its reason or its last error"),
    ] = None
    client: Annotated[
        str | None, Field(min_length=1, max_length=TEXT_LENGTH_MAX, description="the client that had it last")
    ] = None
    ordering_key: Annotated[str | None, Field(min_length=1, max_length=TEXT_LENGTH_MAX)] = None
    message_id: Annotated[str | None, Field(min_length=1, max_length=SHORT_STRING_BYTES_MAX)] = None
    header: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=TEXT_LENGTH_MAX,
            description="occurs in one of its headers, written as `name: value`",
        ),
    ] = None
    dead_after: Annotated[
        float | None, Field(ge=0, description="it was dead-lettered at this time (Unix seconds) or later")
    ] = None
    dead_before: Annotated[
        float | None, Field(ge=0, description="it was dead-lettered before this time (Unix seconds)")
    ] = None

    @property
    def filter(self) -> LetterFilter | None:
        """The conditions as a filter, or None if there are none."""
        given = self.model_dump(include=set(LetterConditions.model_fields), exclude_none=True)
        return LetterFilter(**given) if given else None


class DeadLetterFilter(LetterConditions):
    """The letters that meet all of these conditions. At least one condition must be set."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, json_schema_extra={"minProperties": 1}
    )

    @model_validator(mode="after")
    def _has_conditions(self) -> "DeadLetterFilter":
        if self.filter is None:
            raise PydanticCustomError(
                "empty_filter", "it must have at least one condition; without a filter, all letters are meant"
            )
        return self


class RedriveRequest(_Input):
    """A request that redrives dead letters. At most one of ``ids`` and ``message_ids`` may be set. Without these and
    without a ``filter``, the request applies to all dead letters that exist now."""

    model_config = ConfigDict(json_schema_extra=_NOT_BOTH)

    max_messages: (
        Annotated[int, Field(ge=1, le=COUNT_MAX, description="maximum number of letters to move"), _WHOLE] | None
    ) = None
    ids: _Ids | None = None
    message_ids: _MessageIds | None = None
    filter: DeadLetterFilter | None = None
    target_topic: (
        Annotated[
            str,
            Field(
                pattern=NAME_PATTERN,
                description="publish to all groups of this topic; without it, move back to the original queues",
            ),
        ]
        | None
    ) = None
    rate_per_second: Annotated[float, Field(gt=0, le=RATE_MAX, description="maximum rate")] | None = None
    wait_seconds: Annotated[float, Field(ge=0, le=WAIT_SECONDS_MAX, description="how long to wait for its end")] = 0


class PurgeRequest(_Input):
    """A request that permanently deletes dead letters. At most one of ``ids`` and ``message_ids`` may be set. Without
    any condition, the request applies to all dead letters that exist now."""

    model_config = ConfigDict(json_schema_extra=_NOT_BOTH)

    ids: _Ids | None = None
    message_ids: _MessageIds | None = None
    filter: DeadLetterFilter | None = None
    older_than_seconds: (
        Annotated[float, Field(ge=0, le=SECONDS_MAX, description="only letters that were dead-lettered longer ago")]
        | None
    ) = None


class DeadLetterError(BaseModel):
    type: str
    text: str


class AttemptAnswer(BaseModel):
    """One attempt on a message. Unknown values are omitted."""

    attempt: Annotated[int, Field(description="its number, from 1")]
    leased_at: float
    ended_at: float
    outcome: Annotated[str, Field(description='"released", "rejected" or "expired"')]
    client: str | None = None
    error_type: str | None = None
    error_text: str | None = None
    reason: str | None = None


class DeadLetterAnswer(BaseModel):
    """A message, and the reason why it is a dead letter. Unknown values are omitted."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["body"]}, {"required": ["body_base64"]}]})

    id: Annotated[str, Field(description="unique id of this dead letter; message ids may repeat")]
    message_id: str | None = None
    body: Annotated[str | None, Field(description="the body where it is valid UTF-8")] = None
    body_base64: Annotated[str | None, Field(description="the body where it is not valid UTF-8")] = None
    body_bytes: Annotated[int, Field(description="the length of the whole body")]
    body_is_cut: Annotated[bool | None, Field(description="true if body_bytes_max shortened it")] = None
    headers: Annotated[dict[str, Any], Field(description="the publisher's")]
    ordering_key: str | None = None
    published_at: float | None = None
    cause: Annotated[str | None, Field(description='"rejected" or "max_deliveries"')] = None
    reason: Annotated[str | None, Field(description="the client's reason, or the cause")] = None
    error: Annotated[DeadLetterError | None, Field(description="the last error that a client reported")] = None
    client: Annotated[str | None, Field(description="the client that had it last")] = None
    attempts: Annotated[list[AttemptAnswer] | None, Field(description="the latest attempts, the oldest first")] = None
    delivery_count: int | None = None
    first_delivered_at: float | None = None
    dead_lettered_at: float | None = None
    source_queue: Annotated[int | None, Field(description="the index of the queue that it came from")] = None


class DeadLetterList(BaseModel):
    messages: list[DeadLetterAnswer]
    dead: Annotated[int, Field(description="total number of dead letters")]
    next: Annotated[str | None, Field(description="give it as `after` for the next page; absent at the end")] = None
    searched: Annotated[
        int | None, Field(description="in a search: the number of letters that were compared for this page")
    ] = None
    matching: Annotated[int | None, Field(description="in a search: how many of them meet the conditions")] = None


class RedriveAnswer(BaseModel):
    id: str
    state: Annotated[
        Literal["running", "cancelling", "done", "cancelled", "failed"],
        Field(description="failed: ended early, for the reason in `trouble`"),
    ]
    total: Annotated[int | None, Field(description="number of letters to move; null: not known")]
    moved: Annotated[int, Field(description="number of letters confirmed at their target")]
    failed: Annotated[int, Field(description="number of letters that could not be moved, and are still dead letters")]
    not_found: Annotated[
        int | None, Field(description="number of given `ids` without a letter; null: not known, or none given")
    ]
    started_at: float
    ended_at: float | None
    target_topic: Annotated[str | None, Field(description="null: each letter's original queue")]
    rate_per_second: float | None
    trouble: Annotated[
        str | None, Field(description="why some letters failed, or what the redrive waits for; null: no trouble")
    ]


class PurgedLettersAnswer(BaseModel):
    purged: int
    dead: Annotated[int, Field(description="number of remaining dead letters")]
    complete: Annotated[bool, Field(description="false: it took too long; repeat the request for the rest")]


class PurgedGroupAnswer(BaseModel):
    purged: int
    complete: Annotated[bool, Field(description="false: it took too long; repeat the request for the rest")]


class ListQuery(LetterConditions):
    """The query of a request that lists or searches dead letters. Numbers arrive as texts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    max_messages: Annotated[
        int, Field(ge=0, le=BATCH_COUNT_MAX, description="maximum number of letters; 0 only counts them")
    ] = LISTED_DEFAULT
    after: Annotated[
        str | None, Field(min_length=1, max_length=ID_LENGTH_MAX, description="`next` of the last page")
    ] = None
    body_bytes_max: Annotated[
        int | None, Field(ge=0, le=MESSAGE_BYTES_MAX, description="maximum length of a body; 0 omits bodies")
    ] = None
