"""Defines the encoded format of version 1: a type for each message, answer and part of them.

These types are separate from the types of the domain. So a change of the domain does not change the data that proxies
of an earlier release receive. The only permitted change of this version is a new field with a default, because the
decoder skips unknown fields. Tests with stored bytes enforce this.
"""

from typing import Any

from msgspec import Struct

from popgate.domain.lease import RecordState
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, StreamName, TopicName


class SubscriptionWire(Struct, frozen=True):
    topic: TopicName
    group: GroupName


class RecordWire(Struct, frozen=True):
    state: RecordState
    lease_id: LeaseId
    visible_at: float
    delivery_count: int
    first_delivered_at: float
    changed_at: float
    epoch: int
    leased_at: float
    target: BrokerQueue | None = None
    target_copy_id: CopyId | None = None
    reason: str = ""


class LearnedRecordWire(Struct, frozen=True):
    queue: BrokerQueue
    copy_id: CopyId
    record: RecordWire
    remaining_seconds: float


class GroupKeyWire(Struct, frozen=True):
    subscription: SubscriptionWire
    stream: StreamName
    epoch: int


class OrderWire(Struct, frozen=True, omit_defaults=True):
    receipt_handle: str
    seconds: float | None
    reason: str
    error_type: str = ""
    error_text: str = ""
    client: str = ""


class LearnedWire(Struct, frozen=True, tag="learned"):
    records: tuple[LearnedRecordWire, ...]


class WantedWire(Struct, frozen=True, tag="wanted"):
    subscription: SubscriptionWire
    seconds: float
    since: int = 0


class AvailableWire(Struct, frozen=True, tag="available"):
    subscription: SubscriptionWire


class LeaseForGroupWire(Struct, frozen=True, tag="lease_for_group"):
    subscription: SubscriptionWire
    key: GroupKeyWire
    builder: str
    lease_id: LeaseId
    count: int
    seconds: float


class FetchWire(Struct, frozen=True, tag="fetch"):
    subscription: SubscriptionWire
    leases: tuple[LearnedRecordWire, ...]


class CountHeldWire(Struct, frozen=True, tag="count_held"):
    subscription: SubscriptionWire


class SettleWire(Struct, frozen=True, tag="settle"):
    subscription: SubscriptionWire
    verb: str
    orders: tuple[OrderWire, ...]


class PurgeWire(Struct, frozen=True, tag="purge"):
    subscription: SubscriptionWire


class FollowWire(Struct, frozen=True, tag="follow"):
    pass


class MessageWire(Struct, frozen=True):
    """A message of the broker, as part of an answer."""

    copy_id: CopyId
    message_id: str
    body: bytes
    headers: dict[str, Any]
    ordering_key: str | None
    published_at: float
    visible_at: float | None = None
    expires_at: float | None = None


class HeldWire(Struct, frozen=True):
    number: int
    ready: int
    in_flight: int
    waiting: int
    blocked: int
    at_broker: int
    dead_held: int
    is_paused: bool
    is_open: bool
    oldest_at: float | None


class ResultWire(Struct, frozen=True):
    status: str
    invisible_until: float | None


class PurgedWire(Struct, frozen=True):
    purged: int
    complete: bool


MessageOnWire = (
    LearnedWire
    | WantedWire
    | AvailableWire
    | LeaseForGroupWire
    | FetchWire
    | CountHeldWire
    | SettleWire
    | PurgeWire
    | FollowWire
)
