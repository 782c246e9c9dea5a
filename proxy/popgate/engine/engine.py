"""Provides ``Engine``, which the HTTP interfaces call. Most of its methods only call another engine part."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

from popgate.domain.errors import Conflict, PeerUnavailable, PopgateError, RetryLater
from popgate.domain.message import Message
from popgate.domain.names import GroupName, InstanceId, Subscription, TopicName
from popgate.domain.permissions import Permit, permit_all
from popgate.domain.quotas import Quotas
from popgate.domain.receipt import ReceiptSigner
from popgate.engine.catalog.changes import Changes
from popgate.engine.catalog.deletion import Deletions
from popgate.engine.catalog.topics import Topics
from popgate.engine.cluster.cluster_status import ClusterStatus, cluster_status
from popgate.engine.cluster.hosting import Hosting
from popgate.engine.cluster.peering import Peering
from popgate.engine.cluster.proxy_gauges import ProxyGauges, proxy_gauges
from popgate.engine.cluster.remote_pops import Forward, RemotePops
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.redriving import Redrive, RedriveOrder
from popgate.engine.explain.inspector import Inspector
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.lease_groups.lease_groups import LeaseGroups
from popgate.engine.publish.deduplication import Deduplicator
from popgate.engine.publish.publishing import NewMessage, Published, Publisher
from popgate.engine.pull.pulling import Puller
from popgate.engine.settle.orders import SettleOrder, SettleResult, Verb
from popgate.engine.settle.purging import PURGE_AT_OWNER_SECONDS, PURGE_SECONDS, PurgedGroup, purge
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription.backlogs import Backlogs
from popgate.engine.subscription.counting import SubscriptionStatus, ready_here
from popgate.engine.subscription.gauges import SubscriptionGauges, subscription_gauges
from popgate.engine.subscription.mode_status import ModeHere, ModeStanding, mode_here, mode_standing
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.broker import Capabilities
from popgate.ports.peers import PurgeAtOwner, PurgeResult
from popgate.runtime.deadlines import NEVER
from popgate.runtime.faults import FaultPart
from popgate.runtime.histogram import Histogram
from popgate.runtime.in_turn import in_turn

_log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

FOLLOW_SECONDS = 2.0
COLLECT_SECONDS = 60.0
RECORD_KEPT_SECONDS = 30 * 86_400.0


class Engine:
    """The engine of one proxy. It does all I/O through the ports in ``context``.

    ``puller`` and ``lease_groups`` create these parts.
    """

    def __init__(
        self,
        context: EngineContext,
        *,
        puller: Callable[[EngineContext, Topics, Settler, ReceiptSigner], Puller] = Puller,
        lease_groups: Callable[[EngineContext, Topics], LeaseGroups] = LeaseGroups,
    ) -> None:
        self.timer = NEVER
        self._context = context
        signer = ReceiptSigner(context.options.secrets)
        self.topics = Topics(context, signer)
        self.changes = Changes(context, self.topics)
        self.deletions = Deletions(context, self.topics)
        self.lease_groups = lease_groups(context, self.topics)
        self._settler = Settler(context, signer)
        self._publisher = Deduplicator(context, Publisher(context, self.topics.group_names))
        self._remote_pops = RemotePops(context)
        self.pulls = puller(context, self.topics, self._settler, signer)
        self.inspector = Inspector(context, self.topics, lambda: self._stopping)
        self.hosting = Hosting(context, self.topics)
        self.backlogs = Backlogs(context, lambda: self.topics.served)
        self.peering = Peering(self.topics, self._settler, self.lease_groups, self._remote_pops, self._purge_here)
        self._stopping = False
        self._collecting = False

    async def start(self) -> None:
        """Serve the topics and groups of the catalog. Raises: BrokerUnavailable, StateUnavailable, Conflict."""
        await self._context.clock.look()
        await self.topics.start()
        self._context.background.keep(self._context.clock.follow, name="follow the store's clock")
        if self._context.router.cluster is not None:
            self._context.background.keep(self._follow_catalog, name="follow the catalog")
        self.pulls.start()
        self._collect_soon()
        self._context.deadlines.schedule(self._context.clock.monotonic() + COLLECT_SECONDS, self)

    async def drain(self) -> None:
        """Answer parked pops without messages, return buffered messages to the broker, and refuse pops. Idempotent.

        Leases stay valid, and clients can still settle them.
        """
        self._stopping = True
        if self._context.router.cluster is not None:
            await self._context.router.cluster.ownership.stop()
        await self.topics.stop()

    async def stop(self) -> None:
        """Call ``drain``, then stop the timers and the background tasks. Idempotent."""
        await self.drain()
        self._context.deadlines.stop()
        await self._context.background.stop()

    def unready_reason(self) -> str | None:
        """Return the reason why this proxy can't serve requests now, or None if it can. /readyz shows the reason."""
        if self._stopping:
            return "popgate is shutting down"
        return self._context.broker.unavailable_reason() or self._context.leases.unavailable_reason()

    # -- data plane -----------------------------------------------------------------------------------------------

    async def publish(self, topic: str, messages: Sequence[NewMessage], permit: Permit = permit_all) -> list[Published]:
        """Publish messages to a topic. Return one result for each message, in the same order.

        ``permit`` is asked before the topic is created by use. Raises: TopicNotFound, BrokerUnavailable,
        StateUnavailable, and the errors of ``permit``.
        """
        # This may wait for a change of topics, which may wait for the gate of publishers.
        spec = await self.topics.topic_to_publish(topic, permit)
        async with self.topics.publishers.entered(spec.topic):
            spec = self.topics.topic(topic)
            return await self._publisher.publish(spec, messages, self.topics.missing_queues(spec.topic))

    async def pop(
        self, topic: str, group: str, request: PopRequest, presence: Presence, permit: Permit = permit_all
    ) -> list[Leased]:
        """Lease messages of a group to a client. ``permit`` is asked before the group is created by use.

        Raises: TopicNotFound, GroupNotFound, and the errors of ``Pops.pop`` and ``permit``.

        If the client disconnects during the pop, and has sent no attempt id with which it could repeat the pop, the
        messages are released, and the result is empty.
        """
        subscription = await self._subscription_to_pop(topic, group, permit)
        if self._context.router.cluster is None:  # otherwise another proxy has forwarded this pop, and counted it
            subscription.polls += 1
        leased = await subscription.pops.pop(request, presence)
        return await self._unless_gone(subscription, request, presence, leased)

    async def pop_anywhere(
        self,
        topic: str,
        group: str,
        request: PopRequest,
        presence: Presence,
        forward: Forward[AnswerT],
        permit: Permit = permit_all,
    ) -> list[Leased] | AnswerT:
        """Pop on this proxy, or with ``forward`` on another proxy, whose answer is then returned."""
        subscription = await self._subscription_to_pop(topic, group, permit)
        subscription.polls += 1
        found = await self._remote_pops.pop(subscription, request, presence, forward)
        if not isinstance(found, list):
            return found
        return await self._unless_gone(subscription, request, presence, cast("list[Leased]", found))

    def arrivals(self, topic: str, group: str) -> int:
        """Return a count that grows when messages of the group become ready on this proxy; 0 for an unknown group."""
        served = self.topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        return 0 if served is None else served.serving.arrivals

    async def _subscription_to_pop(self, topic: str, group: str, permit: Permit) -> ServedSubscription:
        if self._stopping:
            raise RetryLater("popgate is shutting down", retry_after_seconds=1.0)
        return await self.topics.subscription_to_pop(topic, group, permit)

    async def _unless_gone(
        self, served: ServedSubscription, request: PopRequest, presence: Presence, leased: list[Leased]
    ) -> list[Leased]:
        if presence.gone and request.attempt_id is None:
            await self.abandon(*served.name, leased)
            return []
        return leased

    async def abandon(self, topic: str, group: str, leased: Sequence[Leased]) -> None:
        """Release leases, because the client did not receive their messages. Raises: StateUnavailable."""
        if leased:
            orders = [SettleOrder(one.receipt_handle, 0.0) for one in leased]
            await self._settler.settle(self.topics.subscription(topic, group), Verb.RELEASE, orders)

    def abandon_soon(self, topic: str, group: str, receipt_handles: Sequence[str]) -> None:
        """Release leases like ``abandon``, but in the background. If the release fails, the leases expire."""
        orders = [SettleOrder(handle, 0.0) for handle in receipt_handles]
        self._context.background.spawn(self._abandon(topic, group, orders), name=f"abandon leases of {topic}:{group}")

    async def _abandon(self, topic: str, group: str, orders: Sequence[SettleOrder]) -> None:
        try:
            await self._settler.settle(self.topics.subscription(topic, group), Verb.RELEASE, orders)
        except PopgateError as error:
            _log.warning("undelivered leases have to expire", extra={"leases": len(orders), "error": error.detail})

    async def settle(self, topic: str, group: str, verb: Verb, orders: Sequence[SettleOrder]) -> list[SettleResult]:
        """Settle leases of a group. Return one result for each of ``orders``.

        Raises: TopicNotFound, GroupNotFound, StateUnavailable; BrokerUnavailable for a rejection.
        """
        return await self._settler.settle(self.topics.subscription(topic, group), verb, orders)

    # -- the admin's work on messages -----------------------------------------------------------------------------

    async def purge(self, topic: str, group: str) -> PurgedGroup:
        """Delete the messages of a group that are visible now; leased and delayed messages are not deleted.

        Raises: TopicNotFound, GroupNotFound, BrokerUnavailable, StateUnavailable, PeerUnavailable.
        """
        if self._stopping:
            raise RetryLater("popgate is shutting down", retry_after_seconds=1.0)
        served = self.topics.subscription(topic, group)
        here = await self._purge_here(served, PURGE_SECONDS)
        purged, complete = here.purged, here.complete
        for owner in self._context.router.others(served.layout):
            there = await self._context.router.ask(owner, PurgeAtOwner(subscription=served.name))
            purged, complete = purged + there.purged, complete and there.complete
        return PurgedGroup(purged, complete)

    async def _purge_here(self, served: ServedSubscription, seconds: float = PURGE_AT_OWNER_SECONDS) -> PurgeResult:
        async def count_visible() -> int:
            return (await ready_here(self._context, served.group))[1]

        if not any(host.is_owned for host in served.hosts):
            return PurgeResult(0, complete=True)
        count_max, _ = await ready_here(self._context, served.group)
        return PurgeResult(
            *await purge(self._context, self._settler, served, count_max, count_visible, seconds=seconds)
        )

    def dead_letters_at(self, topic: str, group: str) -> InstanceId | None:
        """Return the other proxy that owns a group's dead letters, which is the owner of the group's first queue.

        Return None if this proxy owns them, or if the group does not exist. Raises: PeerUnavailable if no proxy owns
        them now, or if this proxy does not serve them yet or is stopping.
        """
        served = self.topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        if served is None:
            return None
        owner = self._context.router.responsible(served.layout.queues[0])
        if owner is None and not served.dead_letters.is_open:
            raise PeerUnavailable(f"the proxy is about to own the dead letters of {topic}:{group}, or is stopping")
        return owner

    def count_forwarded(self, to: InstanceId) -> None:
        """Count a request that this proxy forwards to the proxy ``to``. ``cluster_status`` returns the counts."""
        self._context.router.forwarded[to] += 1

    def redrive(self, topic: str, group: str, order: RedriveOrder) -> Redrive:
        """Start to redrive dead letters of a group. Return the redrive, from which its progress can be read.

        Raises: TopicNotFound, also for the target topic of ``order``; GroupNotFound; Conflict; RetryLater.
        """
        served = self.topics.subscription(topic, group)
        target = None if order.target_topic is None else self.topics.topic(order.target_topic)
        if target is not None and not self.topics.groups(target.topic):
            raise Conflict(f"topic {target.topic!r} has no group that would get them; create one first")
        return served.dead_letters.redrive(order, target)

    def message_failed(self, topic: str, group: str, queue: int, message: Message, error: Exception) -> None:
        """Count the fault that a message of queue number ``queue`` could not be put into the answer to a client."""
        served = self.topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        if served is not None:
            self._context.faults.message_failed(served.layout.queues[queue], message.copy_id, error)

    # -- observation ----------------------------------------------------------------------------------------------

    async def status(self, topic: str, group: str) -> SubscriptionStatus:
        """Return the message counts of a group. Raises: TopicNotFound, GroupNotFound, BrokerUnavailable."""
        return await self.topics.subscription(topic, group).status()

    def other_members(self) -> list[InstanceId]:
        """Return the other proxies of the cluster, as this proxy knows them."""
        return self._context.router.other_members()

    def cluster_status(self) -> ClusterStatus:
        """Return the members of the cluster, the queues' owners, and planned moves, as this proxy knows them."""
        return cluster_status(self._context, self.topics)

    def mode_here(self, topic: str, group: str) -> ModeHere:
        """Return a group's consume mode as this proxy applies it now. Raises: TopicNotFound, GroupNotFound."""
        return mode_here(self._context, self.topics.subscription(topic, group))

    async def mode_standing(self, topic: str, group: str) -> ModeStanding:
        """Return a group's consume mode in the catalog. Raises: TopicNotFound, GroupNotFound, StateUnavailable."""
        return await mode_standing(self._context, self.topics.subscription(topic, group))

    def monotonic(self) -> float:
        """Return the monotonic time of this process, in seconds."""
        return self._context.clock.monotonic()

    def now(self) -> float:
        """Return the wall time of the shared clock, in Unix seconds."""
        return self._context.clock.wall()

    @property
    def capabilities(self) -> Capabilities:
        return self._context.broker.capabilities

    @property
    def quotas(self) -> Quotas:
        return self._context.options.quotas

    @property
    def auto_create(self) -> bool:
        """Whether topics and groups are created when they are first used."""
        return self._context.options.auto_create

    def faults(self) -> Mapping[FaultPart, int]:
        """Return the number of faults in each kind of work. A fault is a failure that did not stop other work."""
        return self._context.faults.counts

    def gauges(self) -> list[SubscriptionGauges]:
        """Return the gauges of each subscription. This visits all buffered messages, so call it only for metrics."""
        return subscription_gauges(self.topics.served, self.backlogs, self._context.clock.wall())

    @property
    def peer_ask_seconds(self) -> Histogram | None:
        """How long answered requests to other proxies took; None outside a cluster."""
        router = self._context.router
        return None if router.cluster is None else router.ask_seconds

    def proxy_gauges(self) -> ProxyGauges:
        """Return this proxy's queues, and what is available to it."""
        return proxy_gauges(self._context, self.topics)

    async def _follow_catalog(self) -> None:
        """Apply other proxies' changes of the catalog, even if they were not announced. Never returns."""
        catalog, seen = self._context.catalog, 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_SECONDS * random.uniform(0.8, 1.2)):
                    await catalog.changed()
            try:
                version = await catalog.version()
                if version != seen:
                    await self.topics.follow()
                    seen = version
            except PopgateError as error:
                _log.warning("the catalog can't be followed", extra={"reason": error.detail})

    # -- record keeping -------------------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """Start ``_collect`` in the background. Return the time of the next start."""
        self._collect_soon()
        return now + COLLECT_SECONDS

    def _collect_soon(self) -> None:
        if not self._collecting:
            self._collecting = True
            self._context.background.spawn(self._collect(), name="collect records")

    async def _collect(self) -> None:
        """Finish interrupted settlements of lease groups, and delete records that are no longer needed from the store.

        These are settled records whose acks the broker provably applied, and all older than ``RECORD_KEPT_SECONDS``.
        """
        try:
            works: list[Callable[[], Awaitable[object]]] = [served.trim for served in self.topics.served.values()]
            if self._context.router.collects():
                window, kept = self._context.options.dedup_seconds, RECORD_KEPT_SECONDS
                works += [
                    self.lease_groups.tend,
                    self._keep_limits,
                    partial(self._context.leases.collect, older_than_seconds=kept),
                    partial(self._context.dedup.collect, window_seconds=window, noted_seconds=kept),
                ]
            await in_turn(works)
        except RetryLater:
            pass  # the store is unavailable: try again in the next round
        finally:
            self._collecting = False

    async def _keep_limits(self) -> None:
        """Delete the in-flight counts of groups that no longer exist, or have no ``max_in_flight``, from the store."""
        cluster = self._context.router.cluster
        if cluster is not None and cluster.limits is not None:
            served = self.topics.served.values()
            await cluster.limits.keep([one.name for one in served if one.spec.policy.max_in_flight is not None])
