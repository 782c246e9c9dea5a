"""Assigns the ready messages of one subscription to parked pops in order of arrival, then to other proxies.

Theory of operation. The queue hosts report messages that have become ready, and pops are parked. In the next turn of
the event loop, all parked pops are served, as far as there are messages for them and the policy allows it. The messages
chosen for a pop (its candidates) become GRANTING, and ``granting`` asks the store to lease them.

While messages arrive densely (``collecting``), the first parked pop that accepts any message waits a short time, until
as many messages are ready as it may take. The pops behind it wait, too. During this wait, the messages stay ready.
After the wait, the policy, the consume mode and the limits at that time decide which messages the pop gets. If the
pop's client has disconnected, the next pop gets the messages. The wait is never prolonged: no pop that can be answered
waits longer than ``COLLECT_SECONDS``. While memory for bodies is short, no pop waits, because memory becomes free only
when messages are handed out.
"""

import asyncio
from collections.abc import Iterable, Sequence

from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import InstanceId
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.body_retrieval import BodyRetrieval
from popgate.engine.lease.discarding import Discarder
from popgate.engine.lease.expired_leases import ExpiredLeases
from popgate.engine.lease.in_flight_limit import InFlightLimit
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_events import PopEvents
from popgate.engine.lease.pop_request import PopRequest, Waiter
from popgate.engine.lease.selection import Basket
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.lease.stale_leases import StaleLeases
from popgate.engine.queue.buffered import RECOVERABLE, BufferedMessage, MessageState
from popgate.engine.queue.effects import Effects
from popgate.engine.subscription import collecting
from popgate.engine.subscription.parked_pops import FreshFor, ParkedPops
from popgate.engine.subscription.ready_messages import ReadyMessages
from popgate.ports.journal import EventKind
from popgate.runtime.deadlines import NEVER

ASKING_PAUSE = 9
"""Length of the pause after comparing filters with messages, as a multiple of the time that the comparison took. It
limits comparisons to a tenth of the process's time, even if each message is compared with thousands of filters."""

_ONE = PopRequest()
_MANY = PopRequest(max_messages=BATCH_COUNT_MAX)


class Serving:
    """Matches the pops of one subscription with the messages of its queues."""

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        mover: Mover,
        retrieval: BodyRetrieval,
        stale_leases: StaleLeases,
    ) -> None:
        self.is_closed = False
        self.parked = ParkedPops()
        self.arrivals = int(context.clock.wall() * 1_000)
        """A count that grows with each message that becomes ready on this proxy, also across restarts. If another proxy
        has received the present count, its pops have already been considered for all messages that are ready."""
        self.discarder = Discarder(context, group, self)
        self.ready = ReadyMessages(self.discarder)
        self.limit = InFlightLimit(context, group, self)
        self._context = context
        self._group = group
        self._mover = mover
        self._retrieval = retrieval
        self._stale_leases = stale_leases
        self._expired = ExpiredLeases(context, group)
        self._fresh: list[BufferedMessage] | None = []
        """Messages to compare with the filters of parked pops in the next serving. None: all ready messages."""
        self._wanted_by: dict[InstanceId, float] = {}
        """Other proxies whose pops wait for messages of this proxy, with the ends of their waits (monotonic)."""
        self._is_due = False
        self._asks_later = False
        """Whether the comparison of filters with messages continues after a pause."""
        self._has_news = False
        self.changes = 0
        """A count that grows when messages arrive, or no longer block other messages."""
        self.timer = NEVER
        """Latest time at which the pop that waits for more messages is served (monotonic)."""
        self._is_collecting = False
        """Whether a pop waits for more messages. All pops behind it wait as well."""
        self._pace = collecting.Pace()

    # -- parked pops ------------------------------------------------------------------------------------------------

    def park(self, waiter: Waiter, *, first: bool) -> None:
        """Park ``waiter`` behind all other pops, or in front of them if ``first`` is True."""
        self.parked.add(waiter, first=first)
        self._has_news |= waiter.changes != self.changes  # messages arrived while the broker was asked
        self._serve_soon()

    def leave(self, waiter: Waiter) -> None:
        """Remove a pop that has stopped waiting. Idempotent."""
        self.parked.remove(waiter)

    def answer_parked(self) -> None:
        """Answer all parked pops without messages."""
        for waiter in self.parked:
            waiter.give_up()

    def mode_changed(self) -> None:
        """Apply a changed consume mode, and end the wait of parked pops that the new mode does not serve."""
        for host in self._group.hosts:
            host.state.order.is_one_chain = self._group.is_pulled
        for waiter in self.parked:
            if not self.is_for(waiter.request):
                waiter.give_up()

    def is_for(self, request: PopRequest) -> bool:
        """Whether the present consume mode serves ``request``."""
        return request.selection.mode in (None, self._group.spec.mode)

    def policy_changed(self) -> None:
        """Discard the estimate of the limit, because the policy has changed."""
        self.limit.changed()

    def look_again(self) -> bool:
        """Offer all ready messages to the waiting pops again, because more pops may get them now.

        Return whether any pop waits.
        """
        self._fresh = None
        return self.serve_waiting()

    def wanted_by(self, member: InstanceId, seconds: float, since: int) -> bool:
        """Return whether a message is ready for the proxy ``member``. If not, notify it once when a message is ready.

        ``since``: the arrival count that ``member`` has already received. After ``seconds``, no notification is sent.
        """
        if self.arrivals > since and self._can_give_to_others(may_wait=True):
            return True
        self._wanted_by[member] = self._context.clock.monotonic() + seconds
        self.limit.look_soon()
        return False

    def is_wanted(self) -> bool:
        """Whether pops of other proxies wait for messages of this proxy."""
        now = self._context.clock.monotonic()
        return any(until > now for until in self._wanted_by.values())

    def is_waited_for(self) -> bool:
        is_wanted = bool(self.parked) or self.is_wanted()
        is_open = self._group.spec.mode is not ConsumeMode.DRAINING and not (
            self.is_closed or self._group.policy.paused
        )
        return is_wanted and is_open and self.ready.has_any()

    def serve_waiting(self) -> bool:
        if self.parked or self._wanted_by:
            self._serve_soon()
            return True
        return False

    # -- their messages -----------------------------------------------------------------------------------------------

    def can_give(self, request: PopRequest = _ONE, wait_until: float = 0.0) -> bool:
        """Whether a pop that may wait until ``wait_until`` would get a message at once."""
        has_something = self.capacity(request) > 0 and request.selection.has(self.ready)
        return has_something and not self._is_collecting and not self._should_wait(request, wait_until)

    def has_plenty(self, request: PopRequest) -> bool:
        """Whether there are ``max_messages`` ready messages for a pop without a filter, and nothing limits it."""
        return (
            self._group.policy.max_in_flight is None
            and not (self.parked or request.selection.is_choosy)
            and self.capacity(request) > 0
            and self.ready.count(request.max_messages) >= request.max_messages
        )

    def capacity(self, request: PopRequest = _ONE) -> int:
        """Return how many more messages may be handed out now.

        If no limit applies, return ``max_messages`` of ``request``.
        """
        policy = self._group.policy
        is_limited = request.selection.is_limited
        if (policy.paused and is_limited) or not self.is_for(request):
            return 0
        if policy.max_in_flight is None or not is_limited:
            return request.max_messages
        return self.limit.left()

    async def raise_if_full(self, request: PopRequest) -> None:
        """Raise TooManyInFlight if the pop gets no message because of ``max_in_flight``.

        Raises: TooManyInFlight, StateUnavailable.
        """
        policy = self._group.policy
        if policy.max_in_flight is not None and not policy.paused and request.selection.is_limited:
            await self.limit.raise_if_full()

    def take_at_once(self, request: PopRequest, wait_until: float) -> list[BufferedMessage]:
        """Do the same as ``take``, but take nothing if other pops are parked or the pop should wait for more."""
        return [] if self.parked or self._should_wait(request, wait_until) else self.take(request)

    def take(self, request: PopRequest, fresh: Iterable[BufferedMessage] | None = None) -> list[BufferedMessage]:
        """Take messages for ``request`` from all ready messages, or only from ``fresh``. They become GRANTING."""
        capacity = self.capacity(request)
        if capacity <= 0:
            return []
        count = min(request.max_messages, capacity)
        basket = Basket(count, request.answer_bytes)
        if fresh is None:
            request.selection.take(self.ready, basket)
        else:
            self.ready.take_of(fresh, basket, request.selection.filter)
        if request.selection.is_limited:
            self.limit.taken(len(basket.taken))
        if len(basket.taken) < count:
            self._group.widen()
        return basket.taken

    def _starve_for_others(self) -> None:
        """Raise the prefetch for pops that wait on other proxies, because leased messages may fill it."""
        if self._wanted_by and self.capacity() > 0 and not self.ready.has_any():
            self._group.widen()

    def _serve_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def due(self, now: float) -> float | None:
        """Serve the parked pops, because the time to wait for more messages is over."""
        self._serve(may_wait=False)
        return None

    def _serve(self, *, may_wait: bool = True) -> None:
        self._is_due = self._is_collecting = False
        turns = self.parked.turns(self._fresh_for_filters())
        for turn in turns:
            waiter = turn.waiter
            if not waiter.future.done():
                any_will_do = not (waiter.short or waiter.request.selection.is_choosy)
                if may_wait and any_will_do and self._collects(waiter.request, waiter.timer):
                    self._is_collecting = True
                    break
                candidates = self.take(waiter.request, turn.fresh)
                if not candidates:
                    continue
                waiter.future.set_result(candidates)
            self.parked.remove(waiter)
            turns.goes_on(turn)
        if self._is_collecting or self.capacity() <= 0:
            self._fresh = None  # not all parked pops with filters were compared
        elif self.parked.has_filters():
            self._group.widen()  # messages that pass no filter must not fill the prefetch
        if self._has_news and not self._is_collecting and not self.parked.has_unasked():
            self._has_news = False
            self.parked.give_up_short()  # these pops got no new message, and more may never arrive
        if self._wanted_by and self._can_give_to_others(may_wait=may_wait):
            self._notify_waiting_proxies()
        self._starve_for_others()
        self.limit.look_soon()

    def _fresh_for_filters(self) -> FreshFor | None:
        """Return for each filter of parked pops the fresh messages that pass it.

        Return None if pops with filters can get no message now.
        """
        fresh, self._fresh = self._fresh, []
        if fresh is None or not self.parked.has_filters():
            self.parked.forget_unasked()
        if not self.parked.has_filters():
            return {}
        if self.capacity() <= 0:
            return None
        if fresh is None:
            fresh = self.ready.offered()
        self.parked.note_fresh(buffered for buffered in fresh if self.ready.can_be_taken(buffered))
        return {} if self._asks_later else self._ask_some()

    def _ask_some(self) -> FreshFor:
        """Compare filters with a limited number of messages. Make the remaining comparisons after a pause."""
        began = self._context.clock.monotonic()
        found = self.parked.next_asked(self.ready)
        if self.parked.has_unasked():
            self._asks_later = True
            pause_seconds = ASKING_PAUSE * (self._context.clock.monotonic() - began)
            asyncio.get_running_loop().call_later(pause_seconds, self._ask_on)
        return found

    def _ask_on(self) -> None:
        self._asks_later = False
        self._serve_soon()

    def _collects(self, request: PopRequest, until: float) -> bool:
        """Return whether a pop must wait for more messages now. If so, start the timer that ends the wait."""
        if self._should_wait(request, until):
            now = self._context.clock.monotonic()
            if self.timer == NEVER:
                self._context.deadlines.schedule(now + collecting.COLLECT_SECONDS, self)
            if now < self.timer < NEVER:
                self._group.widen()  # a low prefetch would delay the messages that the pop waits for
                return True
        self._context.deadlines.cancel(self)
        return False

    def _should_wait(self, request: PopRequest, until: float) -> bool:
        """Whether a pop can be answered in part, and more messages will probably arrive within its wait (``until``).

        A pop that accepts only certain messages never waits for more. No pop waits while memory for bodies is short.
        """
        now = self._context.clock.monotonic()
        if now + collecting.COLLECT_SECONDS >= until or request.selection.is_choosy or not self._pace.expects_more(now):
            return False
        wanted = min(request.max_messages, self.capacity(request))
        return 0 < self.ready.count(wanted) < wanted and not any(
            host.state.flow.is_half_full for host in self._group.constrained()
        )

    def _can_give_to_others(self, *, may_wait: bool) -> bool:
        """Whether messages are left for the pops of other proxies.

        While messages arrive densely, the pops of other proxies also wait for more messages.
        """
        return self.can_give() and not (may_wait and self._collects(_MANY, NEVER))

    def _notify_waiting_proxies(self) -> None:
        now = self._context.clock.monotonic()
        wanted_by, self._wanted_by = self._wanted_by, {}
        for member, until in wanted_by.items():
            if until > now:
                self._context.router.notify_available(member, self._group.name)

    # -- what the queues report -----------------------------------------------------------------------------------

    def happened(self, effects: Effects) -> None:
        """Carry out those effects of a decision about a queue that concern the subscription."""
        if effects.redelivered:
            self._redelivered(effects.redelivered)
        if effects.moves:
            self._mover.start(effects.moves)
        if effects.ready:
            self._became_ready([one for one in effects.ready if one.state is MessageState.READY])
        for message in effects.expired:
            self._expired.add(message)
        if effects.leased:
            self._stale_leases.look_at(effects.leased)
        if effects.has_fewer_out:
            self._fewer_out()
        for message, error in effects.failed:
            self._mover.set_aside(message, error)
        if effects.has_news:
            self.changed()

    def _became_ready(self, messages: Sequence[BufferedMessage]) -> None:
        most = self._group.policy.max_deliveries
        exhausted: list[BufferedMessage] = []
        for one in messages:
            if most is not None and one.delivery_count >= most:
                exhausted.append(one)
            elif self.ready.offer(one) and self._fresh is not None and self.parked:
                self._fresh.append(one)
        self.arrivals += len(messages)
        self._pace.arrived(len(messages), self._context.clock.monotonic())
        if exhausted:
            self._mover.start(exhausted)
        if self.parked or self._wanted_by:
            self._serve_soon()

    def _redelivered(self, messages: Sequence[BufferedMessage]) -> None:
        still = [one for one in messages if one.state in RECOVERABLE]
        self._context.journal.record(EventKind.REDELIVERED, self._group.name, still, self._context.clock.wall())

    def changed(self) -> None:
        self._retrieval.changed()
        self.changes += 1
        if self.parked:
            self._has_news = True
            self._serve_soon()
        else:
            self._starve_for_others()

    def _fewer_out(self) -> None:
        if (self.parked or self._wanted_by) and self._group.policy.max_in_flight is not None:
            self.limit.fewer_out()
            self._serve_soon()


_conforms: type[PopEvents] = Serving
