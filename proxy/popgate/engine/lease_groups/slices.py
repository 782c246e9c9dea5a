"""Reads slices of lease groups. Every read of a slice returns the same messages in the same order.

The store returns the members of a slice, and whether their leases are valid. The bodies are in the memory of this proxy
or of other owners of the queues, or are fetched again from the broker.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from popgate.domain.errors import BrokerUnavailable, InvalidRequest, LeaseGroupExpired, LeaseGroupNotFound
from popgate.domain.lease import RecordState
from popgate.domain.lease_group import GroupKey, GroupState, slice_bounds
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, LeaseId, StreamName
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.context.routing import while_owners_change
from popgate.engine.queue.buffered import BYTES_AT_ONCE, BufferedMessage, count_at_once, size_of
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.lease_groups import Member
from popgate.ports.peers import LearnedRecord

COUNT_MAX = 256
"""Maximum number of messages in one part of a slice."""
PATIENCE_ROUNDS = 6
"""An answer that has begun fails after this many waits for bodies, each of ``body_retrieval.WAIT_SECONDS_MAX``
seconds."""


class GroupMessage(NamedTuple):
    """A message of a slice. Every read returns the same values.

    The ``message_id`` of ``message`` is empty if its publisher set none.
    """

    position: int
    message: Message
    queue: int
    delivery_count: int
    first_delivered_at: float


class Slice(NamedTuple):
    """A slice of ``message_count`` messages. ``parts`` yields these messages in order, in several parts.

    If a part can't be read, ``parts`` raises LeaseGroupExpired (a lease has ended), BrokerUnavailable (the broker does
    not deliver the bodies), or LeaseGroupAcked or LeaseGroupNotFound (the group no longer exists).
    """

    message_count: int
    parts: AsyncGenerator[Sequence[GroupMessage]]


@dataclass(frozen=True, slots=True)
class _Group:
    """The lease group that is being read."""

    key: GroupKey
    lease_id: LeaseId
    served: ServedSubscription
    hosts: Mapping[BrokerQueue, QueueHost]

    def expired(self) -> LeaseGroupExpired:
        return LeaseGroupExpired(
            f"leases of the lease group of epoch {self.key.epoch} ran out: other clients may have its messages; PUT it "
            "again to lease the messages that are left and to count the others as lost"
        )


class SliceReader:
    """Reads slices of every subscription of this proxy."""

    def __init__(self, context: EngineContext) -> None:
        self._store = context.lease_groups

    async def read(self, served: ServedSubscription, stream: StreamName, epoch: int, number: int) -> Slice:
        """Return slice ``number`` of a lease group whose leases are valid.

        Raises: LeaseGroupAcked, LeaseGroupNotFound, LeaseGroupExpired, InvalidRequest, StateUnavailable.
        """
        key = GroupKey(served.name, stream, epoch)
        found = await self._store.find(key)
        if found is None or found.state is not GroupState.FROZEN:
            raise LeaseGroupNotFound(
                f"stream {stream!r} has no lease group of epoch {epoch}; create it with PUT (it may have been empty)"
            )
        if number >= found.slices:
            raise InvalidRequest(f"slice must be less than {found.slices}, the group's number of slices", field="slice")
        group = _Group(key, found.lease_id, served, {host.broker_queue: host for host in served.hosts})
        if found.remaining_seconds <= 0.0:
            raise group.expired()
        first, end = slice_bounds(number, found.slices, found.span)
        count = await self._store.member_count(key, first, end)
        return Slice(count, self._parts(group, first, end))

    async def _parts(self, group: _Group, first: int, end: int) -> AsyncGenerator[Sequence[GroupMessage]]:
        limit, rounds = 1, 1
        while members := await self._store.members(group.key, first, end):
            place = 0
            while place < len(members):
                part = members[place : place + limit]
                messages = await while_owners_change(partial(_messages, group, part, rounds))
                yield messages
                place += len(messages)
                rounds = PATIENCE_ROUNDS  # the answer has begun: from now on a wait is better than an aborted answer
                size = sum(size_of(one.message) for one in messages)
                fitting = BYTES_AT_ONCE * len(messages) // max(1, size)
                limit = max(1, min(COUNT_MAX, 2 * limit, fitting))
            first = members[-1].position + 1


async def _messages(group: _Group, part: Sequence[Member], rounds: int) -> Sequence[GroupMessage]:
    """Return the messages of ``part``, from the first on, but only as many as one step should handle."""
    known = [_known(group, member) for member in part]
    fetched = await group.served.fetch([one for one in known if isinstance(one, LearnedRecord)])
    here = [one for one in known if isinstance(one, BufferedMessage)]
    while not await group.served.bring_back(here):
        rounds -= 1
        if rounds <= 0:
            raise BrokerUnavailable("the messages of this lease group are on their way back from the broker")
    messages: list[GroupMessage] = []
    for member, one in zip(part, known, strict=True):
        if isinstance(one, BufferedMessage):
            message = one.message
        elif (one.queue, one.copy_id) in fetched:
            message = fetched[one.queue, one.copy_id]
        else:
            break  # the owner sends it when it is asked again
        if message is None:
            raise group.expired()  # the lease has ended meanwhile, or the queue is gone
        number = group.hosts[member.queue].queue.number
        messages.append(
            GroupMessage(member.position, message, number, member.delivery_count, member.first_delivered_at)
        )
    return messages[: count_at_once(one.message for one in messages)]


def _known(group: _Group, member: Member) -> BufferedMessage | LearnedRecord:
    """Return the buffered message of a member, or the member's record if another proxy owns the queue.

    Raises: LeaseGroupExpired if the member's lease is not valid.
    """
    record, host = member.record, group.hosts.get(member.queue)
    if record is None or host is None or record.state is not RecordState.LEASED:
        raise group.expired()
    if record.lease_id != group.lease_id or member.remaining_seconds <= 0.0:
        raise group.expired()
    if host.is_others(record):
        return LearnedRecord(member.queue, member.copy_id, record, member.remaining_seconds)
    buffered = host.find(member.copy_id)
    if buffered is None or buffered.lease_id != group.lease_id:
        buffered = host.hear(member.copy_id, record, member.remaining_seconds)
    if buffered is None:
        raise group.expired()
    return buffered
