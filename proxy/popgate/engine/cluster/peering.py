"""Answers the requests of other proxies that concern the queues of this proxy."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from popgate.domain.attempts import Cause
from popgate.domain.errors import RetryLater
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, GroupName, InstanceId, LeaseId, Subscription, TopicName
from popgate.engine.catalog.topics import Topics
from popgate.engine.cluster.remote_pops import RemotePops
from popgate.engine.lease.selection import GroupSelection
from popgate.engine.lease_groups.lease_groups import LeaseGroups
from popgate.engine.queue.buffered import BufferedMessage, count_at_once
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.orders import SettleOrder, Verb
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription.counting import queue_counts
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.leases import GroupPart, LoadedRecord
from popgate.ports.peers import (
    Available,
    CountMessages,
    Fetch,
    Follow,
    Learned,
    LeaseForGroup,
    PeerAnswers,
    PeerMessage,
    PeerResult,
    PurgeAtOwner,
    PurgeResult,
    QueueCounts,
    SettleAtOwner,
    Wanted,
)

AnswerT = TypeVar("AnswerT")

GROUPS_MAX = 64
"""Maximum number of lease groups, formed by other proxies, whose selections this proxy remembers between two
requests."""


class Peering:
    """Answers the requests of other proxies.

    ``purge`` deletes the visible messages of a subscription from the queues that this proxy owns.
    """

    def __init__(
        self,
        topics: Topics,
        settler: Settler,
        lease_groups: LeaseGroups,
        elsewhere: RemotePops,
        purge: Callable[[ServedSubscription], Awaitable[PurgeResult]],
    ) -> None:
        self._topics = topics
        self._settler = settler
        self._lease_groups = lease_groups
        self._remote_pops = elsewhere
        self._purge = purge
        self._forming: OrderedDict[LeaseId, GroupSelection] = OrderedDict()
        self._following = asyncio.Lock()
        self._hosts: dict[BrokerQueue, QueueHost] = {}
        self._begun = self._followed = 0
        """Numbers of the follow that was begun last, and of the one that was completed last."""

    async def answer(self, sender: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Answer a request of another proxy. Raises: PopgateError."""
        answer: Any = await self._answer(sender, message)
        given: AnswerT = answer
        return given

    def waited_seconds(self, topic: str, group: str, message: Message) -> float | None:
        """Return how long a message had waited that was handed out to another proxy's pop; see ``RemotePops``."""
        return self._remote_pops.waited_seconds(Subscription(TopicName(topic), GroupName(group)), message)

    async def _answer(self, sender: InstanceId, message: PeerMessage[Any]) -> object:
        match message:
            case Learned():
                self._learn(message)
                return None
            case Wanted():
                return self._served(message.subscription).wanted_by(sender, message.seconds, message.since)
            case Available():
                self._remote_pops.available(sender, message.subscription)
                return None
            case LeaseForGroup():
                return await self._lease_for_group(message)
            case Fetch():
                return await self._fetch(message)
            case CountMessages():
                return self._count(message)
            case SettleAtOwner():
                return await self._settle(message)
            case PurgeAtOwner():
                return await self._purge(self._served(message.subscription))
            case Follow():
                await self._follow()
                return None
            case _:
                raise NotImplementedError(type(message).__name__)

    async def _follow(self) -> None:
        """Apply all changes of the catalog that were made before the call.

        Requests that arrive while this proxy follows an earlier one share the next follow, so that the changes of this
        proxy's own clients wait for at most two.
        """
        needed = self._begun + 1
        async with self._following:
            if self._followed < needed:
                self._begun += 1
                await self._topics.follow()
                self._followed = self._begun

    def _served(self, name: Subscription) -> ServedSubscription:
        return self._topics.subscription(*name)

    def _learn(self, message: Learned) -> None:
        """Apply lease records that another proxy has changed to the queues that this proxy owns.

        A record of any other queue is ignored, because the owner of that queue reads it from the store.
        """
        by_queue: dict[BrokerQueue, list[LoadedRecord]] = {}
        for queue, copy_id, record, remaining in message.records:
            by_queue.setdefault(queue, []).append(LoadedRecord(copy_id, record, remaining))
        for queue, records in by_queue.items():
            host = self._host(queue)
            if host is not None and host.is_owned:
                host.hear_all(records)

    def _host(self, queue: BrokerQueue) -> QueueHost | None:
        """Return the present host of a queue. There can be thousands of them, so they are listed only after changes."""
        host = self._hosts.get(queue)
        served = None if host is None else self._topics.served.get(Subscription(*host.queue[:2]))
        if served is None or host not in served.hosts:
            self._hosts = {one.broker_queue: one for served in self._topics.served.values() for one in served.hosts}
            host = self._hosts.get(queue)
        return host

    async def _lease_for_group(self, message: LeaseForGroup) -> int:
        lease = self._forming.pop(message.lease_id, None)
        part = GroupPart(message.key, message.builder)
        if lease is None or lease.part != part:
            lease = GroupSelection(part, message.lease_id)
        self._forming[message.lease_id] = lease
        if len(self._forming) > GROUPS_MAX:
            self._forming.popitem(last=False)
        served = self._served(message.subscription)
        return await self._lease_groups.lease_here(served, lease, message.count, message.seconds)

    async def _fetch(self, message: Fetch) -> list[Message | None]:
        served = self._served(message.subscription)
        hosts = {host.broker_queue: host for host in served.hosts if host.is_owned}
        wanted: list[tuple[QueueHost, BufferedMessage] | None] = []
        for one in message.leases:
            host = hosts.get(one.queue)
            if host is None or host.is_others(one.record):
                raise RetryLater(f"queue {one.queue} is changing its owner")
            buffered = host.hear(one.copy_id, one.record, one.remaining_seconds)
            wanted.append(None if buffered is None else (host, buffered))
        if not await served.bring_back([one[1] for one in wanted if one is not None]):
            raise RetryLater("the messages of these leases are on their way back from the broker")
        if any(one is not None and one[0].has_changed_hands(one[1]) for one in wanted):
            raise RetryLater("the queue of these leases has just changed its owner")
        messages = [
            None if found is None or found[1].lease_id != one.record.lease_id else found[1].message
            for found, one in zip(wanted, message.leases, strict=True)
        ]
        return messages[: count_at_once(messages)]

    def _count(self, message: CountMessages) -> list[QueueCounts]:
        served = self._served(message.subscription)
        return queue_counts(served.group, served.dead_letters.held_count)

    async def _settle(self, message: SettleAtOwner) -> list[PeerResult]:
        orders = [SettleOrder(*order[:3], cause=Cause(*order[3:])) for order in message.orders]
        served = self._served(message.subscription)
        results = await self._settler.settle(served, Verb(message.verb), orders, is_passed=True)
        return [PeerResult(*result) for result in results]


_conforms: type[PeerAnswers] = Peering
