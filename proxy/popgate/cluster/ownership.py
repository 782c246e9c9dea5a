"""Sends this proxy's heartbeats, and claims and releases queues according to the cluster's plan.

Theory of operation. One loop wakes when the view of the cluster changes, when queues are created or deleted, and at
every heartbeat. Each round computes the plan of ``domain.balance`` from the latest view, for the members that are
eligible to own queues (``Member.owns``). Then it carries out this member's part of the plan. If no member is eligible,
the round makes no plan. For each queue that the plan moves away from this proxy, a separate task hands over the queue.
Until this task is done, all other members still see this proxy as the owner. These tasks do not wait for each other.
While the store is unavailable, no round makes a plan, and the owners keep their queues.

A proxy that starts gives up if live members speak no version of its protocol. A running proxy that can't rejoin for
this reason owns no queues and is not ready, but keeps trying: what the store says about members proves nothing.

A store that has lost its data contains no members and no owners. Each member then rejoins, and reclaims the queues that
it still serves. When a member has reclaimed a queue, it writes the queue's records back to the store. For a while, it
does not claim queues of members that have not rejoined yet.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine, Mapping, Sequence

from popgate.cluster.member_watch import MemberWatch
from popgate.cluster.protocols import common_version
from popgate.domain.balance import QueueView, plan
from popgate.domain.errors import NoCommonVersion, NotAMember, StateUnavailable
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import BEAT_SECONDS, GONE_SECONDS, Claims, ClusterView, Member
from popgate.ports.queue_hosts import QueueHosts
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

UNKNOWN = -1
"""A version that no view has."""
FAILED_SECONDS = 5.0
"""Seconds until a change of owner that failed unexpectedly is tried again, such as for a record that can't be read."""
AGAIN_SECONDS = 0.5
"""Seconds between two attempts to join the cluster or to reach an unavailable store. This is much less than
``GONE_SECONDS``, after which the other members consider this proxy dead."""


class Ownership:
    """Decides which queues this proxy owns as ``member`` of the cluster, and makes ``hosts`` serve these queues."""

    def __init__(
        self,
        member: Member,
        claims: Claims,
        hosts: QueueHosts,
        background: Background,
        *,
        beat_seconds: float = BEAT_SECONDS,
        gone_seconds: float = GONE_SECONDS,
        member_watch: MemberWatch | None = None,
    ) -> None:
        self._member = member
        self._me = member.instance
        self._claims = claims
        self._hosts = hosts
        self._background = background
        self._beat_seconds = beat_seconds
        self._gone_seconds = gone_seconds
        self._member_watch = member_watch
        self._view = ClusterView(0, {}, {})
        self._version_min = 0
        """Version of the view with this proxy's latest change. The proxy does not act on an older view, because it
        would repeat that change."""
        self._wake = asyncio.Event()
        self._under_way: dict[BrokerQueue, asyncio.Task[None]] = {}
        """The task of each queue that this proxy is taking over or handing over."""
        self._seen = asyncio.Event()
        """Set when a new view arrives. A new event then replaces it, for the next view."""
        self._data_lost = False
        self._former: Mapping[BrokerQueue, InstanceId] = {}
        """The owner of each queue when the store lost its data. Until ``_former_until``, this proxy does not claim a
        queue whose former owner has not rejoined."""
        self._former_until = float("-inf")
        self._refusal: str | None = None
        """Why the cluster does not accept this proxy any more."""
        self._stopping = False
        self._loop: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None

    @property
    def view(self) -> ClusterView:
        """The latest view of the cluster that this proxy has received from the store."""
        return self._view

    def moves(self) -> dict[BrokerQueue, InstanceId]:
        """Return the new owner of each queue that should move according to the current view, or that has no owner."""
        views = {queue: QueueView(self._view.owners.get(queue)) for queue in self._hosts.queues()}
        owners = sorted(name for name, member in self._view.members.items() if member.owns)
        moves = plan(owners, views) if owners else {}
        return {queue: InstanceId(to) for queue, to in moves.items()}

    def unready_reason(self) -> str | None:
        """Return why this proxy, which is running, can't be a member of the cluster now, or None if it is one."""
        return self._refusal

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster, and start to claim and release queues.

        Raises: StateUnavailable; NoCommonVersion if incompatible members remain after the time in which dead members
        are removed. After the start, this no longer ends the process.
        """
        pause = min(AGAIN_SECONDS, self._beat_seconds)
        gone_at = asyncio.get_running_loop().time() + self._gone_seconds + pause
        while True:
            try:
                self._see(await self._joined())
                break
            except NoCommonVersion:
                if asyncio.get_running_loop().time() > gone_at:
                    raise
            await asyncio.sleep(pause)
        self._hearing = self._background.keep(self._hear, name="hear of the cluster's changes")
        self._loop = self._background.keep(self._run, name="own queues")

    async def stop(self) -> None:
        """Hand over all queues of this proxy, and leave the cluster. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._hearing is not None:
            self._hearing.cancel()
        tasks = [task for task in (self._hearing, self._loop) if task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._under_way:
            await asyncio.wait(self._under_way.values())
        with contextlib.suppress(StateUnavailable):
            await asyncio.gather(*(self._hand_over(queue) for queue in sorted(self._held())))
        with contextlib.suppress(StateUnavailable):  # otherwise its heartbeats time out
            await self._claims.remove(self._me)

    def queues_changed(self) -> None:
        """Check the queues soon, because queues were created or deleted."""
        self._wake.set()

    def overtaken(self, queue: BrokerQueue) -> None:
        """Check the owner of ``queue`` soon, because ``hosts`` has stopped serving the queue on its own."""
        _log.info("a queue is not served any more", extra={"queue": queue})
        self._wake.set()

    def data_lost(self) -> None:
        """Start the repair after the store has lost its data: the members, the owners and the records of all queues."""
        self._data_lost = True
        if self._view.owners:  # a second loss during the repair must not replace the owners known at the first loss
            self._former = self._view.owners
        self._former_until = asyncio.get_running_loop().time() + self._gone_seconds
        self._hosts.data_lost()
        self._wake.set()

    async def owned(self, queues: Sequence[BrokerQueue], seconds: float) -> None:
        """Wait until each of ``queues`` has an owner, but for at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(queue not in self._view.owners for queue in queues):
                    await self._seen.wait()

    async def refreshed(self) -> ClusterView:
        """Read the current view from the store, and return it. Raises: StateUnavailable."""
        await self._look()
        return self._view

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        while True:
            await self._claims.changed()
            self._wake.set()

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            pause = self._beat_seconds
            try:
                if self._data_lost:
                    await self._join_again()
                await self._look()
                await self._act()
            except NotAMember as error:
                if self._data_lost or await self._rejoined(error):
                    continue
                if self._refusal is not None:
                    pause = self._again_seconds()
            except NoCommonVersion as error:
                self._refuse(error)
                if asyncio.get_running_loop().time() >= self._former_until:  # others may own its queues by now
                    self._lose(self._held())
                pause = self._again_seconds()
            except StateUnavailable as error:
                _log.warning("the store can't be reached: owners keep their queues", extra={"reason": error.detail})
                pause = self._again_seconds()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    def _again_seconds(self) -> float:
        return min(self._beat_seconds, AGAIN_SECONDS * random.uniform(0.8, 1.2))

    async def _rejoined(self, why: NotAMember) -> bool:
        """Give up all queues, join the cluster again, and return whether this succeeded."""
        if self._refusal is None:
            _log.warning("removed from the cluster: joining again", extra={"reason": why.detail})
        self._lose(self._held())
        try:
            self._see(await self._joined())
        except NoCommonVersion as error:
            self._refuse(error)
            return False
        except StateUnavailable:
            return False
        self._version_min = 0  # the store may have lost its data and restarted its version count
        return True

    def _refuse(self, error: NoCommonVersion) -> None:
        if self._refusal is None:
            _log.error("the cluster does not accept this proxy any more: trying again", extra={"reason": error.detail})
        self._refusal = error.detail

    async def _join_again(self) -> None:
        """Rejoin the cluster after a loss of the store's data, and reclaim the queues that have no new owner yet.

        The next round takes over the reclaimed queues, which writes their records back to the store.
        """
        self._data_lost = False
        try:
            view = await self._joined(sorted(self._held()))
        except (StateUnavailable, NoCommonVersion):
            self._data_lost = True
            raise
        self._version_min = 0
        self._see(view)

    async def _joined(self, keeps: Sequence[BrokerQueue] = ()) -> ClusterView:
        """Join the cluster, claim the queues of ``keeps`` that have no owner, and return the view.

        Raises: StateUnavailable; NoCommonVersion. The latter is raised in a running process if the other members
        considered this process dead and were upgraded to versions that it does not speak, or if another program has
        written such a member to the store.
        """
        view = await self._claims.join(self._member, keeps)
        if self._me not in view.members:
            common_version(self._member.protocols, view.members.values())
            raise NoCommonVersion("the store contains a member whose entry this proxy can't read")
        if self._refusal is not None:
            self._refusal = None
            _log.info("the cluster accepts this proxy again")
        return view

    def _held(self) -> set[BrokerQueue]:
        return {*self._hosts.served(), *self._hosts.lost()}

    async def _look(self) -> None:
        least = self._version_min
        view = await self._claims.beat(self._me, self._view.version if self._view.version >= least else UNKNOWN)
        if view is None:
            return
        self._see(view)
        if view.version < least == self._version_min:
            # The store has answered the change before it was asked for this view. So it has lost the change, as Redis
            # may at a failover.
            self._version_min = 0

    def _see(self, view: ClusterView) -> None:
        gone = self._view.members.keys() - view.members.keys()
        self._view = view
        if gone:
            self._hosts.review()
        if self._member_watch is not None:
            self._member_watch.follow(view.members)
        seen, self._seen = self._seen, asyncio.Event()
        seen.set()

    async def _act(self) -> None:
        if self._view.version < self._version_min or self._stopping or self._data_lost:
            return
        existing = set(self._hosts.queues())
        owned = self._view.owned_by(self._me)
        self._lose(self._held() - owned)
        served = set(self._hosts.served())
        for queue in sorted(owned & existing - served - self._under_way.keys()):
            self._spawn(queue, self._hosts.take(queue))
        for queue in sorted(owned - existing - self._under_way.keys()):
            self._spawn(queue, self._hand_over(queue))
        moves = self.moves()
        for queue in sorted(moves):
            if queue in owned and queue not in self._under_way:
                self._spawn(queue, self._hand_over(queue))
        wanted = [
            queue
            for queue, to in moves.items()
            if to == self._me
            and queue not in self._view.owners
            and queue not in self._under_way
            and not self._may_be_kept(queue)
        ]
        if wanted:
            claimed, self._version_min = await self._claims.claim(self._me, wanted)
            for queue in claimed:
                self._spawn(queue, self._hosts.take(queue))

    def _may_be_kept(self, queue: BrokerQueue) -> bool:
        """Return whether this proxy must not claim ``queue`` yet, because the former owner may still rejoin."""
        owner = self._former.get(queue, self._me)
        if owner == self._me or owner in self._view.members:
            return False
        return asyncio.get_running_loop().time() < self._former_until

    def _lose(self, queues: set[BrokerQueue]) -> None:
        moving = {queue for queue, task in self._under_way.items() if not task.done()}
        for queue in sorted(queues - moving):
            self._hosts.lose(queue)

    def _spawn(self, queue: BrokerQueue, work: Coroutine[None, None, None]) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            self._under_way.pop(queue, None)
            self._wake.set()

        async def done() -> None:
            pause = FAILED_SECONDS
            try:
                await work
                pause = 0.0
            except StateUnavailable as error:
                _log.warning("a queue's change of owner is delayed", extra={"queue": queue, "reason": error.detail})
                pause = self._again_seconds()
            finally:
                loop.call_later(pause, ended)  # a queue that can't be taken must not cost the others anything

        task = self._background.spawn(done(), name=f"move {queue}")
        if task is None:
            work.close()
        else:
            self._under_way[queue] = task

    async def _hand_over(self, queue: BrokerQueue) -> None:
        await self._hosts.hand_over(queue)
        self._version_min = max(self._version_min, await self._claims.release(self._me, [queue]))
