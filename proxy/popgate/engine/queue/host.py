"""Hosts one queue of a subscription: owns the queue's claim, its channel and the state of its messages.

Theory of operation. If this proxy owns the queue, the host claims the queue: ``claim`` gets a new epoch and the queue's
lease records from the store. The host consumes the queue while clients want messages. ``state`` makes every decision on
a message. The host carries out the effects: it acks and requeues messages at the broker, and passes all other effects
to the subscription. If the channel ends, its delivery tags become void, but leases remain valid, and the broker
delivers the leased messages again. If another proxy owns the queue, the host has no state of the queue's messages. It
then sends each record that it receives from the store to the owner.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from popgate.domain.dead_letter import bare
from popgate.domain.errors import QueueGone
from popgate.domain.lease import LeaseRecord
from popgate.domain.names import BrokerQueue, CopyId, Layout, QueueId, is_transient, transient_copy_id
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState
from popgate.engine.queue.claim import QueueClaim
from popgate.engine.queue.delivery_guard import DeliveryGuard
from popgate.engine.queue.delivery_renewal import DeliveryRenewal
from popgate.engine.queue.effects import Effects, QueueEvents
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.prefetch_control import PrefetchControl
from popgate.engine.queue.queue_channels import QueueChannels
from popgate.engine.queue.record_loading import heard, learn_all
from popgate.engine.queue.redelivery_order import RedeliveryOrder
from popgate.engine.queue.state import QueueState
from popgate.engine.queue.waiting_since import WaitingSince
from popgate.ports.broker import Channel, Delivery, Listener
from popgate.ports.leases import LoadedRecord
from popgate.ports.peers import LearnedRecord
from popgate.runtime.deadlines import NEVER

_log = logging.getLogger(__name__)

WRITES_LOOKS_MAX, WRITES_LOOK_SECONDS = 500, 0.002
"""Maximum number of checks, and seconds between two checks, whether writes to the store for this queue are in progress.
A handover waits until there are none. A write may still reach the store later. The store refuses this write if the next
owner has claimed the queue. Otherwise the next owner loads the result of the write with the queue's records."""
CONTINUE_SECONDS = 0.001
"""Minimum pause in seconds between two batches of deadlines, so that many deadlines don't block the event loop."""


class QueueHost:
    """Hosts one queue of a subscription on this proxy, whether or not this proxy owns the queue."""

    def __init__(
        self,
        context: EngineContext,
        layout: Layout,
        queue: QueueId,
        events: QueueEvents,
        sequence: Iterator[int],
        lacking: LackingQueues,
    ) -> None:
        self.queue = queue
        self.broker_queue: BrokerQueue = layout.queues[queue.number]
        self.timer = NEVER
        self.pull_order: tuple[Listener, str] | None = None
        """The channel's listener and the pull lease id of the last successful order check, or None.

        The check has shown for this pair that all leased messages are in the queue's chain (``queue_order``).
        """
        self._context = context
        self._events = events
        self._unopened = lacking.unopened
        self._unopened.add(queue.number)
        self.state = QueueState(
            queue.number,
            adopted=layout.adopted,
            budget=context.buffer,
            sequence=sequence,
            mint_transient=lambda: transient_copy_id(context.instance, self.claim.epoch, context.next_transient()),
            lacking=lacking,
        )
        self.claim = QueueClaim(context, queue, self.broker_queue, self.state)
        self._channels = QueueChannels(context, layout, self.broker_queue, self.state.flow)
        self.prefetch = PrefetchControl(context, self.broker_queue, self.state, events, self._do)
        self._order = RedeliveryOrder(context, self.broker_queue, self.state, self.prefetch, self._do)
        self._renewal = DeliveryRenewal(context, self.broker_queue, self.state, self._do)
        self._guard = DeliveryGuard(context.faults, self.broker_queue)
        self.waiting_since = WaitingSince()

    # -- what is known of it ------------------------------------------------------------------------------------

    @property
    def is_owned(self) -> bool:
        return self.claim.is_owned

    @property
    def epoch(self) -> int:
        """The epoch of this proxy's claim; 0 while there is no valid claim. Without one, no message may be leased."""
        return self.claim.epoch

    @property
    def queue_gone(self) -> bool:
        """Whether the queue has been deleted at the broker."""
        return self.broker_queue in self._context.missing_queues

    @property
    def is_ordering(self) -> bool:
        """Whether redelivered messages are not handed out yet, because some of them have not arrived."""
        return self._order.is_awaited

    @property
    def listener(self) -> Listener | None:
        """The listener of the channel. It is set as soon as the host begins to open the channel."""
        return self._channels.listener

    @property
    def channel(self) -> Channel | None:
        """The open channel, or None."""
        return self._channels.present

    def find(self, copy_id: CopyId) -> BufferedMessage | None:
        return self.state.messages.get(copy_id)

    def messages(self) -> Collection[BufferedMessage]:
        """Return all messages of the queue whose state this proxy stores."""
        return self.state.messages.values()

    def has_changed_hands(self, message: BufferedMessage) -> bool:
        """Whether ``message`` was dropped because this proxy lost the queue. The message's lease may still be valid.

        The result is also True if this proxy owns the queue again and has a new object for the same copy.
        """
        return message.state is MessageState.DROPPED and (not self.is_owned or message.copy_id in self.state.messages)

    # -- ownership ----------------------------------------------------------------------------------------------

    async def take(self) -> None:
        """Become the owner of the queue: claim it and load its lease records. Idempotent. Raises: StateUnavailable."""
        self.claim.is_owned = True
        self._unopened.add(self.queue.number)
        await self._claim()

    async def _claim(self) -> None:
        claimed = await self.claim.take()
        if claimed is None:
            return
        self._learn_all(claimed.records)
        if claimed.is_restored:
            effects = Effects()
            effects.has_news = True
            self._events.happened(effects)

    async def hand_over(self, is_moving: Callable[[], bool]) -> None:
        """Release the queue, so that another proxy can claim it. Idempotent.

        Stop handing out messages, wait until the store has answered the writes in progress, and close the channel,
        which returns all unsettled messages to the broker in order. ``is_moving`` returns True while messages of this
        queue are being dead-lettered.
        """
        self.claim.is_owned = False
        channel = self._end_channel()
        for _ in range(WRITES_LOOKS_MAX):
            if not (is_moving() or self.state.counts.undecided):
                break
            await asyncio.sleep(WRITES_LOOK_SECONDS)
        self._forget_all()
        await self._channels.closed()
        await self._channels.leave(channel)

    def lose(self) -> None:
        """Release the queue at once, because another proxy already owns it. Idempotent."""
        self.claim.is_owned = False
        self._step_down()

    def step_down(self, epoch: int) -> None:
        """Release the queue, because another proxy has claimed it with an epoch later than ``epoch``.

        A proxy without a cluster claims the queue again with the next ``open``. A member of a cluster claims it again
        only after the cluster has assigned the queue to this member (``take``).
        """
        if self.epoch != epoch:
            return
        _log.warning("the queue was claimed by another proxy", extra={"queue": self.broker_queue, "epoch": epoch})
        self._step_down()
        if self._context.router.cluster is not None:
            self.claim.is_owned = False
            self._context.router.cluster.ownership.overtaken(self.broker_queue)
        self._events.lost(self.queue.number)

    def _step_down(self) -> None:
        channel = self._end_channel()
        self._forget_all()
        self._channels.close_soon(self._channels.leave(channel))

    def _forget_all(self) -> None:
        self.claim.release()
        self.waiting_since = WaitingSince()
        self._do(self.state.drop_all())

    # -- the channel --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the queue and start to consume it, if this proxy owns it. Idempotent.

        Raises: BrokerUnavailable, StateUnavailable, QueueGone, Conflict.
        """
        if not self._is_to_open():
            return
        await self._claim()
        if not self._is_to_open():
            return
        try:
            channel = await self._channels.open(self.state.open_channel(), self)
        except QueueGone:
            self._forget_queue()
            raise
        if channel is not None:
            self.found()
            for part in (self.prefetch, self._renewal, self._order):
                part.began(channel)

    def _is_to_open(self) -> bool:
        return self.listener is None and self.is_owned and not self.claim.is_lost

    async def close(self) -> None:
        """Stop consuming. The buffered messages return to the queue in order. Leases remain valid. Idempotent."""
        await self._channels.leave(self._end_channel())

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        """See ``Listener``. The broker delivers all unsettled messages again on the next channel."""
        _log.warning("a channel was lost", extra={"queue": self.broker_queue, "reason": reason})
        self._end_channel()
        if queue_gone:
            self._forget_queue()
        self._events.lost(self.queue.number)

    def deliver_again(self) -> None:
        """Close the channel, so that the next channel gets all unsettled messages in order.

        Leases remain valid, except leases of transient messages.
        """
        self.state.deliveries.returns_unseen()
        channel = self._end_channel()
        if channel is not None:
            self._channels.close_soon(channel.close())

    def return_buffer(self) -> None:
        """Return the buffered messages to the broker, because no client wants messages.

        This method closes the channel, unless there are transient messages that may be leased. Their leases would end
        with the channel. In this case, the channel is paused instead, and the ready messages are requeued one by one.
        """
        messages, counts = self.state.messages, self.state.counts
        if self.channel is None or (messages and not any(counts.all(state) for state in UNSEEN)):
            return
        if any(one.is_transient for one in messages.values() if one.state is not MessageState.READY):
            self.prefetch.pause()
            return
        self.deliver_again()

    def _end_channel(self) -> Channel | None:
        """Stop using the channel, and return it (None if it was not open). The caller must close it."""
        if self.listener is None:
            return None
        channel = self._channels.end()
        self._unopened.add(self.queue.number)
        for part in (self.prefetch, self._renewal, self._order):
            part.ended()
        self.waiting_since.returned(self.messages())
        self._do(self.state.end_channel(channel.settled_evidence() if channel is not None else 0))
        return channel

    def _forget_queue(self) -> None:
        """Drop the messages of a queue that was deleted at the broker.

        The records stay in the store, so that a message that still arrives is handled according to its record.
        """
        self._context.missing_queues.add(self.broker_queue)
        self._do(self.state.drop_all())

    def found(self) -> None:
        """Record that the queue is not missing at the broker."""
        self._context.missing_queues.discard(self.broker_queue)

    async def begin_anew(self) -> None:
        """Drop the state and records of a queue that was deleted and declared again. Raises: StateUnavailable."""
        await self._context.leases.drop_queue(self.broker_queue)
        self._do(self.state.drop_all())

    # -- deliveries ---------------------------------------------------------------------------------------------

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """See ``Listener``."""
        if not self._guard.take(deliveries, self):
            self.deliver_again()
            self._events.lost(self.queue.number)

    def take_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """See ``TakesDeliveries``."""
        effects = self.state.deliver(deliveries, self._context.clock.wall())
        self._do(effects)
        self._do(self.state.relieve(effects, has_demand=self._events.has_demand()))
        self._order.arrived()
        self._renewal.arrived()

    def forget_delivery(self, delivery: Delivery) -> None:
        """See ``TakesDeliveries``."""
        self._do(self.state.forget_delivery(delivery.tag))

    def set_aside(self, delivery: Delivery, error: Exception, *, to_move: bool) -> None:
        """See ``TakesDeliveries``."""
        message = bare(delivery.message)
        if not to_move:
            self.state.stuck.add(message.copy_id)
            return
        effects = Effects()
        effects.failed.append((self.state.fail_delivery(delivery, message), error))
        self._do(effects)

    # -- what the store says --------------------------------------------------------------------------------------

    def is_others(self, record: LeaseRecord) -> bool:
        """Whether another proxy owns the queue, or no proxy does.

        If ``record`` has a later epoch than this proxy's claim, release the queue first (``step_down``).
        """
        if record.epoch > self.epoch > 0:
            self.step_down(self.epoch)
        return not self.is_owned

    def learn(self, copy_id: CopyId, record: LeaseRecord, remaining_seconds: float) -> BufferedMessage | None:
        """See ``QueueState.learn``. But if another proxy owns the queue, send it the record, and return None."""
        if self.is_others(record):
            self._context.router.send(LearnedRecord(self.broker_queue, copy_id, record, remaining_seconds))
            return None
        now = self._context.clock.monotonic()
        message, effects = self.state.learn(copy_id, record, remaining_seconds, now)
        self._do(effects)
        return message

    def hear(self, copy_id: CopyId, record: LeaseRecord, remaining_seconds: float) -> BufferedMessage | None:
        """Update this proxy's state of a copy from the copy's record, like ``learn``, except in two cases.

        While a request to the store about the message is in progress, do not change the message, because the store's
        answer will be newer than ``record``. If this proxy has no message for a transient copy id, ignore the record,
        because the message ended with its channel.
        """
        message = self.find(copy_id)
        if message is None and is_transient(copy_id):
            return None
        if message is not None and message.is_undecided:
            return message
        return self.learn(copy_id, record, remaining_seconds)

    def hear_all(self, records: Iterable[LoadedRecord]) -> None:
        """Do the same as ``hear`` for many records."""
        self._learn_all(heard(self.state, records))

    def _learn_all(self, records: Sequence[LoadedRecord]) -> None:
        if any(one.record.epoch > self.epoch for one in records):  # another proxy has claimed the queue
            for one in records:
                self.learn(*one)
        else:
            self._do(learn_all(self.state, records, self._context.clock.monotonic()))

    def conform(self, message: BufferedMessage, record: LeaseRecord, remaining_seconds: float) -> None:
        """See ``QueueState.conform``."""
        self._do(self.state.conform(message, record, remaining_seconds, self._context.clock.monotonic()))

    def were_granted(self) -> None:
        """Watch the deadlines of the leases that ``state`` has just recorded (``QueueState.granted``)."""
        if self.state.deadlines.next_at < self.timer:
            self._context.deadlines.schedule(self.state.deadlines.next_at, self)

    def settle(self, messages: Iterable[BufferedMessage], settled_at: float) -> None:
        """See ``QueueState.settle``."""
        self._do(self.state.settle(messages, settled_at))

    def settle_absent(self, copy_id: CopyId, settled_at: float) -> None:
        """See ``QueueState.settle_absent``. Do nothing if this proxy does not own the queue, or if it was deleted."""
        if self.is_owned and not self.queue_gone:
            self.state.settle_absent(copy_id, settled_at)

    def make_ready(self, messages: Iterable[BufferedMessage]) -> None:
        """See ``QueueState.make_ready``."""
        self._do(self.state.make_ready(messages))

    def forget_records(self, copy_ids: Sequence[CopyId]) -> None:
        """Delete the records of dropped transient messages in the background."""
        self._context.background.spawn(self.claim.forget(copy_ids), name=f"forget {self.broker_queue}")

    def fetch_again(self, messages: Iterable[BufferedMessage]) -> None:
        """See ``QueueState.fetch_again``."""
        self._do(self.state.fetch_again(messages))

    def requeue(self, message: BufferedMessage) -> None:
        """See ``QueueState.requeue``."""
        self._do(self.state.requeue(message))

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _do(self, effects: Effects) -> None:
        """Carry out the effects of a decision of ``state``."""
        state = self.state
        if effects.acks or effects.requeues:
            self._channels.send(effects)
        if effects.forget:
            self.forget_records(effects.forget)
        self._events.happened(effects)
        if state.deadlines.next_at < self.timer:
            self._context.deadlines.schedule(state.deadlines.next_at, self)
        self.prefetch.regulate()

    def due(self, now: float) -> float | None:
        """End leases and delays whose time is over.

        The deadline loop calls this method. Return the time of the next call, or None if no deadline is left.
        """
        self._do(self.state.tick(now))
        again = self.state.deadlines.next_at
        return None if again == NEVER else max(again, now + CONTINUE_SECONDS)
