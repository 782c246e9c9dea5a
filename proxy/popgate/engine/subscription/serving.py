"""Who gets what is ready of one subscription: parked pops in the order they came, then other proxies that want it.

Owns the ready messages, the parked pops, and the choice of candidates. Theory of operation: a host says what became
ready, a pop parks; with the next turn of the event loop all who wait are served, as far as there is something for them
and the policy lets it go. Candidates are GRANTING then; whether they are leased is ``granting``'s affair.

While messages arrive densely (``collecting``), the first parked pop that takes any message waits a moment for as many
as it may take, and the pops behind it wait, too. The messages stay ready meanwhile: what a pop gets is decided at the
end, by the policy, the consume mode and the limits of that moment, and if its client has gone, the next pop gets them.
The time of that end does not move: no pop that can be answered waits longer than ``COLLECT_SECONDS``. Nothing waits
while memory for bodies is short, because handing messages out is what frees it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import InstanceId
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.discarding import Discarder
from popgate.engine.lease.expired_leases import EndedLeases
from popgate.engine.lease.in_flight_limit import InFlightLimit
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_request import PopRequest, Waiter
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import RECOVERABLE, BufferedMessage, MessageState
from popgate.engine.queue.effects import Effects
from popgate.engine.subscription import collecting
from popgate.engine.subscription.parked_pops import FreshFor, Parked
from popgate.engine.subscription.ready_messages import Ready
from popgate.ports.journal import EventKind
from popgate.runtime.deadlines import NEVER

ASKING_PAUSE = 9
"""How many times as long as filters were asked for fresh messages is the pause before the next ones are: a client with
thousands of filters that have to be compared with each message takes a tenth of the process's time."""

_ANY = PopRequest()
_MANY = PopRequest(max_messages=BATCH_COUNT_MAX)


class Serving:
    """Pops of one subscription and the messages of its queues.

    ``came`` is called when messages came, or may come now; ``met`` is shown what is leased.
    """

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        mover: Mover,
        *,
        came: Callable[[], None],
        met: Callable[[Iterable[BufferedMessage]], None],
    ) -> None:
        self.is_closed = False
        self.parked = Parked()
        self.arrivals = int(context.clock.wall() * 1_000)
        """Grows with every message that becomes ready here, and over restarts: it tells who has looked at all of them
        from who has not."""
        self.discarder = Discarder(context, group, changed=self._changed)
        self.ready = Ready(self.discarder.takes)
        self.limit = InFlightLimit(context, group, is_waited_for=self._is_waited_for, has_room=self._has_room)
        self._context = context
        self._group = group
        self._mover = mover
        self._came = came
        self._met = met
        self._ended = EndedLeases(context, group)
        self._fresh: list[BufferedMessage] | None = []
        """What was offered since parked pops with filters were asked; None: ask them for all that is ready."""
        self._wanted_by: dict[InstanceId, float] = {}
        """Other proxies that have pops for what is ready here, and until when."""
        self._is_due = False
        self._asks_later = False
        """Whether filters wait to be asked for fresh messages."""
        self._has_news = False
        self.changes = 0
        """Grows whenever messages came, or are out of the way."""
        self.timer = NEVER
        """The time at which the pop that waits for more messages is served at the latest."""
        self._is_collecting = False
        """Whether a pop waits for more messages, and all behind it."""
        self._pace = collecting.Pace()

    # -- who waits --------------------------------------------------------------------------------------------------

    def park(self, waiter: Waiter, *, first: bool) -> None:
        """``waiter`` waits, behind all others or in front of them."""
        self.parked.add(waiter, first=first)
        self._has_news |= waiter.changes != self.changes  # some came while the broker was asked
        self._serve_soon()

    def leave(self, waiter: Waiter) -> None:
        """It waits no more. Idempotent."""
        self.parked.remove(waiter)

    def answer_parked(self) -> None:
        """Let all who wait end without anything."""
        for waiter in self.parked:
            waiter.give_up()

    def mode_changed(self) -> None:
        """Another consume mode applies from now on: end the pops that can get nothing any more."""
        for host in self._group.hosts:
            host.state.order.is_one_chain = self._group.is_pulled
        for waiter in self.parked:
            if not self.is_for(waiter.request):
                waiter.give_up()

    def is_for(self, request: PopRequest) -> bool:
        """Whether it can get something in the present consume mode."""
        wanted = ConsumeMode.POP if request.pull is None else ConsumeMode.PULL
        return request.by_admin or self._group.spec.mode is wanted

    def policy_changed(self) -> None:
        """Another policy applies from now on."""
        self.limit.changed()

    def look_again(self) -> bool:
        """What is ready may be for those who could not have it before; whether anybody waits."""
        self._fresh = None
        return self._has_room()

    def wanted_by(self, member: InstanceId, seconds: float, since: int) -> bool:
        """Whether there is something for another proxy now; otherwise it is told, once, as soon as there is."""
        if self.arrivals > since and self._can_give_to_others(may_wait=True):
            return True
        self._wanted_by[member] = self._context.clock.monotonic() + seconds
        self.limit.look_soon()
        return False

    def is_wanted(self) -> bool:
        """Whether other proxies have pops for what is ready here."""
        now = self._context.clock.monotonic()
        return any(until > now for until in self._wanted_by.values())

    def _is_waited_for(self) -> bool:
        """Whether somebody would get what is ready here, did ``max_in_flight`` not keep it back."""
        is_wanted = bool(self.parked) or self.is_wanted()
        is_open = self._group.spec.mode is not ConsumeMode.DRAINING and not (
            self.is_closed or self._group.policy.paused
        )
        return is_wanted and is_open and self.ready.has(_ANY)

    def _has_room(self) -> bool:
        if self.parked or self._wanted_by:
            self._serve_soon()
            return True
        return False

    # -- what they get ------------------------------------------------------------------------------------------------

    def can_give(self, request: PopRequest = _ANY, wait_until: float = 0.0) -> bool:
        """Whether a pop that may wait until then would get something at once."""
        has_something = self.capacity(request) > 0 and self.ready.has(request)
        return has_something and not self._is_collecting and not self._should_wait(request, wait_until)

    def capacity(self, request: PopRequest = _ANY) -> int:
        """How many more messages may be handed out now."""
        policy = self._group.policy
        if (policy.paused and not request.by_admin) or not self.is_for(request):
            return 0
        if policy.max_in_flight is None or request.by_admin:
            return request.max_messages
        return self.limit.left()

    async def raise_if_full(self, request: PopRequest) -> None:
        """Raises: TooManyInFlight, where that is why a pop gets nothing; StateUnavailable."""
        if self._group.policy.max_in_flight is not None and not self._group.policy.paused and not request.by_admin:
            await self.limit.raise_if_full()

    def take_at_once(self, request: PopRequest, wait_until: float) -> list[BufferedMessage]:
        """As ``take``, for a pop that may wait until then: nothing if it should, or if other pops are parked."""
        return [] if self.parked or self._should_wait(request, wait_until) else self.take(request)

    def take(self, request: PopRequest, fresh: Iterable[BufferedMessage] | None = None) -> list[BufferedMessage]:
        """What ``request`` may get of all that is ready, or of what is ``fresh``; now GRANTING."""
        capacity = self.capacity(request)
        if capacity <= 0:
            return []
        count = min(request.max_messages, capacity)
        taken = self.ready.take(request, count) if fresh is None else self.ready.take_of(fresh, request, count)
        if not request.by_admin:
            self.limit.taken(len(taken))
        if len(taken) < count:
            self._starve()
        return taken

    def _starve(self) -> None:
        for host in self._group.hosts:
            host.starve()

    def _serve_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def due(self, now: float) -> float | None:
        """The time to wait for more messages is over."""
        self._serve(may_wait=False)
        return None

    def _serve(self, *, may_wait: bool = True) -> None:
        self._is_due = self._is_collecting = False
        turns = self.parked.turns(self._fresh_for_filters())
        for turn in turns:
            waiter = turn.waiter
            if not waiter.future.done():
                any_will_do = not (waiter.short or waiter.request.is_choosy)
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
            self._fresh = None  # not all with filters were asked
        elif self.parked.has_filters():
            self._starve()  # what no filter wants must not keep back the rest
        if self._has_news and not self._is_collecting and not self.parked.has_unasked():
            self._has_news = False
            self.parked.give_up_short()  # what came was not for them: there may be nothing left to wait for
        if self._wanted_by and self._can_give_to_others(may_wait=may_wait):
            self._tell_who_wants()
        self.limit.look_soon()

    def _fresh_for_filters(self) -> FreshFor | None:
        """Return what parked pops with filters were not asked for yet; None: they can't get anything now."""
        fresh, self._fresh = self._fresh, []
        if fresh is None or not self.parked.has_filters():
            self.parked.forget_unasked()
        if not self.parked.has_filters():
            return {}
        if self.capacity() <= 0:
            return None
        if fresh is None:
            fresh = self.ready.offered()
        self.parked.note_fresh(held for held in fresh if self.ready.can_be_taken(held))
        return {} if self._asks_later else self._ask_some()

    def _ask_some(self) -> FreshFor:
        """Ask as many filters as one serving may, and the next ones after a pause."""
        began = self._context.clock.monotonic()
        found = self.parked.next_asked()
        if self.parked.has_unasked():
            self._asks_later = True
            pause_seconds = ASKING_PAUSE * (self._context.clock.monotonic() - began)
            asyncio.get_running_loop().call_later(pause_seconds, self._ask_on)
        return found

    def _ask_on(self) -> None:
        self._asks_later = False
        self._serve_soon()

    def _collects(self, request: PopRequest, until: float) -> bool:
        """Whether the first pop that takes any message waits for more: at most to the end that was set before."""
        if self._should_wait(request, until):
            now = self._context.clock.monotonic()
            if self.timer == NEVER:
                self._context.deadlines.schedule(now + collecting.COLLECT_SECONDS, self)
            if now < self.timer < NEVER:
                self._starve()  # a narrow window would keep back what it waits for
                return True
        self._context.deadlines.cancel(self)
        return False

    def _should_wait(self, request: PopRequest, until: float) -> bool:
        """Whether a pop that may wait ``until`` then can be answered, but not in full, and more will probably come.

        Pops that take only some of the messages never wait for more, nor does any while memory for bodies is short.
        """
        now = self._context.clock.monotonic()
        if now + collecting.COLLECT_SECONDS >= until or request.is_choosy or not self._pace.expects_more(now):
            return False
        wanted = min(request.max_messages, self.capacity(request))
        return 0 < self.ready.count(wanted) < wanted and not any(
            host.state.flow.is_half_full for host in self._group.hosts
        )

    def _can_give_to_others(self, *, may_wait: bool) -> bool:
        """Whether messages are left over when all who are parked here have been served; their pops collect, too."""
        return self.can_give() and not (may_wait and self._collects(_MANY, NEVER))

    def _tell_who_wants(self) -> None:
        now = self._context.clock.monotonic()
        wanted_by, self._wanted_by = self._wanted_by, {}
        for member, until in wanted_by.items():
            if until > now:
                self._context.router.tell_available(member, self._group.name)

    # -- what the queues report -----------------------------------------------------------------------------------

    def happened(self, effects: Effects) -> None:
        """Carry out what a decision on a queue means for its subscription."""
        if effects.redelivered:
            self._redelivered(effects.redelivered)
        if effects.moves:
            self._mover.start(effects.moves)
        if effects.ready:
            self._became_ready([one for one in effects.ready if one.state is MessageState.READY])
        for message in effects.expired:
            self._ended.add(message)
        if effects.leased:
            self._met(effects.leased)
        if effects.has_fewer_out:
            self._fewer_out()
        for message, error in effects.failed:
            self._mover.set_aside(message, error)
        if effects.has_news:
            self._changed()

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

    def _changed(self) -> None:
        self._came()
        self.changes += 1
        if self.parked:
            self._has_news = True
            self._serve_soon()

    def _fewer_out(self) -> None:
        if (self.parked or self._wanted_by) and self._group.policy.max_in_flight is not None:
            self.limit.fewer_out()
            self._serve_soon()
