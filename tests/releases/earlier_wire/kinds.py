"""Every kind of message in version 1: from the port to the wire, and back, with its answer.

Flat tuples are written by place, which is quickest, as a batch has hundreds; that they have the wire's fields in the
wire's order is checked by the tests.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from popgate.domain.lease import LeaseRecord
from popgate.domain.lease_group import GroupKey
from popgate.domain.message import Message
from popgate.domain.names import Subscription
from popgate.ports import peers
from releases.earlier_wire.fields import (
    AvailableWire,
    CountHeldWire,
    FetchWire,
    FollowWire,
    GroupKeyWire,
    HeldWire,
    LearnedRecordWire,
    LearnedWire,
    LeaseForGroupWire,
    MessageWire,
    OrderWire,
    PurgedWire,
    PurgeWire,
    RecordWire,
    ResultWire,
    SettleWire,
    SubscriptionWire,
    WantedWire,
)


def _subscription(one: Subscription) -> SubscriptionWire:
    return SubscriptionWire(*one)


def _subscription_of(one: SubscriptionWire) -> Subscription:
    return Subscription(one.topic, one.group)


def _records(many: Iterable[peers.LearnedRecord]) -> tuple[LearnedRecordWire, ...]:
    return tuple(
        LearnedRecordWire(one.queue, one.copy_id, RecordWire(*one.record), one.remaining_seconds) for one in many
    )


def _record_of(one: RecordWire) -> LeaseRecord:
    return LeaseRecord(
        state=one.state,
        lease_id=one.lease_id,
        visible_at=one.visible_at,
        delivery_count=one.delivery_count,
        first_delivered_at=one.first_delivered_at,
        changed_at=one.changed_at,
        epoch=one.epoch,
        leased_at=one.leased_at,
        target=one.target,
        target_copy_id=one.target_copy_id,
        reason=one.reason,
    )


def _records_of(many: Iterable[LearnedRecordWire]) -> tuple[peers.LearnedRecord, ...]:
    return tuple(
        peers.LearnedRecord(one.queue, one.copy_id, _record_of(one.record), one.remaining_seconds) for one in many
    )


def _lease_for_group(one: peers.LeaseForGroup) -> LeaseForGroupWire:
    key = GroupKeyWire(_subscription(one.key.subscription), one.key.stream, one.key.epoch)
    return LeaseForGroupWire(_subscription(one.subscription), key, one.builder, one.lease_id, one.count, one.seconds)


def _lease_for_group_of(one: LeaseForGroupWire) -> peers.LeaseForGroup:
    return peers.LeaseForGroup(
        subscription=_subscription_of(one.subscription),
        key=GroupKey(_subscription_of(one.key.subscription), one.key.stream, one.key.epoch),
        builder=one.builder,
        lease_id=one.lease_id,
        count=one.count,
        seconds=one.seconds,
    )


def _fetch(one: peers.Fetch) -> FetchWire:
    return FetchWire(_subscription(one.subscription), _records(one.leases))


def _fetch_of(one: FetchWire) -> peers.Fetch:
    return peers.Fetch(subscription=_subscription_of(one.subscription), leases=_records_of(one.leases))


def _settle(one: peers.SettleAtOwner) -> SettleWire:
    return SettleWire(_subscription(one.subscription), one.verb, tuple(OrderWire(*order[:3]) for order in one.orders))


def _settle_of(one: SettleWire) -> peers.SettleAtOwner:
    return peers.SettleAtOwner(
        subscription=_subscription_of(one.subscription),
        verb=one.verb,
        orders=tuple(peers.PeerOrder(order.receipt_handle, order.seconds, order.reason) for order in one.orders),
    )


def _message(one: Message) -> MessageWire:
    wire = MessageWire(*one)  # type: ignore[arg-type]  # its headers are a mapping, which a dict replaces here
    return wire if type(wire.headers) is dict else replace(wire, headers=dict(wire.headers))


def _message_of(one: MessageWire) -> Message:
    return Message(
        copy_id=one.copy_id,
        message_id=one.message_id,
        body=one.body,
        headers=one.headers,
        ordering_key=one.ordering_key,
        published_at=one.published_at,
        visible_at=one.visible_at,
        expires_at=one.expires_at,
    )


def _held_of(one: HeldWire) -> peers.QueueCounts:
    return peers.QueueCounts(
        number=one.number,
        ready=one.ready,
        in_flight=one.in_flight,
        waiting=one.waiting,
        blocked=one.blocked,
        at_broker=one.at_broker,
        dead_held=one.dead_held,
        is_paused=one.is_paused,
        is_open=one.is_open,
        oldest_at=one.oldest_at,
    )


def _same(value: Any) -> Any:
    return value


class Kind(NamedTuple):
    """How one kind of message is written and read, and its answer: there and back each."""

    wire_type: type[Struct]
    write: Callable[[Any], Struct]
    read: Callable[[Any], peers.PeerMessage[Any]]
    answer_type: Any
    write_answer: Callable[[Any], Any] = _same
    read_answer: Callable[[Any], Any] = _same


def _learned(one: peers.Learned) -> LearnedWire:
    return LearnedWire(_records(one.records))


def _learned_of(one: LearnedWire) -> peers.Learned:
    return peers.Learned(records=_records_of(one.records))


def _wanted(one: peers.Wanted) -> WantedWire:
    return WantedWire(_subscription(one.subscription), one.seconds, one.since)


def _wanted_of(one: WantedWire) -> peers.Wanted:
    return peers.Wanted(subscription=_subscription_of(one.subscription), seconds=one.seconds, since=one.since)


def _available(one: peers.Available) -> AvailableWire:
    return AvailableWire(_subscription(one.subscription))


def _available_of(one: AvailableWire) -> peers.Available:
    return peers.Available(subscription=_subscription_of(one.subscription))


def _count_held(one: peers.CountMessages) -> CountHeldWire:
    return CountHeldWire(_subscription(one.subscription))


def _count_held_of(one: CountHeldWire) -> peers.CountMessages:
    return peers.CountMessages(subscription=_subscription_of(one.subscription))


def _purge(one: peers.PurgeAtOwner) -> PurgeWire:
    return PurgeWire(_subscription(one.subscription))


def _purge_of(one: PurgeWire) -> peers.PurgeAtOwner:
    return peers.PurgeAtOwner(subscription=_subscription_of(one.subscription))


def _follow(_: peers.Follow) -> FollowWire:
    return FollowWire()


def _follow_of(_: FollowWire) -> peers.Follow:
    return peers.Follow()


def _messages(answer: list[Message | None]) -> list[MessageWire | None]:
    return [None if one is None else _message(one) for one in answer]


def _messages_of(answer: list[MessageWire | None]) -> list[Message | None]:
    return [None if one is None else _message_of(one) for one in answer]


def _held(answer: list[peers.QueueCounts]) -> list[HeldWire]:
    return [HeldWire(*one) for one in answer]


def _all_held_of(answer: list[HeldWire]) -> list[peers.QueueCounts]:
    return [_held_of(one) for one in answer]


def _results(answer: list[peers.PeerResult]) -> list[ResultWire]:
    return [ResultWire(*one) for one in answer]


def _results_of(answer: list[ResultWire]) -> list[peers.PeerResult]:
    return [peers.PeerResult(one.status, one.invisible_until) for one in answer]


def _purged(answer: peers.PurgeResult) -> PurgedWire:
    return PurgedWire(*answer)


def _purged_of(answer: PurgedWire) -> peers.PurgeResult:
    return peers.PurgeResult(answer.purged, answer.complete)


KINDS: Mapping[type[peers.PeerMessage[Any]], Kind] = {
    peers.Learned: Kind(LearnedWire, _learned, _learned_of, None),
    peers.Wanted: Kind(WantedWire, _wanted, _wanted_of, bool),
    peers.Available: Kind(AvailableWire, _available, _available_of, None),
    peers.LeaseForGroup: Kind(LeaseForGroupWire, _lease_for_group, _lease_for_group_of, int),
    peers.Fetch: Kind(FetchWire, _fetch, _fetch_of, list[MessageWire | None], _messages, _messages_of),
    peers.CountMessages: Kind(CountHeldWire, _count_held, _count_held_of, list[HeldWire], _held, _all_held_of),
    peers.SettleAtOwner: Kind(SettleWire, _settle, _settle_of, list[ResultWire], _results, _results_of),
    peers.PurgeAtOwner: Kind(PurgeWire, _purge, _purge_of, PurgedWire, _purged, _purged_of),
    peers.Follow: Kind(FollowWire, _follow, _follow_of, None),
}
