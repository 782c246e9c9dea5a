"""One subscription: serves the pops of a group from its queues.

Theory of operation. The ready messages of all queues are offered oldest first (``readiness``). A pop takes candidates,
leases them in one conditional write, and answers with those that were granted; what the store says of the others
(held, settled, exhausted, half-moved) is applied to them. A pop that finds nothing parks; parked pops are served in the
order they came. Between two awaits everything here changes synchronously, so no locks are needed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from popgate.domain.errors import PopgateError, RetryLater, StateUnavailable, TooManyInFlight
from popgate.domain.message import BATCH_COUNT_MAX, Message
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, InstanceId, Layout
from popgate.domain.receipt import ReceiptSigner
from popgate.domain.topics import GroupSpec, Policy
from popgate.engine.dead_letters import DeadLetters
from popgate.engine.discarding import Discarder
from popgate.engine.expiring import EndedLeases
from popgate.engine.granting import Granter, give_back
from popgate.engine.held import Held, HeldState
from popgate.engine.moves import Mover
from popgate.engine.opening import Opener
from popgate.engine.popping import Leased, PopRequest, Presence, Waiter
from popgate.engine.publishing import PublisherGate
from popgate.engine.queue_host import QueueHost
from popgate.engine.readiness import Ready
from popgate.engine.retrieval import Retrieval
from popgate.engine.room import Room
from popgate.ports.journal import EventKind
from popgate.ports.leases import AttemptLease
from popgate.ports.peers import LearnedRecord
from popgate.runtime.deadlines import NEVER

SHORT_POLL_SECONDS_MAX = 1.0
"""How long a pop that doesn't want to wait still waits for messages that the broker is known to have."""
SORTED_SECONDS_MAX = 10.0
"""How long, where there are so many that came back that their order is not known before."""
PARKED_MAX = 10_000
_ANY = PopRequest()


class ServedSubscription:
    """Pops of one (topic, group) on this proxy."""

    def __init__(
        self, room: Room, spec: GroupSpec, layout: Layout, signer: ReceiptSigner, publishers: PublisherGate
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.name = spec.subscription
        self.timer = NEVER
        self.hosts = [QueueHost(room, layout, queue, self) for queue in layout.queue_ids()]
        self.mover = Mover(room, self.name, layout)
        self.dead_letters = DeadLetters(room, self.name, layout, publishers, lambda: self.spec.mode_generation)
        self._room = room
        self._opener = Opener(room, self.hosts, wanted=self.has_demand, given_up=self._answer_parked)
        self._retrieval = Retrieval(room, ask=self.ask)
        self._discarder = Discarder(room, self.name, changed=self.changed)
        self._ready = Ready(self._discarder.takes)
        self._fresh: list[Held] = []
        """What was offered since parked pops were served."""
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._choosy: OrderedDict[Waiter, None] = OrderedDict()
        """Those of them that may get something where any other pop gets nothing, or the other way round."""
        self._wanted_by: dict[InstanceId, float] = {}
        """Other proxies that have pops for what is ready here, and until when."""
        self.arrivals = int(room.clock.wall() * 1_000)
        """Grows with every message that becomes ready here, and over restarts: it tells who has looked at all of them
        from who has not."""
        self._sequence = 0
        self._last_demand = float("-inf")
        self._serving = False
        self._has_news = False
        self._granter = Granter(room, self.name, signer, self.mover)
        self._ended = EndedLeases(room, self.name, lambda: self.spec.policy.retry)
        self._attempts: dict[str, Waiter] = {}
        self._attempt_done: dict[str, asyncio.Future[None]] = {}
        self._closed = False

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serve; a proxy that is alone takes all queues at once. Raises: StateUnavailable."""
        await self._room.leases.allow_mode(self.name, self.spec.mode_generation)
        if self._room.router.cluster is None:
            for host in self.hosts:
                await self.take(host)

    async def take(self, host: QueueHost) -> None:
        """Own a queue: load its records, and finish what was being dead-lettered. Idempotent.

        Whoever owns the first queue sees to the dead letters. Raises: StateUnavailable.
        """
        if host.is_lost:
            await self._room.leases.allow_mode(self.name, self.spec.mode_generation)
        await host.take()
        if any(held.state is HeldState.MOVING for held in host.held.values()):
            self._note_demand()
        if self.has_demand():
            self._opener.open()
        if host.queue.number == 0:
            await self.dead_letters.start()

    async def hand_over(self, host: QueueHost) -> None:
        """Give a queue up, in order; nothing that is leased is lost. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            await self.dead_letters.stop()
        await host.hand_over(lambda: self.mover.is_publishing(host.broker_queue))

    def lose(self, host: QueueHost) -> None:
        """Another proxy has claimed a queue. Idempotent."""
        self._opener.given_away(host)
        if host.queue.number == 0:
            self._room.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        host.lose()

    async def stop(self) -> None:
        """Answer parked pops empty and give every buffer back. Leases live on in their records. Idempotent."""
        self._closed = True
        self._opener.close()
        self._room.deadlines.cancel(self)
        self._answer_parked()
        await asyncio.gather(self.dead_letters.stop(), *(host.close() for host in self.hosts))
        cluster = self._room.router.cluster
        if cluster is not None:
            for host in self.hosts:
                host.is_owned = False
                cluster.overtaken(host.broker_queue)  # should it still exist, whoever serves it then takes it anew

    async def trim(self) -> None:
        """Forget settled records whose acks the broker has proved. Raises: StateUnavailable."""
        for host in self.hosts:
            await host.trim()

    async def queues_declared(self) -> None:
        """The queues exist again, should they have been gone: the next pop must not be told otherwise.

        What is known of the former ones ends with them. Raises: StateUnavailable.
        """
        for host in self.hosts:
            if host.queue_gone and host.is_owned:
                await host.begin_anew()
        self._opener.reconsider()

    def change_policy(self, policy: Policy) -> None:
        """From now on ``policy`` applies. A pause returns what is buffered; leases live on."""
        self.spec = replace(self.spec, policy=policy)
        if policy.paused:
            for host in self.hosts:
                host.return_buffer()
        elif self._waiters or self._wanted_by:
            for waiter in self._waiters:
                waiter.has_looked = False
            self._opener.open()
            self._serve_soon()

    async def follow(self, spec: GroupSpec) -> None:
        """The catalog says ``spec`` by now. Raises: StateUnavailable."""
        if spec.policy != self.spec.policy:
            self.change_policy(spec.policy)
        if any(host.queue_gone for host in self.hosts):  # whoever created the group again has declared them
            await self.queues_declared()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def parked_pops(self) -> int:
        return len(self._waiters)

    # -- pop ----------------------------------------------------------------------------------------------------

    async def pop(self, request: PopRequest, presence: Presence) -> list[Leased]:
        """Lease up to ``max_messages``. An empty list when the wait ends without one.

        Raises: BrokerUnavailable, StateUnavailable, QueueGone.
        """
        attempt_id = request.attempt_id
        if attempt_id is None:
            return await self._pop(request, presence, None)
        while (running := self._attempt_done.get(attempt_id)) is not None:
            parked = self._attempts.get(attempt_id)
            if parked is not None:
                parked.give_up()  # the repeat takes over: the earlier connection is half-open at best
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
        room = self._room
        short = request.wait_seconds <= 0
        started = room.clock.monotonic()
        deadline = started + (SHORT_POLL_SECONDS_MAX if short else request.wait_seconds)
        lease_id = room.mint_lease_id() if request.group is None else request.group.lease_id
        first = False
        self._note_demand()
        candidates = [] if self._waiters else self._take(request)
        while True:
            while candidates:
                if presence.gone:
                    give_back(candidates)
                    return []
                leased = await self._granter.grant(self.spec, candidates, request, lease_id, attempt_id)
                if leased:
                    return leased
                first = True  # its turn had come, and what it was given was not to be had
                candidates = [] if self._waiters else self._take(request)
            if self._closed or presence.gone:
                return []
            if short and any(host.is_sorting for host in self.hosts):
                deadline = min(room.clock.monotonic() + SHORT_POLL_SECONDS_MAX, started + SORTED_SECONDS_MAX)
            if room.clock.monotonic() >= deadline or (short and not await self._may_get(request)):
                self._raise_if_full(request)
                return []
            waiter = Waiter(request, short=short)
            candidates = await self._park(waiter, deadline, presence, attempt_id, first=first)
            if not candidates:
                self._opener.raise_if_unservable()
                if not short:
                    self._raise_if_full(request)
                    return []

    async def _park(
        self, waiter: Waiter, deadline: float, presence: Presence, attempt_id: str | None, *, first: bool
    ) -> list[Held]:
        """Wait for candidates; an empty list where there are none in time."""
        if len(self._waiters) >= PARKED_MAX:
            raise RetryLater(f"{PARKED_MAX} pops are parked on this subscription already", retry_after_seconds=1.0)
        if waiter.request.by_admin or not self.spec.policy.paused:
            self._opener.open()
            if self._opener.is_hopeless():
                self._opener.raise_if_unservable()
        queues = [self._waiters, self._choosy] if waiter.request.is_choosy else [self._waiters]
        for queue in queues:
            queue[waiter] = None
            if first:
                queue.move_to_end(waiter, last=False)
        self._serve_soon()
        self._room.deadlines.schedule(deadline, waiter)
        if attempt_id is not None:
            self._attempts[attempt_id] = waiter
        presence.on_leave = waiter.give_up
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                give_back(waiter.future.result())
            raise
        finally:
            presence.on_leave = None
            self._waiters.pop(waiter, None)
            self._choosy.pop(waiter, None)
            self._room.deadlines.cancel(waiter)
            self._note_demand()

    def _capacity(self, request: PopRequest) -> int:
        """How many more messages may be handed out now."""
        policy = self.spec.policy
        if policy.paused and not request.by_admin:
            return 0
        if policy.max_in_flight is None or request.by_admin:
            return BATCH_COUNT_MAX
        return policy.max_in_flight - sum(host.tally.out for host in self.hosts)

    def _raise_if_full(self, request: PopRequest) -> None:
        """Raises: TooManyInFlight, where that is why a pop gets nothing."""
        policy = self.spec.policy
        if policy.max_in_flight is not None and not policy.paused and self._capacity(request) <= 0:
            raise TooManyInFlight(
                f"{policy.max_in_flight} messages are in flight, the max_in_flight of this group: "
                "acknowledge some, or raise it",
                retry_after_seconds=1.0,
            )

    async def _may_get(self, request: PopRequest) -> bool:
        """Whether there is something for ``request`` here, or a queue holds messages that are not here yet.

        Opens the queues where needed. Raises: what kept every queue from opening.
        """
        if self._discarder.is_busy():
            return True
        if self._capacity(request) <= 0:
            return False
        self._opener.open()
        await self._opener.attempted(SHORT_POLL_SECONDS_MAX)
        if self._ready.has(request):
            return True
        channels = [host.channel for host in self.hosts if host.channel is not None]
        if not channels:
            self._opener.raise_if_unservable()
        answers = await asyncio.gather(*(channel.backlog() for channel in channels), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PopgateError):
                raise answer
        has_more = any(isinstance(answer, int) and answer > 0 for answer in answers)
        return self._ready.has(request) or self._discarder.is_busy() or has_more

    async def repeated(self, attempt_id: str) -> list[Leased] | None:
        """The messages and receipts of an earlier attempt, fetched again from the broker where they are not here; None
        where it has none, or no more.

        Raises: StateUnavailable, also while they are on their way.
        """
        leases = await self._room.leases.find_attempt(self.name, attempt_id)
        if not leases:
            return None
        wall = self._room.clock.wall()
        by_queue = {host.broker_queue: host for host in self.hosts}
        wanted: list[tuple[Held, AttemptLease]] = []
        elsewhere: list[tuple[QueueHost, AttemptLease]] = []
        for lease in leases:
            host = by_queue.get(lease.queue)
            if host is None:
                continue
            if not host.is_owned:
                elsewhere.append((host, lease))
                continue
            if lease.copy_id.startswith(TRANSIENT_PREFIX) and lease.copy_id not in host.held:
                continue  # an unidentified message's lease has ended with its channel
            held = host.attach(lease.copy_id, lease.record, lease.remaining_seconds)
            if held is not None:
                wanted.append((held, lease))
        if not await self.bring_back([held for held, _ in wanted]):
            raise StateUnavailable("the messages of this attempt are on their way back from the broker")
        found = await self.fetch([LearnedRecord(*lease) for _, lease in elsewhere])
        repeated = [
            self._granter.leased(held.host.queue, held.copy_id, held, held.message, wall + lease.remaining_seconds)
            for held, lease in wanted
            if held.message is not None and held.lease_id == lease.record.lease_id
        ]
        for host, lease in elsewhere:
            message = found.get((lease.queue, lease.copy_id))
            if message is not None:
                until = wall + lease.remaining_seconds
                repeated.append(self._granter.leased(host.queue, lease.copy_id, lease.record, message, until))
        return repeated

    # -- the queues -----------------------------------------------------------------------------------------------

    async def bring_back(self, many: Sequence[Held]) -> bool:
        """Fetch the bodies of leased messages that are not here. False where they didn't come in time."""
        return await self._retrieval.bring_back(many)

    async def fetch(self, leases: Sequence[LearnedRecord]) -> dict[tuple[BrokerQueue, CopyId], Message]:
        """The messages of leases in queues that other proxies own. Raises: StateUnavailable while they are on their
        way."""
        return await self._room.router.fetch(self.name, leases)

    def ask(self) -> None:
        """Somebody needs what the queues hold: keep them open and flowing."""
        self._note_demand()
        self._opener.open()
        for host in self.hosts:
            host.supply.starve()

    def _note_demand(self) -> None:
        self._last_demand = self._room.clock.monotonic()
        if self.timer == NEVER:
            self._room.deadlines.schedule(self._last_demand + self._room.options.idle_return_seconds, self)

    def has_demand(self) -> bool:
        now = self._room.clock.monotonic()
        idle = now - self._last_demand
        if self._closed or (self.spec.policy.paused and not any(waiter.request.by_admin for waiter in self._waiters)):
            return False
        if self._waiters or idle < self._room.options.idle_return_seconds:
            return True
        return any(until > now for until in self._wanted_by.values())

    def wanted_by(self, member: InstanceId, seconds: float, since: int) -> bool:
        """Another proxy has pops for this subscription: whether there is something for it now. Otherwise it is told
        (``Cluster``), once, as soon as there is."""
        self.ask()
        if self.arrivals > since and self.can_give():
            return True
        self._wanted_by[member] = self._room.clock.monotonic() + seconds
        return False

    def can_give(self, request: PopRequest = _ANY) -> bool:
        """Whether ``request`` would get something at once."""
        return self._capacity(request) > 0 and self._ready.has(request)

    def _tell_who_wants(self) -> None:
        """Messages are left over when all who are parked here have been served."""
        if self.can_give():
            now = self._room.clock.monotonic()
            wanted_by, self._wanted_by = self._wanted_by, {}
            for member, until in wanted_by.items():
                if until > now:
                    self._room.router.tell_available(member, self.name)

    def due(self, now: float) -> float | None:
        """The idle timer: without demand the buffers go back to the broker."""
        idle_seconds = self._room.options.idle_return_seconds
        if self.has_demand():
            return now + idle_seconds if self._waiters else self._last_demand + idle_seconds
        for host in self.hosts:
            host.return_buffer()
        return now + idle_seconds if any(host.listener is not None for host in self.hosts) else None

    def host_lost(self, host: QueueHost) -> None:
        if host.queue.number == 0 and not host.is_owned:
            self._room.background.spawn(self.dead_letters.stop(), name=f"leave {self.layout.dead}")
        if self.has_demand():
            self._opener.open()

    def _answer_parked(self) -> None:
        for waiter in self._waiters:
            waiter.give_up()

    # -- ready messages -------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def became_ready(self, held: Sequence[Held]) -> None:
        most = self.spec.policy.max_deliveries
        exhausted: list[Held] = []
        for one in held:
            if most is not None and one.delivery_count >= most:
                exhausted.append(one)
            elif self._ready.offer(one) and self._waiters:
                self._fresh.append(one)
        self.arrivals += len(held)
        if exhausted:
            self.mover.start(exhausted)
        if self._waiters or self._wanted_by:
            self._serve_soon()

    def attached(self, held: Sequence[Held]) -> None:
        still = [one for one in held if one.state is HeldState.LEASED or one.state is HeldState.WAITING]
        self._room.journal.record(EventKind.REDELIVERED, self.name, still, self._room.clock.wall())

    def changed(self) -> None:
        self._retrieval.changed()
        if self._waiters:
            self._has_news = True
            self._serve_soon()

    def _serve_soon(self) -> None:
        if not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        has_news, self._has_news = self._has_news, False
        fresh, self._fresh = self._fresh, []
        served = self._served(self._waiters, fresh)
        served += self._served((waiter for waiter in self._choosy if not waiter.future.done()), fresh)
        for waiter in served:
            self._waiters.pop(waiter, None)
            self._choosy.pop(waiter, None)
        if has_news:
            for waiter in self._waiters:
                if waiter.short:
                    waiter.give_up()  # what came was not for it: there may be nothing left to wait for
        if self._wanted_by:
            self._tell_who_wants()

    def _served(self, waiters: Iterable[Waiter], fresh: Sequence[Held]) -> list[Waiter]:
        """Who of ``waiters`` got something, or has given up; up to the first that gets nothing and would take all."""
        served: list[Waiter] = []
        for waiter in waiters:
            request = waiter.request
            if not waiter.future.done():
                candidates = self._take(request, fresh if waiter.has_looked else None)
                if candidates:
                    waiter.future.set_result(candidates)
                elif request.is_choosy:
                    waiter.has_looked = request.matches is not None and self._capacity(request) > 0
                    continue
                else:
                    break
            served.append(waiter)
        return served

    def _take(self, request: PopRequest, fresh: Sequence[Held] | None = None) -> list[Held]:
        """What ``request`` may get of all that is ready, or of what is ``fresh``; now GRANTING."""
        capacity = self._capacity(request)
        if capacity <= 0:
            return []
        count = min(request.max_messages, capacity)
        taken = self._ready.take(request, count) if fresh is None else self._ready.take_of(fresh, request, count)
        if len(taken) < count:
            for host in self.hosts:
                host.supply.starve()
        return taken

    # -- what the queues report -----------------------------------------------------------------------------------

    def lease_ended(self, held: Held) -> None:
        self._ended.add(held)

    def fewer_out(self) -> None:
        if (self._waiters or self._wanted_by) and self.spec.policy.max_in_flight is not None:
            self._serve_soon()

    def must_move(self, held: Sequence[Held]) -> None:
        """Half-done dead-letterings whose bodies are here."""
        self.mover.start(held)
