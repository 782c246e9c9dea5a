"""Who serves what this proxy doesn't, and the way there.

Owns nothing but the way: who owns a queue is the cluster's view, who leases is the owner. A proxy that is alone in its
world has nobody to ask, and owns all queues.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from popgate.domain.errors import PeerUnavailable, PopgateError, RetryLater, StateUnavailable
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, InstanceId, Layout, Subscription
from popgate.ports.claims import ClusterView
from popgate.ports.limits import Limits
from popgate.ports.peers import Available, Fetch, Follow, Learned, LearnedRecord, PeerMessage, Peers
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

TOLD_COUNT_MAX = 4_096
"""So many records are told in one message."""
TOLD_ATTEMPTS_MAX, TOLD_AGAIN_SECONDS = 5, 1.0
TOLD_SECONDS_MAX = 0.2
"""How long an answer waits until owners know what it says."""
OWNED_SECONDS_MAX = 2.0
"""How long a change waits for owners of new queues."""
CHANGE_SECONDS_MAX, CHANGE_LOOK_SECONDS = 3.0, 0.05
"""How long a queue may take to have its next owner when one has been killed, and how often it is looked whether it has.
"""
UNTOLD_COUNT_MAX = 100_000
"""More than that are not kept for an owner that is slow to take them: it meets them in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a member of a cluster knows and can do.

    ``moves``: who is to have queues that others have, or nobody. ``owned`` returns when somebody owns each of some
    queues, or so many seconds have passed; ``overtaken`` is told that another proxy has claimed a queue which this one
    served. ``version``: of the protocol that all speak now; raises NoCommonVersion. ``limits`` counts what all have in
    flight; None: each counts what it has.
    """

    me: InstanceId
    view: Callable[[], ClusterView]
    peers: Peers
    queues_changed: Callable[[], None]
    overtaken: Callable[[BrokerQueue], None]
    moves: Callable[[], Mapping[BrokerQueue, InstanceId]]
    owned: Callable[[Sequence[BrokerQueue], float], Awaitable[None]]
    leave: Callable[[], Awaitable[None]]
    version: Callable[[], int]
    limits: Limits | None = None


async def while_owners_change(work: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """What ``work`` gives: done anew while the proxy that it needs has just died, or a queue is on its way to another
    one, for as long as that may take. Raises: PeerUnavailable where it takes longer."""
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


class _Untold:
    """What is to be told to one owner; ``told`` is done when it was, or was given up."""

    def __init__(self) -> None:
        self.records: list[LearnedRecord] = []
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Router:
    """The way to the owners of queues."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._cluster: Cluster | None = None
        self.asked: Counter[InstanceId] = Counter()
        self.passed_on: Counter[InstanceId] = Counter()
        """What this proxy has sent each of the others."""
        self._untold: dict[InstanceId, _Untold] = {}
        """What is to be told, by member; a member is there while it is being told."""

    def join(self, cluster: Cluster) -> None:
        """From now on this proxy is one of many. Before anything is served."""
        self._cluster = cluster

    @property
    def cluster(self) -> Cluster | None:
        """None: this proxy is alone, and owns all queues."""
        return self._cluster

    # -- who ------------------------------------------------------------------------------------------------------

    def owner(self, queue: BrokerQueue) -> InstanceId | None:
        """Which other proxy owns ``queue``; None where this one does, or nobody."""
        if self._cluster is None:
            return None
        owner = self._cluster.view().owners.get(queue)
        return None if owner == self._cluster.me else owner

    def responsible(self, queue: BrokerQueue) -> InstanceId | None:
        """As ``owner``, for what only the owner can do. Raises: PeerUnavailable, where nobody owns it at the moment."""
        if self._cluster is not None and queue not in self._cluster.view().owners:
            raise PeerUnavailable(f"no proxy owns queue {queue} at the moment; one of them is about to")
        return self.owner(queue)

    def others(self, layout: Layout) -> list[InstanceId]:
        """The other proxies that own queues of ``layout``, each once."""
        if self._cluster is None:
            return []
        owners = self._cluster.view().owners
        found = dict.fromkeys(owners.get(queue) for queue in layout.queues)
        return [owner for owner in found if owner is not None and owner != self._cluster.me]

    def collects(self) -> bool:
        """Whether it is this proxy's part to clean the store up: one of a cluster does."""
        return self._cluster is None or min(self._cluster.view().members, default=None) == self._cluster.me

    # -- the way --------------------------------------------------------------------------------------------------

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Raises: PeerUnavailable, and what ``to`` answers with."""
        if self._cluster is None:
            raise PeerUnavailable(f"proxy {to} is unknown: this one is alone")
        self.asked[to] += 1
        return await self._cluster.peers.ask(to, message)

    async def announce(self, queues: Callable[[], Sequence[BrokerQueue]]) -> None:
        """Topics or groups have changed: return when all others follow, as far as they answer, and ``queues``, all that
        there are now, have owners."""
        if self._cluster is None:
            return
        self._cluster.queues_changed()
        others = [member for member in self._cluster.view().members if member != self._cluster.me]
        await asyncio.gather(*(self._notify(member, Follow()) for member in others))
        await self._cluster.owned(queues(), OWNED_SECONDS_MAX)

    def tell(self, record: LearnedRecord) -> None:
        """Let the owner of a queue know what the store has decided. Who owns it later reads it there."""
        owner = self.owner(record.queue)
        if owner is None:
            return
        batch = self._untold.get(owner)
        if batch is None:
            batch = self._untold[owner] = _Untold()
            self._background.spawn(self._tell(owner), name=f"tell {owner}")
        if len(batch.records) < UNTOLD_COUNT_MAX:
            batch.records.append(record)

    async def told(self) -> None:
        """Return when owners know all that was to be told until now, or are slow to take it: who is answered that a
        message is released will look for it at once."""
        waiting = [batch.told for batch in self._untold.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=TOLD_SECONDS_MAX)

    def tell_available(self, to: InstanceId, subscription: Subscription) -> None:
        """Something is ready here that ``to`` has wanted."""
        message = Available(subscription=subscription)
        self._background.spawn(self._notify(to, message), name=f"tell {to} what is ready")

    async def _notify(self, to: InstanceId, message: PeerMessage[None]) -> None:
        """It finds out by itself, later, where it can't be told."""
        try:
            await self.ask(to, message)
        except PopgateError as error:
            _log.info("a proxy was not told", extra={"member": to, "reason": error.detail})

    async def _tell(self, owner: InstanceId) -> None:
        try:
            while (batch := self._untold[owner]).records:
                self._untold[owner] = _Untold()
                try:
                    await self._tell_all(owner, batch.records)
                finally:
                    batch.told.set_result(None)
        finally:
            self._untold.pop(owner).told.cancel()

    async def _tell_all(self, owner: InstanceId, records: Sequence[LearnedRecord]) -> None:
        for first in range(0, len(records), TOLD_COUNT_MAX):
            message = Learned(records=tuple(records[first : first + TOLD_COUNT_MAX]))
            for attempt in range(TOLD_ATTEMPTS_MAX):
                if attempt:
                    await asyncio.sleep(TOLD_AGAIN_SECONDS)
                if owner not in self._members():
                    return
                try:
                    await self.ask(owner, message)
                    break
                except PopgateError as error:
                    _log.info("an owner meets settlements later", extra={"owner": owner, "reason": error.detail})

    def _members(self) -> Collection[InstanceId]:
        return () if self._cluster is None else self._cluster.view().members

    async def fetch(
        self, subscription: Subscription, leases: Iterable[LearnedRecord]
    ) -> dict[tuple[BrokerQueue, CopyId], Message]:
        """The messages of leases in queues that others own; those that are not leased so any more are left out.

        Raises: PeerUnavailable while some are on their way (``while_owners_change``); StateUnavailable.
        """
        by_owner: dict[InstanceId, list[LearnedRecord]] = {}
        for one in leases:
            owner = self.owner(one.queue)
            if owner is None:
                raise PeerUnavailable(f"queue {one.queue} is changing its owner")
            by_owner.setdefault(owner, []).append(one)
        found: dict[tuple[BrokerQueue, CopyId], Message] = {}
        for owner, wanted in by_owner.items():
            try:
                messages = await self.ask(owner, Fetch(subscription=subscription, leases=tuple(wanted)))
            except StateUnavailable:
                raise
            except RetryLater as error:
                raise PeerUnavailable(error.detail) from error
            for one, message in zip(wanted, messages, strict=True):
                if message is not None:
                    found[one.queue, one.copy_id] = message
        return found
