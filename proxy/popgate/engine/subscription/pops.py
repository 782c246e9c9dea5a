"""Serves the pops of one subscription.

Theory of operation. A pop takes candidates from the ready messages (``serving``), leases them in one conditional write
to the store (``granting``), and returns the leased messages. Each other candidate enters the state of its record in the
store, for example leased by another client, or settled. A pop that finds no message is parked until messages arrive or
its wait time is over. All state of this module changes synchronously, between awaits, so no locks are needed.
"""

import asyncio
from typing import Protocol

from popgate.domain import modes
from popgate.domain.errors import PopgateError, StateUnavailable
from popgate.domain.names import LeaseId
from popgate.domain.topics import GroupSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.granting import Granter, ModeOvertaken
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence, Waiter
from popgate.engine.lease.repeated_attempts import RepeatedAttempts
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.channel_opener import ChannelOpener
from popgate.engine.subscription.serving import Serving

SHORT_POLL_SECONDS_MAX = 1.0
"""Maximum seconds that a pop without a wait time waits for messages that are ready at the broker."""
SORTED_SECONDS_MAX = 10.0
"""Maximum seconds that a pop without a wait time waits until redelivered messages have been put in order."""


class Demanded(Protocol):
    """The part of a served subscription that ``Pops`` uses."""

    def note_demand(self) -> None:
        """Record that a client asks for messages, so that the queues stay open."""
        ...

    async def follow(self, spec: GroupSpec) -> None:
        """Apply ``spec``, the present catalog entry of the group. Raises: StateUnavailable."""
        ...


class Pops:
    """Serves the pops of one subscription (``served``)."""

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        served: Demanded,
        serving: Serving,
        granter: Granter,
        opener: ChannelOpener,
        earlier: RepeatedAttempts,
    ) -> None:
        self._context = context
        self._group = group
        self._served = served
        self._serving = serving
        self._granter = granter
        self._opener = opener
        self._earlier = earlier
        self._attempts: dict[str, Waiter] = {}
        self._attempt_done: dict[str, asyncio.Future[None]] = {}

    async def pop(self, request: PopRequest, presence: Presence) -> list[Leased]:
        """Lease up to ``max_messages`` messages. Return an empty list if the wait ends without a message.

        Raises: BrokerUnavailable, StateUnavailable, QueueGone, WrongMode, TooManyInFlight, TooManyPops.
        """
        attempt_id = request.attempt_id
        if attempt_id is None:
            return await self._pop(request, presence, None)
        while (running := self._attempt_done.get(attempt_id)) is not None:
            parked = self._attempts.get(attempt_id)
            if parked is not None:
                parked.give_up()  # the client repeats this pop, so the earlier connection is probably dead
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
        self._served.note_demand()
        candidates = self._serving.take_at_once(request, started if short else deadline)
        while True:
            while candidates:
                if presence.gone or not self._serving.is_for(request):
                    self._granter.give_back(candidates)
                    break
                leased = await self._grant(candidates, request, lease_id, attempt_id)
                if leased:
                    return leased
                first = True  # the candidates could not be leased: park this pop in front of the others
                candidates = self._serving.take_at_once(request, started if short else deadline)
            self.check_mode(request)
            if self._serving.is_closed or presence.gone:
                return []
            if short and any(host.is_ordering for host in self._group.hosts):
                deadline = min(context.clock.monotonic() + SHORT_POLL_SECONDS_MAX, started + SORTED_SECONDS_MAX)
            changes = self._serving.changes
            if context.clock.monotonic() >= deadline or (short and not await self._may_get(request)):
                await self._serving.raise_if_full(request)
                return []
            waiter = Waiter(request, short=short, changes=changes)
            candidates = await self._park(waiter, deadline, presence, attempt_id, first=first)
            if not candidates:
                self.check_mode(request)
                self._opener.raise_if_unservable()
                if not short:
                    await self._serving.raise_if_full(request)
                    return []

    async def _grant(
        self, candidates: list[BufferedMessage], request: PopRequest, lease_id: LeaseId, attempt_id: str | None
    ) -> list[Leased]:
        """Lease ``candidates``. Return the granted leases.

        Raises: WrongMode if the consume mode has changed so that the granted leases are no longer valid.
        """
        asked = self._group.spec
        try:
            leased = await self._granter.grant(asked, candidates, request, lease_id, attempt_id)
        except ModeOvertaken:
            if self._group.spec.mode_generation == asked.mode_generation:
                await self._catch_up()
            return []
        if not modes.is_good(self._group.spec, lease_id):
            self.check_mode(request)
        return leased

    async def _catch_up(self) -> None:
        """Apply a change of the consume mode that this proxy has missed, from the catalog.

        Raises: StateUnavailable, also if the catalog does not contain the change yet.
        """
        spec, known = await self._context.catalog.group(self._group.name), self._group.spec.mode_generation
        if spec is not None:
            await self._served.follow(spec)
        if self._group.spec.mode_generation == known:
            raise StateUnavailable("the consume mode of this group is being changed")

    def check_mode(self, request: PopRequest) -> None:
        """Raise WrongMode if ``request`` is not allowed in the present consume mode."""
        wanted = request.selection.mode
        if wanted is not None and wanted is not self._group.spec.mode:
            raise modes.wrong_mode(self._group.spec, wanted)

    async def _park(
        self, waiter: Waiter, deadline: float, presence: Presence, attempt_id: str | None, *, first: bool
    ) -> list[BufferedMessage]:
        """Park the pop. Return the candidates that a serving chooses for it, or none if the wait ends first."""
        self.check_mode(waiter.request)
        if not waiter.short:
            self._context.parking.raise_if_full(len(self._serving.parked))
        if not (waiter.request.selection.is_limited and self._group.spec.policy.paused):
            self._opener.open()
            if self._opener.is_hopeless():
                self._opener.raise_if_unservable()
        self._serving.park(waiter, first=first)
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
            self._serving.leave(waiter)
            self._context.deadlines.cancel(waiter)
            self._served.note_demand()

    async def _may_get(self, request: PopRequest) -> bool:
        """Whether a pop without a wait time may soon get a message, and should wait for it briefly.

        This is so if a suitable message is ready on this proxy, or may be among many ready messages, if a queue has
        messages at the broker, or if expired messages are being discarded. Opens the queues if necessary. Raises: the
        error that explains why no queue can be opened.
        """
        if self._serving.discarder.is_busy():
            return True
        if self._serving.capacity(request) <= 0 and (
            self._group.spec.policy.paused or not await self._serving.limit.look()
        ):
            return False
        self._opener.open()
        await self._opener.attempted(SHORT_POLL_SECONDS_MAX)
        is_search_needed = request.selection.filter is not None and self._serving.ready.are_many()
        if is_search_needed or request.selection.has(self._serving.ready):
            return True
        hosts = request.selection.hosts(self._group.hosts)
        channels = [host.channel for host in hosts if host.channel is not None]
        if not channels:
            self._opener.raise_if_unservable()
        answers = await asyncio.gather(*(channel.backlog() for channel in channels), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PopgateError):
                raise answer
        has_more = any(isinstance(answer, int) and answer > 0 for answer in answers)
        return request.selection.has(self._serving.ready) or self._serving.discarder.is_busy() or has_more

    async def repeated(self, attempt_id: str) -> list[Leased] | None:
        """See ``RepeatedAttempts.repeated``."""
        return await self._earlier.repeated(attempt_id)
