"""Serves one subscription: manages its queues, its policy and consume mode, and the demand for its messages.

``pops`` accepts the pops, and ``serving`` chooses messages for them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf

from popgate.domain import modes
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, InstanceId, Layout, Subscription
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_letters import DeadLetters
from popgate.engine.lease.body_retrieval import BodyRetrieval
from popgate.engine.lease.granting import Granter
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_request import Leased
from popgate.engine.lease.repeated_attempts import RepeatedAttempts
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.lease.stale_leases import StaleLeases
from popgate.engine.publish.publishing import PublisherGate
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.channel_opener import ChannelOpener
from popgate.engine.queue.effects import Effects, QueueEvents
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.record_upkeep import trim
from popgate.engine.subscription.counting import SubscriptionStatus, subscription_status
from popgate.engine.subscription.draining import Draining
from popgate.engine.subscription.pops import Pops
from popgate.engine.subscription.serving import Serving
from popgate.ports.assignments import StoredAssignment
from popgate.ports.peers import LearnedRecord
from popgate.runtime.deadlines import NEVER


class ServedSubscription:
    """Serves the pops of one (topic, group) on this proxy."""

    def __init__(
        self,
        context: EngineContext,
        spec: GroupSpec,
        layout: Layout,
        signer: ReceiptSigner,
        publishers: PublisherGate,
        end_drain: Callable[[GroupSpec], Awaitable[None]],
    ) -> None:
        """``end_drain`` ends the drain that a spec contains, for all proxies."""
        sequence = count(1)  # shared by all queues: it orders messages with the same timestamp
        lacking = LackingQueues(context.buffer)
        hosts = [QueueHost(context, layout, queue, self, sequence, lacking) for queue in layout.queue_ids()]
        self.timer = NEVER
        self.polls = 0
        """Number of pops and pulls that clients have sent to this proxy."""
        self.group = group = ServedGroup(spec, layout, hosts, lacking)
        self.mover = Mover(context, group)
        self.stale_leases = StaleLeases(context, group)
        self.dead_letters = DeadLetters(context, group, publishers)
        self.retrieval = BodyRetrieval(group, ask=self.ask)
        self.serving = Serving(context, group, self.mover, self.retrieval, self.stale_leases)
        self._context = context
        self._opener = ChannelOpener(context, hosts, self, lacking)
        self._last_demand = float("-inf")
        self.serving.mode_changed()
        self._granter = Granter(context, group, signer, self.mover, self.serving.limit, self.stale_leases)
        self._draining = Draining(context, self, end_drain)
        earlier = RepeatedAttempts(context, group, self._granter, self.retrieval)
        self.pops = Pops(context, group, self, self.serving, self._granter, self._opener, earlier)
        self._draining.reconsider()

    @property
    def spec(self) -> GroupSpec:
        """The present spec of the group."""
        return self.group.spec

    @property
    def layout(self) -> Layout:
        return self.group.layout

    @property
    def hosts(self) -> Sequence[QueueHost]:
        return self.group.hosts

    @property
    def name(self) -> Subscription:
        return self.group.name

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start to serve the subscription. Outside a cluster, take all its queues at once. Raises: StateUnavailable."""
        await self._context.leases.allow_mode(self.name, self.spec.mode_generation)
        if self._context.router.cluster is None:
            for host in self.hosts:
                await self.take(host)

    async def take(self, host: QueueHost) -> None:
        """Start to serve a queue as its owner. Idempotent.

        This loads the queue's lease records, and finishes interrupted moves of messages to the dead-letter queue. The
        dead-letter queue belongs to the owner of the subscription's first queue. Raises: StateUnavailable.
        """
        if host.claim.is_lost:
            await self._context.leases.allow_mode(self.name, self.spec.mode_generation)
        await host.take()
        if any(buffered.state is MessageState.MOVING for buffered in host.messages()):
            self.note_demand()
        if self.has_demand():
            self._opener.open()
        if host.queue.number == 0:
            await self.dead_letters.start()
            self._draining.reconsider()

    async def hand_over(self, host: QueueHost) -> None:
        """Stop serving a queue, so that another proxy can own it. No lease is lost. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            await self.dead_letters.stop()
        await host.hand_over(lambda: self.mover.is_publishing(host.broker_queue))

    def lose(self, host: QueueHost) -> None:
        """Stop serving a queue that another proxy has already claimed. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            self._context.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        host.lose()

    async def stop(self) -> None:
        """Answer parked pops without messages, and return all buffered messages to the broker. Idempotent.

        Leases stay valid, because the store has their records.
        """
        self.serving.is_closed = True
        self._opener.close()
        self._context.deadlines.cancel(self)
        self._context.deadlines.cancel(self.serving.limit)
        self._context.deadlines.cancel(self.serving)
        self._draining.stop()
        self.serving.answer_parked()
        await asyncio.gather(self.dead_letters.stop(), *(host.close() for host in self.hosts))
        cluster = self._context.router.cluster
        if cluster is not None:
            for host in self.hosts:
                host.claim.is_owned = False
                cluster.ownership.overtaken(
                    host.broker_queue
                )  # if the queue still exists, its next owner takes it again

    async def trim(self) -> None:
        """Delete old settled records if the broker has provably applied their acks. Raises: StateUnavailable."""
        for host in self.hosts:
            await trim(self._context, host)

    async def queues_declared(self) -> None:
        """Serve queues that have been declared again, so that the next pop does not fail with QueueGone.

        Forget all state of queues that were deleted before. Raises: StateUnavailable.
        """
        for host in self.hosts:
            if host.queue_gone and host.is_owned:
                await host.begin_anew()
        self._opener.reconsider()

    def change_policy(self, policy: Policy) -> None:
        """Apply ``policy``. If it pauses the group, return the buffered messages to the broker. Leases stay valid."""
        self.group.spec = replace(self.spec, policy=policy)
        self.serving.policy_changed()
        if policy.paused:
            for host in self.hosts:
                host.return_buffer()
        elif self.serving.look_again():
            self._opener.open()

    async def change_mode(self, spec: GroupSpec) -> None:
        """Apply the consume mode of ``spec``, unless its generation is older than the present one. Idempotent.

        If messages are now leased to the other kind of client (pop or pull), existing leases are released, and all
        buffered messages are returned to the broker. Raises: StateUnavailable. In that case, this proxy has changed
        nothing.
        """
        if spec.mode_generation > self.spec.mode_generation:
            await self._context.leases.allow_mode(self.name, spec.mode_generation)
        if spec.mode_generation < self.spec.mode_generation:
            return
        former, self.group.spec = self.spec, replace(spec, policy=self.spec.policy)
        self._draining.reconsider()
        if spec.mode is former.mode:
            return
        self.serving.mode_changed()
        if modes.leased_by(spec) is not modes.leased_by(former):
            for host in self.hosts:
                self.stale_leases.look_at(host.messages())
                host.deliver_again()
        if spec.mode is not ConsumeMode.DRAINING:
            self.serving.look_again()
        self._opener.closed_on_purpose()

    async def follow(self, spec: GroupSpec) -> None:
        """Apply the policy and the consume mode of ``spec``, the present entry of the catalog.

        Raises: StateUnavailable.
        """
        await self.change_mode(spec)
        if spec.policy != self.spec.policy:
            self.change_policy(spec.policy)
        if any(host.queue_gone for host in self.hosts):  # the proxy that recreated the group has declared them
            await self.queues_declared()

    def assign(self, stored: StoredAssignment) -> None:
        """Apply a new assignment of the queues to pull clients.

        Release the leases of clients that have lost their queues.
        """
        self.group.assigned = stored
        for host in self.hosts:
            self.stale_leases.look_at(host.messages())

    def leased(self, buffered: BufferedMessage, message: Message) -> Leased:
        """Return a lease in the form in which a pull returns it.

        The lease lasts as long as the session of its client.
        """
        return self._granter.leased(self.hosts[buffered.queue_index].queue, buffered.copy_id, buffered, message, inf)

    async def status(self) -> SubscriptionStatus:
        """Count the messages of all queues, including queues that other proxies own. Raises: BrokerUnavailable."""
        return await subscription_status(self._context, self.group, self.dead_letters.held_count)

    @property
    def is_closed(self) -> bool:
        return self.serving.is_closed

    @property
    def parked_pops(self) -> int:
        return len(self.serving.parked)

    def trouble_of(self, host: QueueHost) -> str | None:
        """Return why the last attempt to consume a queue has failed, or None if it has not failed."""
        error = self._opener.error_of(host)
        return None if error is None else error.detail

    # -- the queues -----------------------------------------------------------------------------------------------

    async def bring_back(self, many: Sequence[BufferedMessage]) -> bool:
        """Fetch the missing bodies of leased messages. Return False if they do not arrive in time."""
        return await self.retrieval.bring_back(many)

    async def fetch(self, leases: Sequence[LearnedRecord]) -> dict[tuple[BrokerQueue, CopyId], Message | None]:
        """Fetch the messages of leases in queues that other proxies own. See ``Router.fetch``.

        Raises: StateUnavailable; PeerUnavailable, also while the broker is delivering the messages again.
        """
        return await self._context.router.fetch(self.name, leases)

    def ask(self) -> None:
        """Record demand for messages, open the queues, and make the broker deliver more messages."""
        self.note_demand()
        self._opener.open()
        self.group.widen()

    def read_heads(self) -> bool:
        """Bring the first messages of the queues into memory, to learn how old they are. They return as after a pop.

        Return False, and do nothing, if no pop would be served, or if the queues are adopted: other programs may
        consume these, and RabbitMQ may count each return of a message against the queue's delivery limit.
        """
        spec = self.spec
        if self.is_closed or self.layout.adopted or spec.mode is not ConsumeMode.POP or spec.policy.paused:
            return False
        self.note_demand()
        self._opener.open()
        return True

    def note_demand(self) -> None:
        self._last_demand = self._context.clock.monotonic()
        if self.timer == NEVER:
            self._context.deadlines.schedule(self._last_demand + self._context.options.idle_return_seconds, self)

    def has_demand(self) -> bool:
        idle = self._context.clock.monotonic() - self._last_demand
        parked = self.serving.parked
        gives = self.spec.mode is not ConsumeMode.DRAINING and not self.spec.policy.paused
        if self.is_closed or not (gives or parked.has_admin()):
            return False
        return bool(parked) or idle < self._context.options.idle_return_seconds or self.serving.is_wanted()

    def wanted_by(self, member: InstanceId, seconds: float, since: int) -> bool:
        """Return whether a message is ready for the proxy ``member``. If not, notify it once when a message is ready.

        See ``Serving.wanted_by``.
        """
        self.ask()
        return self.serving.wanted_by(member, seconds, since)

    def due(self, now: float) -> float | None:
        """Return the buffered messages to the broker if there is no demand. Return the time of the next check."""
        idle_seconds = self._context.options.idle_return_seconds
        if self.has_demand():
            return now + idle_seconds if self.serving.parked else self._last_demand + idle_seconds
        for host in self.hosts:
            host.return_buffer()
        return now + idle_seconds if any(host.listener is not None for host in self.hosts) else None

    def happened(self, effects: Effects) -> None:
        """See ``QueueEvents``."""
        self.serving.happened(effects)

    def given_up(self) -> None:
        """See ``QueueEvents``."""
        self.serving.answer_parked()

    def lost(self, number: int) -> None:
        """See ``QueueEvents``."""
        if number == 0 and not self.hosts[0].is_owned:
            self._context.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        if self.has_demand():
            self._opener.open()


_conforms: type[QueueEvents] = ServedSubscription
