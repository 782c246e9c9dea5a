"""Stores the state of one queue's messages at this proxy, and makes every decision on these messages.

The code is synchronous, does no I/O and reads no clock. ``buffered`` shows the states of a message in a diagram.
Separate objects store the order of the messages, their deadlines, the memory of their bodies, the prefetch, and the
proof that the broker has applied acks. A method changes the state at once, and returns ``Effects`` that the queue host
must carry out. The store's conditional write, not this module, decides which client gets a lease.

A message that was not delivered on the present channel has no ``tag``. When the channel ends, all tags become void.
Leases and delays remain valid, because they are recorded in the store. Ready messages are dropped: when the broker
delivers such a message again, a new object is created for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from popgate.domain.lease import SETTLED_STATES, LeaseRecord, RecordState
from popgate.domain.message import Message
from popgate.domain.names import CopyId, is_transient
from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.body_memory import BodyMemory
from popgate.engine.queue.buffered import RECOVERABLE, UNSEEN, BufferedMessage, Counts, MessageState, cost_of
from popgate.engine.queue.delivery_counts import DeliveryCounts
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.flow import Flow
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.lease_deadlines import LeaseDeadlines
from popgate.engine.queue.queue_order import QueueOrder
from popgate.engine.queue.settlement_evidence import SettlementEvidence
from popgate.engine.queue.waiting_messages import OldestLease, WaitingMessages
from popgate.ports.broker import Delivery
from popgate.runtime.deadlines import NEVER


class QueueState:
    """The state of queue number ``index``. ``mint_transient`` creates a copy id for a message without a stable id."""

    def __init__(
        self,
        index: int,
        *,
        adopted: bool,
        budget: BufferBudget,
        sequence: Iterator[int],
        mint_transient: Callable[[], CopyId],
        lacking: LackingQueues,
    ) -> None:
        self.messages: dict[CopyId, BufferedMessage] = {}
        self.counts = Counts()
        self.flow = Flow(budget, index, lacking)
        self.memory = BodyMemory(self.flow, self.messages, self.counts)
        self.order = QueueOrder(adopted=adopted, sequence=sequence)
        self.evidence = SettlementEvidence()
        self.deliveries = DeliveryCounts()
        self.deadlines = LeaseDeadlines()
        self.waiting = WaitingMessages(self.messages)
        self.oldest_lease = OldestLease(self.counts, self.deadlines)
        self.moves: dict[CopyId, LeaseRecord] = {}
        """The lease records of the messages in state MOVING."""
        self.stuck: set[CopyId] = set()
        """Messages that popgate can neither process nor dead-letter. They stay unsettled until the channel ends."""
        self._index = index
        self._mint_transient = mint_transient

    @property
    def count_at_broker(self) -> int:
        """Number of messages that this object knows, and that the broker has not delivered on the present channel."""
        return len(self.messages) - self.flow.held_count + len(self.evidence.detached)

    # -- the channel --------------------------------------------------------------------------------------------

    def open_channel(self) -> int:
        """Return the prefetch for a channel that is about to be opened."""
        self.order.begin()
        return self.flow.open()

    def end_channel(self, proved_acks: int) -> Effects:
        """Update the state after the end of the channel. The broker redelivers unsettled messages on the next channel.

        ``proved_acks``: the result of ``Channel.settled_evidence``.
        """
        effects = Effects()
        self.flow.closed()
        self.stuck.clear()
        unsettled = len(self.evidence.detached)
        self.order.dissolve(self.messages.values())
        for message in list(self.messages.values()):
            unsettled += message.rank != 0
            message.tag = None
            message.rank = 0
            if message.is_transient:
                effects.forget.append(message.copy_id)
                self._drop(message, effects)
            elif message.state in UNSEEN:
                self._drop_until_delivered(message, effects)
            elif message.state in RECOVERABLE:
                self.memory.forget(message)
        self.evidence.channel_ended(proved_acks, unsettled)
        return effects

    def drop_all(self) -> Effects:
        """Drop all messages, because this proxy no longer owns the queue, or the queue was deleted."""
        effects = Effects()
        self.deliveries.remembered.clear()
        self.order.dissolve(self.messages.values())
        for message in list(self.messages.values()):
            self._drop(message, effects)
        self.waiting.clear()
        self.evidence = SettlementEvidence()
        return effects

    # -- what the broker delivers -------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[Delivery], wall: float) -> Effects:
        """Buffer deliveries of the present channel, which must be in queue order. ``wall``: the present Unix time.

        A delivery is only acked if its message is already settled, or was already delivered on this channel. A leased
        or delayed message stays leased or delayed. If the move of a message to the dead-letter queue has begun, the
        move continues. All other messages become ready. If this method raises an error, no delivery is acked.
        """
        effects = Effects()
        came: list[BufferedMessage] = []
        settled: dict[CopyId, int] = {}
        repeated: list[int] = []
        for delivery in deliveries:
            tag, copy_id = delivery.tag, delivery.message.copy_id
            if not delivery.identified:
                copy_id = self._mint_transient()
            message = self.messages.get(copy_id)
            if message is not None and message.tag is not None:
                self.flow.skipped(tag)
                repeated.append(tag)  # a second copy with the same id, for example of a repeated dead-lettering
                continue
            if copy_id in self.evidence.detached:
                self.flow.skipped(tag)
                if copy_id in settled:
                    repeated.append(tag)
                else:
                    settled[copy_id] = tag
                continue
            came.append(self._take(delivery, copy_id, message, wall, effects))
        for copy_id, tag in settled.items():
            self._ack([tag], self.evidence.detached.pop(copy_id), effects)
        effects.acks += repeated
        self.evidence.sent_for_nothing(len(repeated))
        for message in came:
            if message.state is MessageState.READY:
                effects.ready.append(message)
            elif message.state is MessageState.MOVING:
                effects.moves.append(message)
            else:
                effects.redelivered.append(message)
        effects.ready = list(dict.fromkeys(effects.ready))  # a message may also have become a head in this call
        self.flow.note()
        effects.has_news = True
        return effects

    def _take(
        self, delivery: Delivery, copy_id: CopyId, message: BufferedMessage | None, wall: float, effects: Effects
    ) -> BufferedMessage:
        delivered, tag = delivery.message, delivery.tag
        if message is None:
            message = self.messages[copy_id] = BufferedMessage(self.counts, self._index, copy_id)
            message.delivery_count = self.deliveries.remembered.pop(copy_id, 0)
        elif message.state is MessageState.REQUEUED:
            message.enter(MessageState.READY)
        else:
            self.memory.forget(message)
        message.tag = tag
        if not delivery.identified:
            message.earlier_deliveries = self.deliveries.of_unidentified(delivery)
        if not message.rank:
            self._offer_heads(self.order.place(message, delivery, wall, self.messages.values()), effects)
        message.message, message.cost = delivered, cost_of(delivered)
        self.flow.took(tag, message.cost)
        return message

    def fail_delivery(self, delivery: Delivery, bare: Message) -> BufferedMessage:
        """Buffer and return ``bare`` instead of a message that popgate fails to process, to dead-letter it."""
        copy_id = bare.copy_id if delivery.identified else self._mint_transient()
        message = self.messages[copy_id] = BufferedMessage(self.counts, self._index, copy_id)
        message.tag, message.message, message.cost = delivery.tag, bare, cost_of(bare)
        self.flow.took(delivery.tag, message.cost)
        self.flow.note()
        return message

    def forget_delivery(self, tag: int) -> Effects:
        """Drop the message of a delivery that was only partly processed because of an error."""
        effects = Effects()
        for message in [message for message in self.messages.values() if message.tag == tag]:
            if message.message is None:
                message.tag = None  # the flow has not counted this delivery yet
            self._drop(message, effects)
        return effects

    def order_redelivered(self, backlog: int) -> Effects | None:
        """Insert the redelivered messages into the queue's order. Return None if not all have arrived yet.

        ``backlog``: see ``Channel.backlog``.
        """
        requeued = sum(message.tag is None and message.rank != 0 for message in self.messages.values())
        if backlog > requeued:
            return None
        effects = Effects()
        self._offer_heads(self.order.order_redelivered(self.messages.values()), effects)
        effects.has_news = True
        return effects

    def _offer_heads(self, heads: Iterable[BufferedMessage], effects: Effects) -> None:
        """Offer the ready messages among ``heads``, which are now the first ones of their ordering keys.

        Requeue those without a body, so that the broker delivers them again.
        """
        for message in heads:
            if message.state is MessageState.READY:
                if message.message is None:
                    self._requeue(message, effects)
                else:
                    effects.ready.append(message)

    # -- what the store says --------------------------------------------------------------------------------------

    def learn(
        self, copy_id: CopyId, record: LeaseRecord, remaining_seconds: float, now: float
    ) -> tuple[BufferedMessage | None, Effects]:
        """Update a copy like ``conform``. Return the buffered message, or None if the update has dropped it."""
        message, effects = self.known(copy_id), Effects()
        self.apply(message, record, now + remaining_seconds, now, effects)
        return None if message.state is MessageState.DROPPED else message, effects

    def known(self, copy_id: CopyId) -> BufferedMessage:
        """Return the buffered message of a copy. If there is none, create one, which has no delivery yet."""
        message = self.messages.get(copy_id)
        if message is None:
            message = self.messages[copy_id] = BufferedMessage(self.counts, self._index, copy_id)
        return message

    def conform(self, message: BufferedMessage, record: LeaseRecord, remaining_seconds: float, now: float) -> Effects:
        """Update ``message`` from its record in the store.

        ``remaining_seconds``: the time until the record's lease or delay ends, read from the store before ``now``.
        """
        effects = Effects()
        if message.state is not MessageState.DROPPED:
            self.apply(message, record, now + remaining_seconds, now, effects)
        return effects

    def apply(
        self, message: BufferedMessage, record: LeaseRecord, deadline: float, now: float, effects: Effects
    ) -> None:
        """Update a message that is not dropped, like ``conform``, and add the effects to ``effects``.

        ``deadline``: the monotonic time at which the record's lease or delay ends.
        """
        if message.lease_id != record.lease_id:
            self.memory.unkeep(message)
            message.adopt(record)
            message.client, message.invisibility_seconds = None, 0.0
        state = record.state
        if state is RecordState.LEASED:
            message.enter(MessageState.LEASED)
            if deadline > now:
                self.deadlines.hold_until(message, deadline)
                effects.leased.append(message)
            else:
                message.deadline = now
                effects.expired.append(message)
        elif state in SETTLED_STATES:
            self._settle([message], record.changed_at, effects)
        elif state is RecordState.MOVING:
            self.begin_move(message, record)
            if message.tag is not None:
                effects.moves.append(message)
        elif deadline > now:
            message.enter(MessageState.DELAYED)
            self.waiting.returned(message)
            self.deadlines.hold_until(message, deadline)
            self.memory.unkeep(message)
            effects.has_fewer_out = True
        else:
            self._make_ready(message, effects)

    def granted(self, message: BufferedMessage, record: LeaseRecord, deadline: float) -> bool:
        """Record that the store has leased ``message`` until ``deadline``. Return False if the message was dropped."""
        message.adopt(record)
        if message.state is MessageState.DROPPED:
            return False
        message.enter(MessageState.LEASED)
        self.deadlines.hold_until(message, deadline)
        return True

    def begin_move(self, message: BufferedMessage, record: LeaseRecord) -> None:
        """Record that ``message`` is being moved to the dead-letter queue. ``record`` contains the move's target."""
        message.enter(MessageState.MOVING)
        self.moves[message.copy_id] = record

    def settle(self, messages: Iterable[BufferedMessage], settled_at: float) -> Effects:
        """Ack messages that the store has settled. A message without a delivery is acked when it is redelivered.

        ``settled_at``: the Unix time of the earliest of these settlements, or an earlier time.
        """
        effects = Effects()
        self._settle(messages, settled_at, effects)
        return effects

    def settle_absent(self, copy_id: CopyId, settled_at: float) -> None:
        """Record that the store has settled a copy without a delivery on this channel. Its next delivery is acked."""
        self.deliveries.remembered.pop(copy_id, None)
        if not is_transient(copy_id):  # a transient copy is never delivered again under its id
            self.evidence.detached[copy_id] = settled_at

    def _settle(self, messages: Iterable[BufferedMessage], settled_at: float, effects: Effects) -> None:
        tags: list[int] = []
        for message in messages:
            if message.state is MessageState.DROPPED:
                continue
            if message.tag is not None:
                tags.append(message.tag)
            else:
                self.settle_absent(message.copy_id, settled_at)
            self._drop(message, effects)
        self._ack(tags, settled_at, effects)
        effects.has_fewer_out = True

    def _ack(self, tags: Sequence[int], settled_at: float, effects: Effects) -> None:
        if tags:
            effects.acks += tags
            self.evidence.sent(len(tags), settled_at)

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Effects:
        """End the delays and leases whose time is over at ``now``.

        Messages become ready when their delay has ended. Messages with expired leases are returned in the effects.
        """
        effects = Effects()
        for message in self.deadlines.due(now):
            if message.state is MessageState.LEASED:
                effects.expired.append(message)
            else:
                self._make_ready(message, effects)
        return effects

    # -- back to the ready, or to the broker ----------------------------------------------------------------------

    def make_ready(self, messages: Iterable[BufferedMessage]) -> Effects:
        """Offer messages to the next pop. A message that the broker must redeliver is offered after its redelivery."""
        effects = Effects()
        for message in messages:
            if message.state is not MessageState.DROPPED:
                self._make_ready(message, effects)
        return effects

    def _make_ready(self, message: BufferedMessage, effects: Effects) -> None:
        message.deadline = NEVER
        self.waiting.returned(message)
        self.memory.unkeep(message)
        if message.tag is None:
            if message.rank:
                message.enter(MessageState.REQUEUED)
            else:
                self._drop_until_delivered(message, effects)
        elif message.message is None:
            self._requeue(message, effects)
        else:
            message.enter(MessageState.READY)
            effects.ready.append(message)

    def requeue(self, message: BufferedMessage) -> Effects:
        """Requeue one message at the broker, which delivers it again, to the same place in the order.

        A transient message is dropped instead, because its next delivery is a new message.
        """
        effects = Effects()
        self._requeue(message, effects)
        return effects

    def _requeue(self, message: BufferedMessage, effects: Effects) -> None:
        tag = message.tag
        if tag is None:
            return
        if message.is_transient:
            effects.forget.append(message.copy_id)
            self._drop(message, effects)
        else:
            message.enter(MessageState.REQUEUED)
            self._detach(message, tag)
        effects.requeues.append(tag)

    def fetch_again(self, messages: Iterable[BufferedMessage]) -> Effects:
        """Requeue messages whose bodies were dropped from memory, to get the bodies again. No state changes."""
        effects = Effects()
        for message in messages:
            tag = message.tag
            if tag is not None and message.message is None:
                self._detach(message, tag)
                effects.requeues.append(tag)
        return effects

    def renew_delivery(self, message: BufferedMessage) -> Effects:
        """Requeue a message, because the broker would end the channel if the message stayed unsettled on it.

        A ready or transient message is requeued as by ``requeue``. Any other message keeps its state.
        """
        if message.state in UNSEEN or message.is_transient:
            return self.requeue(message)
        self.memory.forget(message)
        return self.fetch_again([message])

    def _detach(self, message: BufferedMessage, tag: int) -> None:
        self.memory.forget(message)
        self.flow.returned(tag)
        message.tag = None

    # -- memory -----------------------------------------------------------------------------------------------------

    def relieve(self, arrived: Effects, *, has_demand: bool) -> Effects:
        """Free memory after a delivery (``BodyMemory.relieve``). If that is not enough, return ready messages to the
        broker (``shed``). ``arrived``: the effects of the delivery.
        """
        return self.shed(has_demand=has_demand) if self.memory.relieve(arrived) else Effects()

    def shed(self, *, has_demand: bool) -> Effects:
        """Requeue ready messages that must not stay in memory while the channel is paused (``BodyMemory.surplus``)."""
        effects = Effects()
        surplus = self.memory.surplus(has_demand=has_demand)
        if surplus:
            self.deliveries.returns_unseen()
        for message in surplus:
            self._requeue(message, effects)
        return effects

    # -- the end of a message ---------------------------------------------------------------------------------------

    def _drop(self, message: BufferedMessage, effects: Effects) -> None:
        """Drop a buffered message. If the broker delivers its copy again, a new object is created."""
        if message.tag is not None:
            self.flow.returned(message.tag)
        message.enter(MessageState.DROPPED)
        message.tag = None
        self.memory.forget(message)
        self.deadlines.cancel(message)
        self.messages.pop(message.copy_id, None)
        self.moves.pop(message.copy_id, None)
        self.stuck.discard(message.copy_id)
        following = self.order.remove(message)
        if following is not None:
            self._offer_heads([following], effects)

    def _drop_until_delivered(self, message: BufferedMessage, effects: Effects) -> None:
        self.deliveries.remember(message)
        self._drop(message, effects)
