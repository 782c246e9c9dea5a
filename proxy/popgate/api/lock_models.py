"""Defines the bodies of requests and answers about locks: field names, types and limits. Times are Unix seconds."""

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from popgate.api.requests import WaitSeconds
from popgate.domain.locks import HOLDER_LENGTH_MAX, LOCK_SECONDS_MAX, SLOTS_MAX

TOKEN_LENGTH_MAX = 128
FENCING_TOKEN_MAX = 2**63 - 1

KindName: TypeAlias = Literal["mutex", "persistent_mutex", "semaphore"]
Holder: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=HOLDER_LENGTH_MAX, description="name of the holder, for people")
]
Token: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=TOKEN_LENGTH_MAX, description="as returned by acquire; a secret")
]
Seconds: TypeAlias = Annotated[
    float, Meta(ge=1, le=LOCK_SECONDS_MAX, description="the lock ends after this time, unless it is renewed")
]
FencingToken: TypeAlias = Annotated[
    int,
    Meta(description="only grows in each slot: the protected resource must refuse lower ones than it has seen"),
]
Slot: TypeAlias = Annotated[int, Meta(description="from 1; a mutex has one")]


class LockChange(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A request that creates or changes a lock. ``kind`` decides which ``slots`` and ``enabled`` are valid."""

    kind: KindName
    slots: (
        Annotated[
            float,
            Meta(ge=0, le=SLOTS_MAX, description="number of holders; default: unchanged, or 1 for a new lock"),
        ]
        | UnsetType
    ) = UNSET
    enabled: (
        Annotated[
            bool,
            Meta(
                description="false: it can't be acquired until this is true; default: unchanged, or true for a new lock"
            ),
        ]
        | UnsetType
    ) = UNSET


class LockAcquireRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    holder: Holder
    ttl_seconds: Seconds
    wait_seconds: WaitSeconds | UnsetType = UNSET


class LockTokenRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    token: Token


class LockRenewRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    token: Token
    ttl_seconds: Seconds | UnsetType = UNSET


class LockForceReleaseRequest(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    holder: Annotated[str, Meta(max_length=HOLDER_LENGTH_MAX, description="only locks of this holder")] | UnsetType = (
        UNSET
    )
    fencing_token: (
        Annotated[int, Meta(ge=0, le=FENCING_TOKEN_MAX, description="only the lock with this token")]
        | Annotated[float, Meta(ge=0, lt=2.0**63)]
        | UnsetType
    ) = UNSET


class LockHolderAnswer(Struct, kw_only=True, gc=False):
    holder: str
    slot: Slot
    fencing_token: FencingToken | None
    acquired_at: float | None
    expires_at: Annotated[float | None, Meta(description="null if it is not held through this proxy")]


class LockAnswer(Struct, kw_only=True, gc=False):
    name: str
    kind: KindName
    slots: int
    enabled: bool
    holders: list[LockHolderAnswer]
    waiting: int


class LockList(Struct, gc=False):
    locks: Annotated[
        list[LockAnswer],
        Meta(
            description="sorted by name, as they were defined, with the holders and waiting clients of this proxy only"
        ),
    ]


class LockAcquired(Struct, kw_only=True, gc=False):
    acquired: Annotated[
        bool, Meta(description="false: others held it during the whole wait; all other fields are null")
    ]
    token: Annotated[str | None, Meta(description="for verify, renew and release; keep it secret")] = None
    fencing_token: FencingToken | None = None
    slot: Slot | None = None
    expires_at: float | None = None


class LockHeldAnswer(Struct, kw_only=True, gc=False):
    held: Annotated[bool, Meta(description="always true: a lost lock is answered 409, lock_lost")]
    fencing_token: FencingToken
    expires_at: float


class LockReleased(Struct, gc=False):
    released: Annotated[bool, Meta(description="false: it was no longer held")]


class LockForceReleased(Struct, kw_only=True, gc=False):
    released: int
    holders: Annotated[list[LockHolderAnswer], Meta(description="the former holders")]


class LockDeleted(Struct, gc=False):
    deleted: bool
