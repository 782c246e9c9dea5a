"""A broker's queue and a store of lease records as plain lists, to test a queue's decisions without I/O."""

from dataclasses import dataclass, field
from itertools import count
from random import Random

from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.message import Message
from popgate.domain.names import CopyId, LeaseId, transient_copy_id
from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.buffered import BufferedMessage, MessageState, cost_of
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.state import QueueState
from popgate.engine.queue.waiting_messages import waits_since
from popgate.ports.broker import Delivery

BUDGET_BYTES = 24 * 1_024
ORDER_OF_ARRIVAL = 1_000_000.0
"""Unix seconds at which the first message was published."""


@dataclass
class Copy:
    """One published message, in the view of its broker and its store. ``tag`` None: the broker has it."""

    number: int
    key: str | None
    body: bytes = field(repr=False)
    tag: int | None = None
    was_delivered: bool = False
    record: LeaseRecord | None = None
    is_acked: bool = False
    """Whether it is acked at the broker."""

    @property
    def copy_id(self) -> CopyId:
        return CopyId(f"{self.number:032x}")

    @property
    def is_settled(self) -> bool:
        """Whether it is settled in the store."""
        return self.record is not None and self.record.state is RecordState.ACKED

    def message(self) -> Message:
        return Message(self.copy_id, "", self.body, {}, self.key, ORDER_OF_ARRIVAL + self.number)


@dataclass
class World:
    """``ready``: messages that the state has offered and no pop has taken since. ``handed_out``: in this order."""

    now: float = 0.0
    copies: list[Copy] = field(default_factory=list[Copy])
    ready: dict[CopyId, BufferedMessage] = field(default_factory=dict[CopyId, BufferedMessage])
    handed_out: list[Copy] = field(default_factory=list[Copy])
    is_open: bool = False
    prefetch: int = 0
    first_seen: dict[BufferedMessage, float] = field(default_factory=dict[BufferedMessage, float])
    """Since when each message waits, as it was known when ``look`` first found the message."""

    def __post_init__(self) -> None:
        self._tags, self._leases, transient = count(1), count(1), count(1)
        budget = BufferBudget(BUDGET_BYTES)
        self.state = QueueState(
            0,
            adopted=False,
            budget=budget,
            sequence=count(1),
            mint_transient=lambda: transient_copy_id("i", 1, next(transient)),
            lacking=LackingQueues(budget),
        )

    def copy(self, message: BufferedMessage) -> Copy:
        return self.copies[int(message.copy_id, 16)]

    # -- the broker and the host ------------------------------------------------------------------------------------

    def open(self) -> None:
        self.prefetch = self.state.open_channel()
        self.state.flow.opened()
        self._tags, self.is_open = count(1), True

    def lose_channel(self) -> None:
        self.is_open = False
        for copy in self.copies:
            copy.tag = None
        self.carry_out(self.state.end_channel(0))

    def unsettled(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.tag is not None]

    def undelivered(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.tag is None and not copy.is_acked]

    def deliver(self, count_max: int, shuffled: int) -> None:
        """Push what the prefetch allows: redelivered messages first, in an order that ``shuffled`` chooses."""
        room = min(count_max, self.prefetch - len(self.unsettled()))
        waiting = self.undelivered()
        again = [copy for copy in waiting if copy.was_delivered]
        if shuffled:
            Random(shuffled).shuffle(again)
        deliveries: list[Delivery] = []
        for copy in [*again, *(copy for copy in waiting if not copy.was_delivered)][: max(0, room)]:
            copy.tag = next(self._tags)
            deliveries.append(
                Delivery(
                    tag=copy.tag,
                    message=copy.message(),
                    identified=True,
                    earlier_deliveries=0,
                    returned=copy.was_delivered,
                )
            )
            copy.was_delivered = True
        if deliveries:
            effects = self.state.deliver(deliveries, ORDER_OF_ARRIVAL + len(self.copies))
            self.carry_out(effects)
            self.carry_out(self.state.relieve(effects, has_demand=True))

    def carry_out(self, effects: Effects) -> None:
        by_tag = {copy.tag: copy for copy in self.unsettled()}
        for tag in effects.acks:
            copy = by_tag.pop(tag)
            assert copy.is_settled, "only what the store has settled is acked"
            copy.tag, copy.is_acked = None, True
        for tag in effects.requeues:
            by_tag.pop(tag).tag = None
        for message in effects.ready:
            if message.is_head:  # otherwise it is offered again when it becomes the head of its key
                self.ready[message.copy_id] = message
        if self.state.flow.may_resume:
            self.state.memory.resume(has_demand=True)
        while (prefetch := self.state.flow.next_resize()) is not None:
            self.prefetch = prefetch + len(self.unsettled())
            if not prefetch:
                self.carry_out(self.state.shed(has_demand=True))
        if self.is_open:
            self.order()

    def starve(self) -> None:
        """Simulate pops that want more messages than are here."""
        if self.is_open:
            self.state.memory.widen(has_demand=True)
            self.carry_out(Effects())

    def order(self) -> None:
        if not self.state.order.is_ordered:
            effects = self.state.order_redelivered(len(self.undelivered()))
            if effects is not None:
                self.carry_out(effects)

    # -- the store and its clients ------------------------------------------------------------------------------------

    def offered(self) -> list[BufferedMessage]:
        """Return what a pop may take, oldest first."""
        ready = [one for one in self.ready.values() if one.state is MessageState.READY and one.message is not None]
        return sorted(ready, key=lambda one: one.rank)

    def lease(self, message: BufferedMessage, seconds: float) -> None:
        """Make the store's conditional write, and apply its answer."""
        message.enter(MessageState.GRANTING)
        del self.ready[message.copy_id]
        copy, former = self.copy(message), self.copy(message).record
        assert not copy.is_settled or former is not None
        if former is not None and (copy.is_settled or former.visible_at > self.now):
            self.carry_out(self.state.conform(message, former, max(0.0, former.visible_at - self.now), self.now))
            return
        copy.record = LeaseRecord(
            state=RecordState.LEASED,
            lease_id=LeaseId(f"l{next(self._leases)}"),
            visible_at=self.now + seconds,
            delivery_count=1 if former is None else former.delivery_count + 1,
            first_delivered_at=self.now,
            changed_at=self.now,
            epoch=1,
            leased_at=self.now,
        )
        assert self.state.granted(message, copy.record, self.now + seconds)
        self.handed_out.append(copy)

    def learn(self, copy: Copy) -> None:
        """Pass the record of a copy to the state."""
        assert copy.record is not None
        remaining = 0.0 if copy.is_settled else max(0.0, copy.record.visible_at - self.now)
        _, effects = self.state.learn(copy.copy_id, copy.record, remaining, self.now)
        self.carry_out(effects)

    def settle(self, copy: Copy) -> None:
        assert copy.record is not None
        copy.record = copy.record._replace(state=RecordState.ACKED, changed_at=self.now)
        message = self.state.messages.get(copy.copy_id)
        if message is None:
            self.state.settle_absent(copy.copy_id, self.now)
        else:
            self.carry_out(self.state.settle([message], self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        while self.state.deadlines.next_at <= self.now:
            effects = self.state.tick(self.now)
            self.carry_out(effects)
            self.carry_out(self.state.make_ready(effects.expired))

    # -- what always holds ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Compare what the metrics are told with what a visit of all messages finds."""
        messages = [*self.state.messages.values()]
        for message in messages:
            self.first_seen.setdefault(message, waits_since(message))
        away = (MessageState.LEASED, MessageState.MOVING)
        waiting = [self.first_seen[one] for one in messages if one.state not in away and self.first_seen[one]]
        assert self.state.waiting.oldest_at() == min(waiting, default=None)
        leased = [one.leased_at for one in messages if one.state is MessageState.LEASED]
        assert self.state.oldest_lease.leased_at() == min(leased, default=None)

    def check(self) -> None:
        state, messages = self.state, [*self.state.messages.values()]
        for wanted in MessageState:
            here = [message for message in messages if message.state is wanted]
            if wanted is not MessageState.DROPPED:
                assert state.counts.all(wanted) == len(here)
                assert state.counts.heads(wanted) == sum(message.is_head for message in here)
        bodies = [message.message for message in messages if message.message is not None]
        assert state.flow.held_bytes == sum(map(cost_of, bodies))
        assert state.flow.held_count == len(self.unsettled())
        assert state.count_at_broker == sum(one.tag is None for one in messages) + len(state.evidence.detached)
        for message in messages:
            copy = self.copy(message)
            assert message.tag == copy.tag
            assert message.message is None or message.tag is not None
            if message.state is MessageState.LEASED:
                assert copy.record is not None
                assert message.lease_id == copy.record.lease_id
                assert message.deadline == copy.record.visible_at > self.now
        for copy in self.unsettled():
            assert copy.copy_id in state.messages
        for key in {copy.key for copy in self.copies} - {None}:
            heads = [message for message in messages if message.key == key and message.is_head]
            assert len(heads) <= 1
            if heads and (behind := heads[0].next_of_key()) is not None:
                assert behind.rank >= heads[0].rank, "a key is in the queue's order"
        ready = {one.copy_id for one in self.offered()}
        for message in messages:
            if message.state is MessageState.READY and message.is_head and message.message is not None:
                assert message.copy_id in ready, "what can be handed out is offered"
