"""One subscription: serves the pops of a group from its queues.

Theory of operation. Ready messages of all queues stand in one heap, oldest first. A pop takes candidates from it,
leases them in one conditional write, and answers with those that were granted; what the store says of the others
(held, settled, exhausted, half-moved) is applied to them. A pop that finds nothing parks; parked pops are served in the
order they came. Between two awaits everything here changes synchronously, so no locks are needed.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from popgate.domain.errors import PopgateError, QueueGone, RetryLater, StateUnavailable
from popgate.domain.lease import GrantStatus, SettleAction
from popgate.domain.message import Message
from popgate.domain.names import Layout, LeaseId
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.domain.topics import GroupSpec
from popgate.engine.held import Held, HeldState
from popgate.engine.moves import Mover
from popgate.engine.popping import ANSWER_BYTES_MAX, Leased, PopRequest, Presence, Waiter
from popgate.engine.queue_host import QueueHost
from popgate.engine.room import Room
from popgate.ports.journal import EventKind
from popgate.ports.leases import AttemptLease, GrantEntry, GrantRequest, SettleEntry

SHORT_POLL_SECONDS_MAX = 1.0
"""How long a pop that doesn't want to wait still waits for messages that the broker is known to have."""
ATTEMPT_WAIT_SECONDS = 5.0
"""How long a repeated attempt waits for its messages to come back from the broker."""
OPEN_RETRY_SECONDS = 0.5
PARKED_GRACE_SECONDS = 5.0
"""Pops that are parked when the broker goes away outlive a short absence; those that come meanwhile get 503 at once."""
PARKED_MAX = 10_000


class ServedSubscription:
    """Pops of one (topic, group) on this proxy."""

    def __init__(self, room: Room, spec: GroupSpec, layout: Layout, signer: ReceiptSigner) -> None:
        self.spec = spec
        self.layout = layout
        self.name = spec.subscription
        self.hosts = [QueueHost(room, layout, queue, self) for queue in layout.queue_ids()]
        self.mover = Mover(room, self.name, layout)
        self._room = room
        self._signer = signer
        self._ready: list[tuple[int, Held]] = []
        self._waiters: deque[Waiter] = deque()
        self._sequence = 0
        self._last_demand = float("-inf")
        self._serving = False
        self._ended: list[Held] = []
        self._attempts: dict[str, Waiter | None] = {}
        self._attempt_done: dict[str, asyncio.Future[None]] = {}
        self._arrivals: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._open_errors: dict[int, PopgateError] = {}
        self._reopen_at = float("-inf")
        self._failing_since = float("inf")
        self._closed = False
        self._idle_timer = False

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim the queues and load their records. Raises: StateUnavailable."""
        await self._room.leases.allow_mode(self.name, self.spec.mode_generation)
        for host in self.hosts:
            await host.start()

    async def stop(self) -> None:
        """Answer parked pops empty and give every buffer back. Leases live on in their records. Idempotent."""
        self._closed = True
        for waiter in self._waiters:
            waiter.give_up()
        await asyncio.gather(*(host.close() for host in self.hosts))

    async def trim(self) -> None:
        """Forget settled records whose acks the broker has proved. Raises: StateUnavailable."""
        for host in self.hosts:
            await host.trim()

    @property
    def parked_pops(self) -> int:
        return sum(not waiter.future.done() for waiter in self._waiters)

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
            leases = await self._room.leases.find_attempt(self.name, attempt_id)
            if leases:
                return await self._repeat(leases)
            return await self._pop(request, presence, attempt_id)
        finally:
            del self._attempt_done[attempt_id]
            self._attempts.pop(attempt_id, None)
            done.set_result(None)

    async def _pop(self, request: PopRequest, presence: Presence, attempt_id: str | None) -> list[Leased]:
        room = self._room
        deadline = room.clock.monotonic() + request.wait_seconds
        lease_id = room.mint_lease_id()
        probed = request.wait_seconds > 0
        self._note_demand()
        candidates = [] if self._waiters else self._take(request.max_messages)
        while True:
            while candidates:
                leased = await self._grant(candidates, request, lease_id, attempt_id)
                if leased:
                    return leased
                candidates = [] if self._waiters else self._take(request.max_messages)
            if self._closed or presence.gone:
                return []
            if room.clock.monotonic() >= deadline:
                if probed or not await self._broker_has_more():
                    return []
                deadline = room.clock.monotonic() + SHORT_POLL_SECONDS_MAX
            probed = True
            candidates = await self._park(request.max_messages, deadline, presence, attempt_id)
            if not candidates:
                self._raise_if_unservable()
                return []

    async def _park(self, max_messages: int, deadline: float, presence: Presence, attempt_id: str | None) -> list[Held]:
        if len(self._waiters) >= PARKED_MAX:
            raise RetryLater(f"{PARKED_MAX} pops are parked on this subscription already", retry_after_seconds=1.0)
        if self._open_hosts() is None and all(host.channel is None for host in self.hosts):
            self._raise_if_unservable()
        waiter = Waiter(max_messages, deadline)
        self._waiters.append(waiter)
        for host in self.hosts:
            host.starve()
        self._serve_soon()
        self._room.deadlines.schedule(deadline, waiter)
        if attempt_id is not None:
            self._attempts[attempt_id] = waiter
        presence.on_leave = waiter.give_up
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self._give_back(waiter.future.result())
            raise
        finally:
            presence.on_leave = None

    async def _broker_has_more(self) -> bool:
        """Whether a queue holds messages that are not here yet. Opens the queues where needed.

        Raises: what kept every queue from opening.
        """
        opening = self._open_hosts()
        if opening is not None:
            await asyncio.shield(opening)
        if self._ready:
            return True
        channels = [host.channel for host in self.hosts if host.channel is not None]
        if not channels:
            self._raise_if_unservable()
        backlogs = await asyncio.gather(*(channel.backlog() for channel in channels), return_exceptions=True)
        return bool(self._ready) or any(isinstance(backlog, int) and backlog > 0 for backlog in backlogs)

    async def _grant(
        self, candidates: list[Held], request: PopRequest, lease_id: LeaseId, attempt_id: str | None
    ) -> list[Leased]:
        room = self._room
        policy = self.spec.policy
        invisibility = request.invisibility_seconds or policy.invisibility_seconds
        entries = [
            GrantEntry(held.host.broker_queue, held.host.epoch, held.copy_id, held.earlier_deliveries)
            for held in candidates
        ]
        messages = [held.message for held in candidates]
        try:
            answers = await room.leases.grant(
                GrantRequest(
                    subscription=self.name,
                    lease_id=lease_id,
                    entries=entries,
                    invisibility_seconds=invisibility,
                    max_deliveries=policy.max_deliveries,
                    mode_generation=self.spec.mode_generation,
                    attempt_id=attempt_id,
                )
            )
        except BaseException:
            self._give_back(candidates)
            raise
        now, wall = room.clock.monotonic(), room.clock.wall()
        granted: list[Held] = []
        leased: list[Leased] = []
        exhausted: list[Held] = []
        fenced: list[Held] = []
        for held, message, (status, remaining, record) in zip(candidates, messages, answers, strict=True):
            if record is None:
                fenced.append(held)
            elif held.state is HeldState.DROPPED or message is None:
                continue  # an unidentified message whose channel ended meanwhile: it comes again
            elif status is GrantStatus.GRANTED:
                held.state = HeldState.LEASED
                held.lease_id, held.epoch = record.lease_id, record.epoch
                held.delivery_count, held.first_delivered_at = record.delivery_count, record.first_delivered_at
                held.leased_at = wall
                held.host.hold_until(held, now + remaining)
                granted.append(held)
                leased.append(self._leased(held, message, wall + remaining))
            elif status is GrantStatus.EXHAUSTED:
                held.lease_id, held.delivery_count = record.lease_id, record.delivery_count
                held.first_delivered_at = record.first_delivered_at
                exhausted.append(held)
            else:
                held.host.conform(held, record, remaining)
        if fenced:
            self._step_down(fenced)
        if exhausted:
            self.mover.start(exhausted)
        if granted:
            room.journal.record(EventKind.DELIVERED, self.name, granted, wall)
            for host in {held.host for held in granted}:
                host.spare_bodies([held for held in granted if held.host is host])
        return leased

    def _leased(self, held: Held, message: Message, invisible_until: float) -> Leased:
        receipt = Receipt(held.host.queue, held.lease_id, held.epoch, held.copy_id)
        return Leased(
            message,
            message.message_id or held.copy_id,
            self._signer.sign(receipt),
            held.host.queue.number,
            held.delivery_count,
            held.first_delivered_at,
            invisible_until,
        )

    # -- repeated attempts --------------------------------------------------------------------------------------

    async def _repeat(self, leases: Sequence[AttemptLease]) -> list[Leased]:
        """The messages and receipts of an earlier attempt, fetched again from the broker where they are not here.

        Raises: StateUnavailable while they are on their way.
        """
        clock = self._room.clock
        wall = clock.wall()
        by_queue = {host.broker_queue: host for host in self.hosts}
        wanted: list[tuple[Held, AttemptLease]] = []
        for lease in leases:
            host = by_queue.get(lease.queue)
            if host is None:
                continue
            held = host.held.get(lease.copy_id)
            if held is None:
                held = host.held[lease.copy_id] = Held(host, lease.copy_id)
            if held.lease_id != lease.record.lease_id:
                host.conform(held, lease.record, lease.remaining_seconds)
            wanted.append((held, lease))
        if not await self.bring_back([held for held, _ in wanted]):
            raise StateUnavailable("the messages of this attempt are on their way back from the broker")
        return [
            self._leased(held, held.message, wall + lease.remaining_seconds)
            for held, lease in wanted
            if held.message is not None and held.lease_id == lease.record.lease_id
        ]

    async def bring_back(self, wanted: Sequence[Held]) -> bool:
        """Fetch the messages of leased copies whose bodies are not here. False where they didn't come in time."""
        deadline = self._room.clock.monotonic() + ATTEMPT_WAIT_SECONDS
        self._note_demand()
        for held in wanted:
            if held.message is None:
                held.host.fetch_again(held)
        while any(held.message is None and held.state is not HeldState.DROPPED for held in wanted):
            self._open_hosts()
            for host in self.hosts:
                host.starve()
            if self._arrivals is None:
                self._arrivals = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(max(0.0, deadline - self._room.clock.monotonic())):
                    await asyncio.shield(self._arrivals)
            except TimeoutError:
                return False
        return True

    # -- the queues -----------------------------------------------------------------------------------------------

    def _note_demand(self) -> None:
        self._last_demand = self._room.clock.monotonic()
        if not self._idle_timer:
            self._idle_timer = True
            self._room.deadlines.schedule(self._last_demand + self._room.options.idle_return_seconds, self)

    def has_demand(self) -> bool:
        idle = self._room.clock.monotonic() - self._last_demand
        return not self._closed and (bool(self._waiters) or idle < self._room.options.idle_return_seconds)

    def due(self, now: float) -> float | None:
        """The idle timer: without demand the buffers go back to the broker."""
        if self._closed:
            return None
        if self.has_demand():
            return max(now, self._last_demand) + self._room.options.idle_return_seconds
        for host in self.hosts:
            if host.channel is not None and host.is_hoarding():
                self._room.background.spawn(host.return_buffer(), name=f"return {host.broker_queue}")
        self._idle_timer = any(host.channel is not None for host in self.hosts)
        return now + self._room.options.idle_return_seconds if self._idle_timer else None

    def _open_hosts(self) -> asyncio.Task[None] | None:
        """Begin to consume every queue that is not consumed yet; the running attempt, if any.

        Where the last attempt failed, the next one comes a moment later, however many pops ask for it.
        """
        if self._opening is not None and not self._opening.done():
            return self._opening
        if self._closed or all(host.listener is not None for host in self.hosts):
            return None
        if self._open_errors and self._room.clock.monotonic() < self._reopen_at:
            return None
        self._opening = self._room.background.spawn(self._open_all(), name=f"open {self.name.topic}:{self.name.group}")
        return self._opening

    async def _open_all(self) -> None:
        async def open_one(host: QueueHost) -> None:
            try:
                await host.open()
                self._open_errors.pop(host.queue.number, None)
            except PopgateError as error:
                self._open_errors[host.queue.number] = error

        await asyncio.gather(*(open_one(host) for host in self.hosts))
        now = self._room.clock.monotonic()
        if any(host.channel is not None for host in self.hosts) or not self._open_errors:
            self._failing_since = float("inf")
        else:
            self._failing_since = min(self._failing_since, now)
            if now - self._failing_since >= PARKED_GRACE_SECONDS or all(host.queue_gone for host in self.hosts):
                for waiter in self._waiters:
                    waiter.give_up()
        if self._open_errors:
            self._reopen_at = now + OPEN_RETRY_SECONDS
            if self._waiters:
                self._reopen_later()

    async def queues_declared(self) -> None:
        """The queues exist again, should they have been gone: the next pop must not be told otherwise."""
        if self._opening is not None:
            await asyncio.wait([self._opening])  # it may have looked before they were declared
        for host in self.hosts:
            host.queue_gone = False
        self._open_errors.clear()
        if self.has_demand():
            self._open_hosts()

    def _raise_if_unservable(self) -> None:
        """Raises: why no queue can be consumed, or that one of them is gone."""
        gone = [host.broker_queue for host in self.hosts if host.queue_gone]
        if gone:
            raise QueueGone(f"queue {gone[0]} does not exist on the broker; create the group again to declare it")
        if self._open_errors and all(host.channel is None for host in self.hosts) and not self._closed:
            raise next(iter(self._open_errors.values()))

    def _reopen_later(self) -> None:
        asyncio.get_running_loop().call_later(OPEN_RETRY_SECONDS, self._open_hosts)

    def host_lost(self, host: QueueHost) -> None:
        if self.has_demand():
            self._open_hosts()

    def _step_down(self, fenced: Sequence[Held]) -> None:
        """Another proxy has claimed these queues: whatever we hold is theirs now."""
        self._give_back(fenced)
        for host in {held.host for held in fenced}:
            self._room.background.spawn(host.step_down(), name=f"step down {host.broker_queue}")

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
            else:
                heappush(self._ready, (one.rank, one))
        if exhausted:
            self.mover.start(exhausted)
        if self._waiters:
            self._serve_soon()

    def attached(self, held: Sequence[Held]) -> None:
        self._room.journal.record(EventKind.REDELIVERED, self.name, held, self._room.clock.wall())
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.set_result(None)

    def _serve_soon(self) -> None:
        if not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        waiters = self._waiters
        while waiters:
            if waiters[0].future.done():
                waiters.popleft()
                continue
            candidates = self._take(waiters[0].max_messages)
            if not candidates:
                return
            waiters.popleft().future.set_result(candidates)

    def _take(self, max_messages: int) -> list[Held]:
        """The oldest ready messages, now GRANTING; bounded in number and in bytes of the answer."""
        taken: list[Held] = []
        ready = self._ready
        size = 0
        while ready and len(taken) < max_messages:
            held = ready[0][1]
            message = held.message
            if held.state is not HeldState.READY or message is None:
                heappop(ready)
                continue
            size += len(message.body)
            if taken and size > ANSWER_BYTES_MAX:
                break
            heappop(ready)
            held.state = HeldState.GRANTING
            taken.append(held)
        if len(taken) < max_messages:
            for host in self.hosts:
                host.starve()
        return taken

    def _give_back(self, candidates: Iterable[Held]) -> None:
        for held in candidates:
            if held.state is HeldState.GRANTING:
                held.host.make_ready([held])

    # -- leases that ended ----------------------------------------------------------------------------------------

    def lease_ended(self, held: Held) -> None:
        """A lease ran out. Collected, so that leases that end together cost one write."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._end_leases)
        self._ended.append(held)

    def _end_leases(self) -> None:
        ended = [held for held in self._ended if held.state is HeldState.LEASED]
        self._ended = []
        policy = self.spec.policy
        self._room.journal.record(EventKind.EXPIRED, self.name, ended, self._room.clock.wall())
        delayed: list[Held] = []
        for held in ended:
            if policy.retry.delay_seconds(held.delivery_count) > 0:
                delayed.append(held)
            else:
                held.host.make_ready([held])
        if delayed:
            self._room.background.spawn(self._delay_retries(delayed), name="delay retries")

    async def _delay_retries(self, ended: Sequence[Held]) -> None:
        """Write the retry delay into the records; where the store can't, the messages wait for it."""
        retry = self.spec.policy.retry
        entries = [
            SettleEntry(
                held.host.broker_queue,
                held.copy_id,
                held.lease_id,
                SettleAction.EXPIRE,
                retry.delay_seconds(held.delivery_count),
            )
            for held in ended
        ]
        while True:
            try:
                answers = await self._room.leases.settle(entries)
                break
            except RetryLater as error:
                await asyncio.sleep(error.retry_after_seconds)
        for held, answer in zip(ended, answers, strict=True):
            if answer.record is not None and held.state is HeldState.LEASED:
                held.host.conform(held, answer.record, answer.remaining_seconds)

    def must_move(self, held: Sequence[Held]) -> None:
        """Half-done dead-letterings whose bodies are here."""
        self.mover.start(held)
