"""Serves lease groups: batches of leased messages that a batch engine can read repeatedly (decision 12).

Theory of operation. A PUT request forms a lease group. It leases messages with several pops of ordinary size, all under
one lease id. For each pop, the store writes the leases and their membership in one step. At the end, the store freezes
the group. A read gets the members from the store, whose records show whether the leases are valid. It gets the bodies
from memory, or fetches them again from the broker. A settlement processes the members in batches, and the store records
the progress. So if a proxy is killed between any two steps, a repetition of the same request can continue:

    killed                    the same request then
    while a PUT leases        continues with the leased messages, which no client has seen; without it, they expire
    after the PUT             returns the same group, with renewed leases
    while it is read          reads the same messages again
    while it is acked         acks the rest; without it, the proxy's upkeep acks them
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from popgate.domain.errors import LeaseGroupAcked, LeaseGroupNotFound, RetryLater, TooManyInFlight, WrongMode
from popgate.domain.lease_group import GroupKey, GroupState
from popgate.domain.message import MESSAGE_BYTES_MAX
from popgate.domain.modes import extended_under, leased_by, wrong_mode
from popgate.domain.names import ClientId, StreamName, is_transient
from popgate.domain.permissions import Permit, permit_all
from popgate.domain.topics import ConsumeMode, GroupSpec
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Absent
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.lease.selection import GroupSelection
from popgate.engine.lease_groups.group_settling import AckedGroups, GroupSettlements
from popgate.engine.lease_groups.slices import Slice, SliceReader
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind, JournalSubject
from popgate.ports.lease_groups import Renewal, RenewedMember, StoredGroup
from popgate.ports.leases import GroupPart
from popgate.ports.peers import LeaseForGroup
from popgate.runtime.in_turn import in_turn

POP_MAX = 1024
"""Maximum number of messages in one pop for a lease group, so that other pops can run between two such pops."""
ABANDONED_SECONDS = 900.0
"""An unfinished lease group, which no client has seen, is deleted this many seconds after its leases have ended."""
KEPT_SECONDS = 30 * 86_400.0
"""Every other lease group is deleted this many seconds after its leases have ended."""


class FormedGroup(NamedTuple):
    """The answer to a PUT of a lease group. ``existing``: whether the group was already complete before the PUT."""

    message_count: int
    slices: int
    lost: int
    existing: bool


class ExtendedGroup(NamedTuple):
    """A lease group after an extension. ``is_held``: whether its leases are valid.

    If the leases had expired before the extension, a PUT may lease the same messages again.
    """

    group: StoredGroup
    is_held: bool


class LeaseGroups:
    """Serves the lease groups of every subscription of this proxy.

    Every call can raise TopicNotFound, GroupNotFound and StateUnavailable. Changes that were made before the error are
    not undone, and a repeated call continues after them.
    """

    def __init__(self, context: EngineContext, topics: Topics) -> None:
        self._context = context
        self._topics = topics
        self._store = context.lease_groups
        self._reader = SliceReader(context)
        self._settlements = GroupSettlements(context)

    async def put(
        self,
        topic: str,
        group: str,
        stream: StreamName,
        epoch: int,
        *,
        max_messages: int,
        slices: int,
        invisibility_seconds: float | None,
        permit: Permit = permit_all,
    ) -> FormedGroup:
        """Return the lease group of a stream and epoch, with valid leases.

        If the group does not exist, form it from ready messages. If no message is ready, the answer is empty, and no
        group is stored. If the group exists, it is returned without new members. Its leases are renewed if less than
        half of ``invisibility_seconds`` is left. With ``max_messages`` 0, no group is formed. A client uses this to
        repeat a batch, because it must not receive another batch under the same epoch.

        Raises: LeaseGroupAcked; Conflict if another request is forming the group, or if there are too many groups;
        BrokerUnavailable; TooManyInFlight if no message may be leased; WrongMode; LeaseGroupNotFound if
        ``max_messages`` is 0 and the group does not exist.
        """
        served = await self._topics.subscription_to_pop(topic, group, permit)
        served.polls += 1
        key = GroupKey(served.name, stream, epoch)
        if served.spec.mode is not ConsumeMode.POP:
            return await self._standing(served.spec, key)
        seconds = invisibility_seconds or served.spec.policy.invisibility_seconds
        if max_messages == 0:
            return _formed(await self._hold_again(served, key, seconds), existing=True)
        builder = self._context.mint_lease_id()
        while True:
            found = await self._store.begin(
                key,
                lease_id=self._context.mint_lease_id(),
                builder=builder,
                slices=slices,
                groups_max=self._context.options.quotas.lease_groups_max,
            )
            if found.state is not GroupState.RELEASING:
                break
            # A release was interrupted. Finish it: only then may the epoch be used again.
            await self._settlements.finish(served, stream)
        if found.state is GroupState.FORMING:
            formed = await self._form(served, found, GroupPart(key, builder), max_messages, seconds)
        else:
            formed = await self._hold_again(served, key, seconds, found)
        if formed is None:
            return FormedGroup(0, slices, 0, existing=False)
        return _formed(formed, existing=found.state is GroupState.FROZEN)

    async def _hold_again(
        self, served: ServedSubscription, key: GroupKey, seconds: float, found: StoredGroup | None = None
    ) -> StoredGroup:
        """Return an existing lease group. Renew its leases if needed. Raises: LeaseGroupAcked, LeaseGroupNotFound."""
        found = found or await self._store.find(key)
        if found is None or found.state is not GroupState.FROZEN:
            raise LeaseGroupNotFound(f"stream {key.stream!r} has no lease group of epoch {key.epoch}; none was formed")
        return found if found.remaining_seconds * 2 >= seconds else await self._renew(served, key, seconds)

    async def _standing(self, spec: GroupSpec, key: GroupKey) -> FormedGroup:
        """Return an existing lease group with valid leases while pop mode is being drained.

        Raises: WrongMode if there is no such group, or if messages are not leased to pop clients any more.
        """
        found = await self._store.find(key) if leased_by(spec) is ConsumeMode.POP else None
        if found is None or found.state is not GroupState.FROZEN or found.remaining_seconds <= 0.0:
            raise wrong_mode(spec, ConsumeMode.POP)
        return _formed(found, existing=True)

    async def _form(
        self, served: ServedSubscription, begun: StoredGroup, part: GroupPart, max_messages: int, seconds: float
    ) -> StoredGroup | None:
        """Lease messages for a group until it has ``max_messages`` members, or no message is ready.

        Return None if the group has no members. Leases of earlier members are renewed long before they expire. If there
        are too many members to renew in time, the group is formed from the present members.
        """
        formed = begun
        if begun.message_count:  # members of an interrupted request
            formed = await self._renew(served, part.key, seconds, regrant=False)
        lease = GroupSelection(part, begun.lease_id)
        while (count := formed.message_count) < max_messages:
            try:
                leased = await self._pop(served, lease, min(POP_MAX, max_messages - count), seconds)
            except (TooManyInFlight, WrongMode):
                if not count:
                    raise
                break  # the group is formed from its present members
            if not leased:
                break
            formed = await self._hold(served, part.key, count + leased, seconds, seconds / 2)
            if formed.message_count <= count or formed.remaining_seconds < seconds / 2:
                break  # the pop leased its own members again, or more members can't be renewed in time
        if served.is_closed:
            raise RetryLater("popgate is shutting down")
        await self._hold(served, part.key, formed.message_count, seconds, seconds * 3 / 4)
        return await self._store.freeze(part.key, part.builder)

    async def _hold(
        self, served: ServedSubscription, key: GroupKey, count: int, seconds: float, least: float
    ) -> StoredGroup:
        """Return a lease group that is being formed, with valid leases.

        Its leases are renewed if less than ``least`` seconds are left. They are also renewed if the group does not have
        ``count`` members, because some were leased to other clients or were leased again. Raises the errors of
        ``_renew``.
        """
        formed = await self._store.find(key)
        if formed is None:
            raise _released()
        if formed.message_count == count and formed.remaining_seconds >= least:
            return formed
        return await self._renew(served, key, seconds, regrant=False)

    async def _pop(self, served: ServedSubscription, group: GroupSelection, count: int, seconds: float) -> int:
        """Lease ready messages for a group, and return how many were leased.

        If no message of this proxy's queues is ready, lease messages at another owner of the subscription's queues.
        Raises: TooManyInFlight if no message was leased because of ``max_in_flight``.
        """
        full: TooManyInFlight | None = None
        try:
            leased = await self.lease_here(served, group, count, seconds)
            if leased:
                return leased
        except TooManyInFlight as error:
            full = error
        part = group.part
        message = LeaseForGroup(
            subscription=served.name,
            key=part.key,
            builder=part.builder,
            lease_id=group.lease_id,
            count=count,
            seconds=seconds,
        )
        for owner in self._context.router.others(served.layout):
            try:
                leased = await self._context.router.ask(owner, message)
                if leased:
                    return leased
            except TooManyInFlight as error:
                full = error
        if full is not None:
            raise full
        return 0

    async def lease_here(self, served: ServedSubscription, group: GroupSelection, count: int, seconds: float) -> int:
        """Lease ready messages of the queues that this proxy owns, while there is memory for their bodies.

        Without the memory, a read would have to fetch the bodies again. But other subscriptions may have taken all of
        it for hours. So each group may have messages for half of a queue's share of the memory. Return the number of
        leased messages. Raises: TooManyInFlight.
        """
        owned, buffer = [host for host in served.hosts if host.is_owned], self._context.buffer
        if not owned or buffer.full_for == group.lease_id:
            return 0
        count = min(count, max(1, self._fitting_count(owned, group)))
        request = PopRequest(
            max_messages=count, invisibility_seconds=seconds, client=ClientId(group.part.key.stream), selection=group
        )
        leased = len(await served.pops.pop(request, Presence()))
        if not self._fitting_count(owned, group):
            buffer.full_for = group.lease_id
        return leased

    def _fitting_count(self, hosts: Sequence[QueueHost], group: GroupSelection) -> int:
        """Return how many more messages of the queues of ``hosts`` a group may have."""
        costs = [cost for host in hosts if (cost := host.state.flow.mean_bytes) is not None]
        cost, buffer = max(costs, default=MESSAGE_BYTES_MAX), self._context.buffer
        share = int(buffer.share_bytes() / 2 / cost)
        return max(int(buffer.keepable_bytes / cost), share - group.taken_count, 0)

    async def read(self, topic: str, group: str, stream: StreamName, epoch: int, number: int) -> Slice:
        """Return slice ``number`` of a lease group. See ``SliceReader.read``."""
        return await self._reader.read(self._topics.subscription(topic, group), stream, epoch, number)

    async def extend(self, topic: str, group: str, stream: StreamName, seconds: float) -> list[ExtendedGroup]:
        """Extend the valid leases of each lease group of a stream to ``seconds`` from now.

        Leases that have expired are not extended. No lease is extended beyond the maximum age of its group.
        """
        served = self._topics.subscription(topic, group)
        extended: list[ExtendedGroup] = []
        for found in await self._store.groups(served.name, stream):
            if found.state is not GroupState.FROZEN:
                continue
            if found.remaining_seconds <= 0.0:
                extended.append(ExtendedGroup(found, is_held=False))
                continue
            try:
                key = GroupKey(served.name, stream, found.epoch)
                extended.append(ExtendedGroup(await self._renew(served, key, seconds, regrant=False), is_held=True))
            except (LeaseGroupNotFound, LeaseGroupAcked):
                continue  # the group was released or acked in the meantime
        return extended

    async def ack(self, topic: str, group: str, stream: StreamName, through: int) -> AckedGroups:
        """Ack lease groups. See ``GroupSettlements.ack``."""
        return await self._settlements.ack(self._topics.subscription(topic, group), stream, through)

    async def release(self, topic: str, group: str, stream: StreamName, after: int) -> int:
        """Release lease groups. See ``GroupSettlements.release``."""
        return await self._settlements.release(self._topics.subscription(topic, group), stream, after)

    async def groups(self, topic: str, group: str, stream: StreamName | None) -> list[StoredGroup]:
        """Return the lease groups that are neither acked nor released.

        If ``stream`` is None, return those of all streams.
        """
        groups = await self._store.groups(self._topics.subscription(topic, group).name, stream)
        return [one for one in groups if one.state is not GroupState.RELEASING]

    async def tend(self) -> None:
        """Finish interrupted settlements, and delete lease groups whose leases have ended long ago.

        An error about one stream is raised at the end, so that it does not affect the other streams.
        """
        works: list[Callable[[], Awaitable[None]]] = [
            partial(self._store.collect, forming_seconds=ABANDONED_SECONDS, older_than_seconds=KEPT_SECONDS)
        ]
        for subscription in await self._store.subscriptions():
            served = self._topics.served.get(subscription)
            if served is not None:
                works.append(partial(self._finish, served))
        await in_turn(works)

    async def _finish(self, served: ServedSubscription) -> None:
        streams = await self._store.half_settled(served.name)
        await in_turn(partial(self._settlements.finish, served, stream) for stream in streams)

    # -- steps ------------------------------------------------------------------------------------------------------

    async def _renew(
        self, served: ServedSubscription, key: GroupKey, seconds: float, *, regrant: bool = True
    ) -> StoredGroup:
        """Renew the leases of all members of a lease group, and return the renewed group.

        Raises: LeaseGroupAcked, LeaseGroupNotFound.
        """
        spec = served.spec
        ends_at = await self._store.begin_renewal(
            key, seconds=seconds, age_seconds_max=self._context.options.lease_group_seconds_max
        )
        renewal = Renewal(ends_at, regrant, spec.policy.max_deliveries, extended_under(spec))
        position: int | None = 0
        while position is not None:
            step = await self._store.renew(key, position, renewal)
            self._apply_renewal(served, key.stream, seconds, step.members)
            position = step.next_position
        group = await self._store.find(key)
        if group is None:
            raise _released()
        return group

    def _apply_renewal(
        self, served: ServedSubscription, stream: StreamName, seconds: float, members: Iterable[RenewedMember]
    ) -> None:
        hosts = {host.broker_queue: host for host in served.hosts}
        extended: list[JournalSubject] = []
        delivered: list[JournalSubject] = []
        for member in members:
            host, record = hosts.get(member.queue), member.record
            if host is None or record is None:
                continue
            buffered = host.find(member.copy_id)
            if buffered is None and is_transient(member.copy_id):
                continue
            is_extension = (
                record.changed_at > record.leased_at if buffered is None else buffered.lease_id == record.lease_id
            )
            buffered = host.hear(member.copy_id, record, member.remaining_seconds)
            if buffered is not None and not is_extension:
                buffered.client, buffered.invisibility_seconds = stream, seconds
            subject = buffered or Absent(
                member.copy_id,
                host.queue.number,
                record.delivery_count,
                record.leased_at,
                client=stream,
                invisibility_seconds=seconds,
            )
            (extended if is_extension else delivered).append(subject)
        self._record(served, EventKind.EXTENDED, extended)
        self._record(served, EventKind.DELIVERED, delivered)

    def _record(self, served: ServedSubscription, kind: EventKind, subjects: Sequence[JournalSubject]) -> None:
        if subjects:
            self._context.journal.record(kind, served.name, subjects, self._context.clock.wall())


def _formed(group: StoredGroup, *, existing: bool) -> FormedGroup:
    return FormedGroup(group.message_count, group.slices, group.lost, existing)


def _released() -> LeaseGroupNotFound:
    return LeaseGroupNotFound("the lease group was released meanwhile")
