"""Sends requests and notifications to the other proxies of the cluster.

``Router`` reads the owner of each queue from the cluster's view, and stores the lease records that are still to be sent
to the owners. Only the owner of a queue grants leases of its messages. A proxy outside a cluster owns all queues.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

from popgate.domain.errors import PeerUnavailable, PopgateError, RetryLater, StateUnavailable
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, InstanceId, Layout, Subscription
from popgate.ports.claims import ClusterView
from popgate.ports.limits import Limits
from popgate.ports.peers import Available, Fetch, Follow, Learned, LearnedRecord, PeerMessage, Peers
from popgate.runtime.background import Background
from popgate.runtime.current_request import carried
from popgate.runtime.histogram import Histogram

_log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

SENT_COUNT_MAX = 4_096
"""Maximum number of lease records in one message to the owner of their queues."""
SEND_ATTEMPTS_MAX, SEND_AGAIN_SECONDS = 5, 1.0
SENT_SECONDS_MAX = 0.2
"""Maximum seconds for which the answer to a client is delayed until the owners of the queues have received the client's
settlements."""
OWNED_SECONDS_MAX = 2.0
"""Maximum seconds that a change of topics waits until new queues have owners."""
CHANGE_SECONDS_MAX, CHANGE_LOOK_SECONDS = 3.0, 0.05
"""Maximum seconds for which a request is repeated while a queue gets a new owner (for example after a proxy was
killed), and seconds between two attempts."""
UNSENT_COUNT_MAX = 100_000
"""Maximum number of records that wait to be sent to one slow owner. Further records are not sent: the owner finds them
in the store."""


class QueueOwnership(Protocol):
    """Tracks the owner of each queue, and claims queues for this proxy (``cluster.ownership``)."""

    @property
    def view(self) -> ClusterView:
        """The latest view at this proxy: the members of the cluster and the owners of the queues."""
        ...

    def moves(self) -> Mapping[BrokerQueue, InstanceId]:
        """Return the new owner of each queue that should move, or that has no owner."""
        ...

    def queues_changed(self) -> None:
        """Check the queues soon, because queues were created or deleted."""
        ...

    def overtaken(self, queue: BrokerQueue) -> None:
        """Check the owner of ``queue`` soon, because this proxy has stopped serving the queue."""
        ...

    async def owned(self, queues: Sequence[BrokerQueue], seconds: float) -> None:
        """Wait until each of ``queues`` has an owner, but for at most ``seconds``."""
        ...

    async def stop(self) -> None:
        """Hand over all queues of this proxy, and leave the cluster."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster of which this proxy is a member.

    ``version`` returns the version of the peer protocol that all members use, or raises NoCommonVersion. ``limits``
    counts the messages in flight at all members. If it is None, each member counts only its own messages in flight.
    """

    me: InstanceId
    ownership: QueueOwnership
    peers: Peers
    version: Callable[[], int]
    limits: Limits | None = None


async def while_owners_change(work: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Call ``work`` again while it raises PeerUnavailable, and return its result.

    ``work`` can raise this error because a proxy has just died, or because a queue is changing its owner. Raises:
    PeerUnavailable if ``work`` still fails after ``CHANGE_SECONDS_MAX``.
    """
    until: float | None = None
    while True:
        try:
            return await work()
        except PeerUnavailable:
            now = asyncio.get_running_loop().time()
            until = now + CHANGE_SECONDS_MAX if until is None else until
            if now >= until:
                raise
        await asyncio.sleep(CHANGE_LOOK_SECONDS * random.uniform(0.8, 1.2))


class _Unsent:
    """Lease records that are to be sent to one owner. ``sent`` completes when they have been sent or discarded."""

    def __init__(self) -> None:
        self.records: list[LearnedRecord] = []
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Router:
    """Sends requests, notifications and lease records to other proxies."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._cluster: Cluster | None = None
        self.asked: Counter[InstanceId] = Counter()
        self.forwarded: Counter[InstanceId] = Counter()
        """Number of clients' requests that this proxy has forwarded to each other proxy."""
        self.ask_seconds = Histogram()
        """How long answered requests to other proxies took."""
        self._unsent: dict[InstanceId, _Unsent] = {}
        """The lease records that are to be sent to each member. A member has an entry while a task sends it records."""

    def join(self, cluster: Cluster) -> None:
        """Make this proxy a member of a cluster. Call this before any request is served."""
        self._cluster = cluster

    @property
    def cluster(self) -> Cluster | None:
        """The cluster of this proxy. It is None if this proxy is not in a cluster, and so owns all queues."""
        return self._cluster

    # -- owners ---------------------------------------------------------------------------------------------------

    def owner(self, queue: BrokerQueue) -> InstanceId | None:
        """Return the other proxy that owns ``queue``, or None if this proxy or no proxy owns it."""
        if self._cluster is None:
            return None
        owner = self._cluster.ownership.view.owners.get(queue)
        return None if owner == self._cluster.me else owner

    def responsible(self, queue: BrokerQueue) -> InstanceId | None:
        """Return the other proxy that owns ``queue``, or None if this proxy owns it.

        Raises: PeerUnavailable if no proxy owns ``queue``.
        """
        if self._cluster is not None and queue not in self._cluster.ownership.view.owners:
            raise PeerUnavailable(f"no proxy owns queue {queue} at the moment; a proxy is about to take it")
        return self.owner(queue)

    def others(self, layout: Layout) -> list[InstanceId]:
        """Return the other proxies that own queues of ``layout``, without duplicates."""
        if self._cluster is None:
            return []
        owners = self._cluster.ownership.view.owners
        found = dict.fromkeys(owners.get(queue) for queue in layout.queues)
        return [owner for owner in found if owner is not None and owner != self._cluster.me]

    def other_members(self) -> list[InstanceId]:
        """Return the other members of the cluster."""
        return [] if self._cluster is None else [one for one in self._members() if one != self._cluster.me]

    def collects(self) -> bool:
        """Whether this proxy deletes old records in the store.

        In a cluster, only the member with the smallest id does so.
        """
        return self._cluster is None or min(self._cluster.ownership.view.members, default=None) == self._cluster.me

    # -- messages -------------------------------------------------------------------------------------------------

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Send a request to the proxy ``to``, and return the answer.

        Raises: PeerUnavailable, and the errors that ``to`` returns.
        """
        if self._cluster is None:
            raise PeerUnavailable(f"proxy {to} is unknown: this proxy is not in a cluster")
        self.asked[to] += 1
        began = perf_counter()
        answer = await self._cluster.peers.ask(to, message)
        self.ask_seconds.add(perf_counter() - began)
        return answer

    async def announce(self, queues: Callable[[], Sequence[BrokerQueue]]) -> bool:
        """Announce to the other proxies that topics or groups have changed. Return whether all have applied the change.

        Wait until all other proxies that answer have applied the change. Then wait until all ``queues`` have owners,
        but for at most ``OWNED_SECONDS_MAX``.
        """
        if self._cluster is None:
            return True
        self._cluster.ownership.queues_changed()
        others = [member for member in self._cluster.ownership.view.members if member != self._cluster.me]
        applied = await asyncio.gather(*(carried(self._has_followed(member)) for member in others))
        await self._cluster.ownership.owned(queues(), OWNED_SECONDS_MAX)
        return all(applied)

    def send(self, record: LearnedRecord) -> None:
        """Send a lease record in the background, if another proxy owns its queue.

        If the queue gets a new owner before that, the new owner reads the record from the store.
        """
        owner = self.owner(record.queue)
        if owner is None:
            return
        batch = self._unsent.get(owner)
        if batch is None:
            batch = self._unsent[owner] = _Unsent()
            self._background.spawn(self._send(owner), name=f"send records to {owner}")
        if len(batch.records) < UNSENT_COUNT_MAX:
            batch.records.append(record)

    async def until_sent(self) -> None:
        """Wait until all records of earlier ``send`` calls have been sent, but for at most ``SENT_SECONDS_MAX``.

        A client that has released a message may pop it again at once. So the owner of the message's queue should have
        received the release before the client gets its answer.
        """
        waiting = [batch.sent for batch in self._unsent.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=SENT_SECONDS_MAX)

    def notify_available(self, to: InstanceId, subscription: Subscription) -> None:
        """Notify the proxy ``to`` that this proxy has a ready message for pops that wait at ``to``."""
        message = Available(subscription=subscription)
        self._background.spawn(self._notify(to, message), name=f"notify {to} of ready messages")

    async def _has_followed(self, member: InstanceId) -> bool:
        """Let the proxy ``member`` apply a change, and return whether it has. If not, it detects the change later."""
        try:
            await self.ask(member, Follow())
        except PopgateError as error:
            _log.info("a proxy could not be notified", extra={"member": member, "reason": error.detail})
            return False
        return True

    async def _notify(self, to: InstanceId, message: PeerMessage[None]) -> None:
        """Send a notification. If this fails, the proxy ``to`` detects the change later without it."""
        try:
            await self.ask(to, message)
        except PopgateError as error:
            _log.info("a proxy could not be notified", extra={"member": to, "reason": error.detail})

    async def _send(self, owner: InstanceId) -> None:
        try:
            while (batch := self._unsent[owner]).records:
                self._unsent[owner] = _Unsent()
                try:
                    await self._send_all(owner, batch.records)
                finally:
                    batch.sent.set_result(None)
        finally:
            self._unsent.pop(owner).sent.cancel()

    async def _send_all(self, owner: InstanceId, records: Sequence[LearnedRecord]) -> None:
        for first in range(0, len(records), SENT_COUNT_MAX):
            message = Learned(records=tuple(records[first : first + SENT_COUNT_MAX]))
            for attempt in range(SEND_ATTEMPTS_MAX):
                if attempt:
                    await asyncio.sleep(SEND_AGAIN_SECONDS)
                if owner not in self._members():
                    return
                try:
                    await self.ask(owner, message)
                    break
                except PopgateError as error:
                    _log.info("an owner finds settlements later", extra={"owner": owner, "reason": error.detail})

    def _members(self) -> Collection[InstanceId]:
        return () if self._cluster is None else self._cluster.ownership.view.members

    async def fetch(
        self, subscription: Subscription, leases: Iterable[LearnedRecord]
    ) -> dict[tuple[BrokerQueue, CopyId], Message | None]:
        """Fetch the messages of ``leases`` from the other proxies that own their queues.

        If a lease has ended, its message is None. An owner may leave out the last of its leases if their messages are
        large, but never the first one. Raises: StateUnavailable; PeerUnavailable while a queue
        is changing its owner, or while an owner is waiting for messages from the broker. The caller must then repeat
        the call (``while_owners_change``).
        """
        by_owner: dict[InstanceId, list[LearnedRecord]] = {}
        for one in leases:
            owner = self.owner(one.queue)
            if owner is None:
                raise PeerUnavailable(f"queue {one.queue} is changing its owner")
            by_owner.setdefault(owner, []).append(one)
        found: dict[tuple[BrokerQueue, CopyId], Message | None] = {}
        for owner, wanted in by_owner.items():
            try:
                messages = await self.ask(owner, Fetch(subscription=subscription, leases=tuple(wanted)))
            except StateUnavailable:
                raise
            except RetryLater as error:
                raise PeerUnavailable(error.detail) from error
            found.update({(one.queue, one.copy_id): message for one, message in zip(wanted, messages, strict=False)})
        return found
