"""One subscription: serves the pops of a group from its queues.

Theory of operation. A pop takes candidates from the ready messages (``serving``), leases them in one conditional write
(``granting``), and returns those that were granted. The others take the state that the store reports for them (held,
settled, exhausted, half-moved). A pop that finds nothing parks. All state here changes synchronously, between awaits,
so no locks are needed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf

from popgate.domain import modes
from popgate.domain.errors import PopgateError, StateUnavailable
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, InstanceId, Layout, LeaseId, Subscription
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_letters import DeadLetters
from popgate.engine.lease.body_retrieval import BodyRetrieval
from popgate.engine.lease.granting import Granter, ModeOvertaken
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence, Waiter
from popgate.engine.lease.repeated_attempts import RepeatedAttempts
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.lease.stale_leases import StaleLeases
from popgate.engine.publish.publishing import PublisherGate
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.channel_opener import ChannelOpener
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.host import QueueEvents, QueueHost
from popgate.engine.queue.record_upkeep import trim
from popgate.engine.subscription.counting import SubscriptionStatus, subscription_status
from popgate.engine.subscription.draining import Draining
from popgate.engine.subscription.serving import Serving
from popgate.ports.assignments import StoredAssignment
from popgate.ports.peers import LearnedRecord
from popgate.runtime.deadlines import NEVER

SHORT_POLL_SECONDS_MAX = 1.0
"""Maximum time, in seconds, that a pop without a wait time waits for messages that the broker is known to have."""
SORTED_SECONDS_MAX = 10.0
"""Maximum time, in seconds, that such a pop waits while redelivered messages arrive and have no order yet."""


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
        """``end_drain`` ends the drain of a spec, for all proxies."""
        sequence = count(1)  # shared by all queues: it orders messages with the same timestamp
        hosts = [QueueHost(context, layout, queue, self, sequence) for queue in layout.queue_ids()]
        self.timer = NEVER
        self.group = group = ServedGroup(spec, layout, hosts)
        self.mover = Mover(context, group)
        self.stale_leases = StaleLeases(context, group)
        self.dead_letters = DeadLetters(context, group, publishers)
        self.retrieval = BodyRetrieval(group, ask=self.ask)
        self.serving = Serving(context, group, self.mover, self.retrieval, self.stale_leases)
        self._context = context
        self._opener = ChannelOpener(context, hosts, self)
        self._last_demand = float("-inf")
        self.serving.mode_changed()
        self._granter = Granter(context, group, signer, self.mover, self.serving.limit, self.stale_leases)
        self._draining = Draining(context, self, end_drain)
        self._earlier = RepeatedAttempts(context, group, self._granter, self.retrieval)
        self._attempts: dict[str, Waiter] = {}
        self._attempt_done: dict[str, asyncio.Future[None]] = {}
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
        """Start serving. Outside a cluster, the proxy takes all queues at once. Raises: StateUnavailable."""
        await self._context.leases.allow_mode(self.name, self.spec.mode_generation)
        if self._context.router.cluster is None:
            for host in self.hosts:
                await self.take(host)

    async def take(self, host: QueueHost) -> None:
        """Own a queue: load its records, and finish moves to the dead letters that were interrupted. Idempotent.

        The owner of the first queue also owns the dead letters. Raises: StateUnavailable.
        """
        if host.claim.is_lost:
            await self._context.leases.allow_mode(self.name, self.spec.mode_generation)
        await host.take()
        if any(buffered.state is MessageState.MOVING for buffered in host.messages()):
            self._note_demand()
        if self.has_demand():
            self._opener.open()
        if host.queue.number == 0:
            await self.dead_letters.start()
            self._draining.reconsider()

    async def hand_over(self, host: QueueHost) -> None:
        """Give a queue up in an orderly way: no lease is lost. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            await self.dead_letters.stop()
        await host.hand_over(lambda: self.mover.is_publishing(host.broker_queue))

    def lose(self, host: QueueHost) -> None:
        """Let go of a queue that another proxy has claimed. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            self._context.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        host.lose()

    async def stop(self) -> None:
        """Answer parked pops empty and give every buffer back. Leases live on in their records. Idempotent."""
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
        """Delete settled records whose acks are proved to be applied by the broker. Raises: StateUnavailable."""
        for host in self.hosts:
            await trim(self._context, host)

    async def queues_declared(self) -> None:
        """Note that the queues exist, so that the next pop does not fail because they were gone.

        Forget all state of queues that were deleted and declared again. Raises: StateUnavailable.
        """
        for host in self.hosts:
            if host.queue_gone and host.is_owned:
                await host.begin_anew()
        self._opener.reconsider()

    def change_policy(self, policy: Policy) -> None:
        """Apply ``policy`` from now on. A pause returns the buffered messages to the broker; leases live on."""
        self.group.spec = replace(self.spec, policy=policy)
        self.serving.policy_changed()
        if policy.paused:
            for host in self.hosts:
                host.return_buffer()
        elif self.serving.look_again():
            self._opener.open()

    async def change_mode(self, spec: GroupSpec) -> None:
        """Apply the consume mode of ``spec`` if it is later than the known one. Idempotent.

        If the mode now serves the other kind of client (pop or pull), leases of the former kind are given back, and so
        are all buffered messages. Raises: StateUnavailable; then nothing has changed here.
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
        """Apply ``spec``, the present entry of the catalog. Raises: StateUnavailable."""
        await self.change_mode(spec)
        if spec.policy != self.spec.policy:
            self.change_policy(spec.policy)
        if any(host.queue_gone for host in self.hosts):  # the proxy that created the group again has declared them
            await self.queues_declared()

    def assign(self, stored: StoredAssignment) -> None:
        """Apply a new assignment of the queues to pull clients. Leases of clients that lost a queue are given back."""
        self.group.assigned = stored
        for host in self.hosts:
            self.stale_leases.look_at(host.messages())

    def leased(self, buffered: BufferedMessage, message: Message) -> Leased:
        """Describe a lease to its pull client. The lease lasts as long as the session."""
        return self._granter.leased(self.hosts[buffered.queue_index].queue, buffered.copy_id, buffered, message, inf)

    async def status(self) -> SubscriptionStatus:
        """Count the messages of all queues, including those that other proxies own. Raises: BrokerUnavailable."""
        return await subscription_status(self._context, self.group, self.dead_letters.held_count)

    @property
    def is_closed(self) -> bool:
        return self.serving.is_closed

    @property
    def parked_pops(self) -> int:
        return len(self.serving.parked)

    # -- pop ----------------------------------------------------------------------------------------------------

    async def pop(self, request: PopRequest, presence: Presence) -> list[Leased]:
        """Lease up to ``max_messages``. Return an empty list if the wait ends without a message.

        Raises: BrokerUnavailable, StateUnavailable, QueueGone.
        """
        attempt_id = request.attempt_id
        if attempt_id is None:
            return await self._pop(request, presence, None)
        while (running := self._attempt_done.get(attempt_id)) is not None:
            parked = self._attempts.get(attempt_id)
            if parked is not None:
                parked.give_up()  # the repeat takes over: the connection of the earlier one is probably dead
            await asyncio.shield(running)
        done = self._attempt_done[attempt_id] = asyncio.get_running_loop().create_future()
        try:
            repeated = await self.repeated(attempt_id)
            if repeated is not None:
                return repeated
            return await self._pop(request, presence, attempt_id)
        finally:
            del self._attempt_done[attempt_id]
            self._attempts.pop(attempt_id, None)
            done.set_result(None)

    async def _pop(self, request: PopRequest, presence: Presence, attempt_id: str | None) -> list[Leased]:
        context = self._context
        short = request.wait_seconds <= 0
        started = context.clock.monotonic()
        deadline = started + (SHORT_POLL_SECONDS_MAX if short else request.wait_seconds)
        lease_id = request.selection.lease_id or context.mint_lease_id()
        first = False
        self.check_mode(request)
        self._note_demand()
        candidates = self.serving.take_at_once(request, started if short else deadline)
        while True:
            while candidates:
                if presence.gone or not self.serving.is_for(request):
                    self._granter.give_back(candidates)
                    break
                leased = await self._grant(candidates, request, lease_id, attempt_id)
                if leased:
                    return leased
                first = True  # it had its turn, but its candidates could not be leased: it keeps its place
                candidates = self.serving.take_at_once(request, started if short else deadline)
            self.check_mode(request)
            if self.serving.is_closed or presence.gone:
                return []
            if short and any(host.is_ordering for host in self.hosts):
                deadline = min(context.clock.monotonic() + SHORT_POLL_SECONDS_MAX, started + SORTED_SECONDS_MAX)
            changes = self.serving.changes
            if context.clock.monotonic() >= deadline or (short and not await self._may_get(request)):
                await self.serving.raise_if_full(request)
                return []
            waiter = Waiter(request, short=short, changes=changes)
            candidates = await self._park(waiter, deadline, presence, attempt_id, first=first)
            if not candidates:
                self.check_mode(request)
                self._opener.raise_if_unservable()
                if not short:
                    await self.serving.raise_if_full(request)
                    return []

    async def _grant(
        self, candidates: list[BufferedMessage], request: PopRequest, lease_id: LeaseId, attempt_id: str | None
    ) -> list[Leased]:
        """Lease ``candidates``; return those that were granted. Raises: WrongMode, if the consume mode has changed and
        the leases are given back."""
        asked = self.spec
        try:
            leased = await self._granter.grant(asked, candidates, request, lease_id, attempt_id)
        except ModeOvertaken:
            if self.spec.mode_generation == asked.mode_generation:
                await self._catch_up()
            return []
        if not modes.is_good(self.spec, lease_id):
            self.check_mode(request)
        return leased

    async def _catch_up(self) -> None:
        """Read a change of the consume mode that this proxy has missed. Raises: StateUnavailable."""
        spec, known = await self._context.catalog.group(self.name), self.spec.mode_generation
        if spec is not None:
            await self.follow(spec)
        if self.spec.mode_generation == known:
            raise StateUnavailable("the consume mode of this group is being changed")

    def check_mode(self, request: PopRequest) -> None:
        """Raises: WrongMode, if the present consume mode does not serve ``request``."""
        wanted = request.selection.mode
        if wanted is not None and wanted is not self.spec.mode:
            raise modes.wrong_mode(self.spec, wanted)

    async def _park(
        self, waiter: Waiter, deadline: float, presence: Presence, attempt_id: str | None, *, first: bool
    ) -> list[BufferedMessage]:
        """Wait for candidates. Return an empty list if none come in time."""
        self.check_mode(waiter.request)
        if not waiter.short:
            self._context.parking.raise_if_full(len(self.serving.parked))
        if not (waiter.request.selection.is_limited and self.spec.policy.paused):
            self._opener.open()
            if self._opener.is_hopeless():
                self._opener.raise_if_unservable()
        self.serving.park(waiter, first=first)
        self._context.parking.taken += 1
        self._context.deadlines.schedule(deadline, waiter)
        if attempt_id is not None:
            self._attempts[attempt_id] = waiter
        presence.on_leave = waiter.give_up
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self._granter.give_back(waiter.future.result())
            raise
        finally:
            presence.on_leave = None
            self._context.parking.taken -= 1
            self.serving.leave(waiter)
            self._context.deadlines.cancel(waiter)
            self._note_demand()

    async def _may_get(self, request: PopRequest) -> bool:
        """Whether a message for ``request`` is ready here, or a queue holds messages that have not arrived yet.

        Opens the queues if needed. Raises: the error that kept every queue from opening.
        """
        if self.serving.discarder.is_busy():
            return True
        if self.serving.capacity(request) <= 0 and (self.spec.policy.paused or not await self.serving.limit.look()):
            return False
        self._opener.open()
        await self._opener.attempted(SHORT_POLL_SECONDS_MAX)
        if request.selection.has(self.serving.ready):
            return True
        hosts = request.selection.hosts(self.hosts)
        channels = [host.channel for host in hosts if host.channel is not None]
        if not channels:
            self._opener.raise_if_unservable()
        answers = await asyncio.gather(*(channel.backlog() for channel in channels), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PopgateError):
                raise answer
        has_more = any(isinstance(answer, int) and answer > 0 for answer in answers)
        return request.selection.has(self.serving.ready) or self.serving.discarder.is_busy() or has_more

    async def repeated(self, attempt_id: str) -> list[Leased] | None:
        """See ``RepeatedAttempts.repeated``."""
        return await self._earlier.repeated(attempt_id)

    # -- the queues -----------------------------------------------------------------------------------------------

    async def bring_back(self, many: Sequence[BufferedMessage]) -> bool:
        """Fetch the bodies of leased messages that are not here. Return False if they didn't come in time."""
        return await self.retrieval.bring_back(many)

    async def fetch(self, leases: Sequence[LearnedRecord]) -> dict[tuple[BrokerQueue, CopyId], Message]:
        """Fetch the messages of leases in queues that other proxies own. Raises: StateUnavailable; PeerUnavailable,
        also while they are on their way."""
        return await self._context.router.fetch(self.name, leases)

    def ask(self) -> None:
        """Note demand for messages of the queues: open them and keep the messages flowing."""
        self._note_demand()
        self._opener.open()
        for host in self.hosts:
            host.starve()

    def _note_demand(self) -> None:
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
        """Whether there is a message now for the pops of another proxy. If not, that proxy is notified (``Cluster``)
        once, as soon as there is one."""
        self.ask()
        return self.serving.wanted_by(member, seconds, since)

    def due(self, now: float) -> float | None:
        """Return the buffers to the broker if there is no demand (the idle timer)."""
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

    def lost(self, host: QueueHost) -> None:
        """See ``QueueEvents``."""
        if host.queue.number == 0 and not host.is_owned:
            self._context.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        if self.has_demand():
            self._opener.open()


_conforms: type[QueueEvents] = ServedSubscription
