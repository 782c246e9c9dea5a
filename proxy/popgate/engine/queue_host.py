"""One queue: where this proxy owns it its channel, what it holds, and the records it must respect.

Theory of operation. The host claims its queue (``claiming``: a new epoch, and the live records), and consumes while
there is demand. A delivery meets its record first (``delivering``); what is neither leased, half-moved nor settled
becomes ready. When the channel ends, deliveries vanish but leases stay: they wait without a tag until the broker
delivers the message again. Nothing here decides who gets a lease; that is the store's conditional write. How much the
broker pushes is ``supply``'s affair. Of a queue that another proxy owns the host knows nothing: what the store says of
its messages goes to that one.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from popgate.domain.errors import QueueGone
from popgate.domain.lease import SETTLED_STATES, LeaseRecord, RecordState
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Layout, LeaseId, QueueId
from popgate.engine.claiming import Claiming
from popgate.engine.delivering import ChannelListener, Deliveries
from popgate.engine.evidence import SettlementEvidence
from popgate.engine.held import Held, HeldState, Tally, cost_of
from popgate.engine.places import Places
from popgate.engine.rehoming import Rehoming
from popgate.engine.returns import BROUGHT_BACK, UNSEEN, Returns
from popgate.engine.room import Room
from popgate.engine.sink import Sink
from popgate.engine.supply import Supply
from popgate.engine.upkeep import Upkeep
from popgate.ports.broker import Channel
from popgate.ports.peers import LearnedRecord
from popgate.runtime.deadlines import NEVER

_log = logging.getLogger(__name__)

WRITTEN_LOOKS_MAX, WRITTEN_LOOK_SECONDS = 500, 0.002
"""How long a queue that is handed over waits for what is being written, and how often it looks. What is written later
meets the next owner's epoch, or the records that it reads then."""


class QueueHost:
    """One queue of a subscription. ``epoch`` is 0 until it is claimed, which it is only while it ``is_owned``; and once
    more when the store has lost its data, until the records are written back.

    ``listener`` is there from the moment a channel is asked for, ``channel`` once it is open.
    """

    def __init__(self, room: Room, layout: Layout, queue: QueueId, sink: Sink) -> None:
        self.queue = queue
        self.broker_queue: BrokerQueue = layout.queues[queue.number]
        self.is_owned = room.router.cluster is None
        self.epoch = 0
        self.held: dict[CopyId, Held] = {}
        self.tally = Tally()
        self.handed_out: dict[CopyId, int] = {}
        """How often, of those that clients had and that the broker has now: what came back is lined up by that."""
        self.moves: dict[CopyId, LeaseRecord] = {}
        """The records of those that are MOVING, as far as they are known."""
        self.stuck: set[CopyId] = set()
        """Messages that popgate can't even dead-letter, because it fails on them: unsettled until the channel ends."""
        self.channel: Channel | None = None
        self.listener: ChannelListener | None = None
        self.lined_up: tuple[ChannelListener, LeaseId] | None = None
        """On which channel all that a pull client has is known to stand in the line."""
        self.evidence = SettlementEvidence()
        self._room = room
        self._layout = layout
        self._sink = sink
        self.returns = Returns(self, sink.has_demand)
        self.supply = Supply(
            room,
            self.broker_queue,
            wanted=sink.has_demand,
            needed=self.returns.needed_count,
            spare=self.returns.spare_unwanted,
            paused=self.returns.shed,
            changed=sink.changed,
        )
        self._places = Places(
            room,
            layout,
            self.held,
            next_sequence=sink.next_sequence,
            is_one_line=sink.is_one_line,
            became_ready=sink.became_ready,
            sorted_out=sink.changed,
            starve=self.supply.starve,
            give_back=self.returns.give_back,
        )
        self._rehoming = Rehoming(
            room, self.broker_queue, self.held, begins=self.returns.note, give_back=self.returns.rehome
        )
        self._deliveries = Deliveries(room, self, self._places, self._rehoming, sink)
        self._closing: asyncio.Task[None] | None = None
        self.claiming = Claiming(room, self, sink.changed)
        self.upkeep = Upkeep(room, self)

    @property
    def queue_gone(self) -> bool:
        """Whether somebody has deleted the queue on the broker."""
        return self.broker_queue in self._room.missing_queues

    @property
    def is_sorting(self) -> bool:
        return self._places.is_sorting

    @property
    def held_bytes(self) -> int:
        return self.supply.held_bytes

    # -- life ---------------------------------------------------------------------------------------------------

    async def take(self) -> None:
        """Own the queue: claim it and load its records. Idempotent. Raises: StateUnavailable."""
        self.is_owned = True
        await self.claiming.claim()

    async def hand_over(self, is_moving: Callable[[], bool]) -> None:
        """Stop handing out, let what is being written be written, and give back the rest in order. Idempotent.

        ``is_moving``: whether dead letters of this queue are being published.
        """
        self.is_owned = False
        channel = self._let_go()
        for _ in range(WRITTEN_LOOKS_MAX):
            if not (is_moving() or self.tally.under_way):
                break
            await asyncio.sleep(WRITTEN_LOOK_SECONDS)
        self._forget_all()
        if self._closing is not None:
            await asyncio.wait({self._closing})
        await self._leave(channel)

    def lose(self) -> None:
        """It belongs to somebody else already. Idempotent."""
        self.is_owned = False
        self._step_down()

    async def open(self) -> None:
        """Consume, if not consuming already. Raises: BrokerUnavailable, StateUnavailable, QueueGone, Conflict."""
        if not self._is_to_open():
            return
        await self.claiming.claim()
        if not self._is_to_open():
            return
        listener = self.listener = ChannelListener(self, self._deliveries)
        prefetch = self.supply.open()
        self._places.begin()
        try:
            if self._closing is not None:  # a queue with one consumer at a time has none only then
                await asyncio.wait({self._closing})
            if self.listener is not listener:  # it was let go meanwhile: nobody would do so again
                return
            channel = await self._room.broker.consume(self.broker_queue, self._layout, prefetch, listener)
        except BaseException as error:
            if self.listener is listener:
                self.listener = None
                self.supply.ended()
            if isinstance(error, QueueGone):
                self._forget_queue()
            raise
        if self.listener is not listener:  # it was closed, or lost, while it was being opened
            await channel.close()
            return
        self.found()
        self.channel = channel
        self.supply.began(channel)
        self._rehoming.began(channel)

    def _is_to_open(self) -> bool:
        return self.listener is None and self.is_owned and not self.claiming.is_lost

    async def close(self) -> None:
        """Stop consuming: the buffer goes back to the queue in order; leases live on in their records. Idempotent."""
        await self._leave(self._let_go())

    async def _leave(self, channel: Channel | None) -> None:
        """Close the channel, should there be one, and let others consume the queue."""
        if channel is not None:
            await channel.close()
        await self._room.broker.let_go(self.broker_queue)

    def step_down(self, epoch: int) -> None:
        """The claim of ``epoch`` was overtaken: let go of everything. Who is alone claims it again with the next
        ``open``; a member of a cluster first has to know that it is the owner."""
        if self.epoch != epoch:
            return
        _log.warning("the queue was claimed by another proxy", extra={"queue": self.broker_queue, "epoch": epoch})
        self._step_down()
        if self._room.router.cluster is not None:
            self.is_owned = False
            self._room.router.cluster.overtaken(self.broker_queue)
        self._sink.host_lost(self)

    def _step_down(self) -> None:
        channel = self._let_go()
        self._forget_all()
        self._closing = self._room.background.spawn(self._leave(channel), name=f"leave {self.broker_queue}")

    def _forget_all(self) -> None:
        self.claiming.given_up()
        self._drop_all()
        self.evidence = SettlementEvidence()

    def channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        """The broker ended the channel; whatever was unsettled comes back on the next one."""
        _log.warning("a channel was lost", extra={"queue": self.broker_queue, "reason": reason})
        self._let_go()
        if queue_gone:
            self._forget_queue()
        self._sink.host_lost(self)

    def _let_go(self) -> Channel | None:
        """The channel is no longer ours; returns it. What is leased stays, without its body: it comes back with one."""
        if self.listener is None:
            return None
        channel, self.channel, self.listener = self.channel, None, None
        self.supply.ended()
        self.stuck.clear()
        self._rehoming.ended()
        unsettled = len(self.evidence.detached)
        transient: list[CopyId] = []
        self._places.dissolve()
        for held in list(self.held.values()):
            unsettled += held.rank != 0
            held.tag = None
            held.rank = 0
            if held.copy_id.startswith(TRANSIENT_PREFIX):
                transient.append(held.copy_id)
                self.drop(held)
            elif held.state in UNSEEN:
                self._drop_until_it_comes(held)
            elif held.state in BROUGHT_BACK:
                self.clear_body(held)
        self.evidence.channel_ended(channel.settled_evidence() if channel is not None else 0, unsettled)
        self.upkeep.forget(transient)
        return channel

    def deliver_again(self) -> None:
        """Let the broker deliver everything anew, and in order, with the next channel. Leases live on in their records,
        but for those of unidentified messages."""
        self.returns.note()
        self._close_soon(self._let_go())

    def _close_soon(self, channel: Channel | None) -> None:
        if channel is not None:
            self._closing = self._room.background.spawn(channel.close(), name=f"close {self.broker_queue}")

    def _forget_queue(self) -> None:
        """The queue was deleted, and its messages with it. Their records stay: should they come, they are fenced."""
        self._room.missing_queues.add(self.broker_queue)
        self._drop_all()
        self.evidence = SettlementEvidence()

    def found(self) -> None:
        """The queue is on the broker, or may be again."""
        self._room.missing_queues.discard(self.broker_queue)

    async def begin_anew(self) -> None:
        """The queue was deleted and declared again: drop what is known of its messages. Raises: StateUnavailable."""
        await self._room.leases.drop_queue(self.broker_queue)
        self._drop_all()
        self.evidence = SettlementEvidence()

    # -- what a record says -------------------------------------------------------------------------------------

    def is_others(self, record: LeaseRecord) -> bool:
        """Whether another proxy owns the queue, which ``record`` may show: then it is let go of."""
        if record.epoch > self.epoch > 0:
            self.step_down(self.epoch)
        return not self.is_owned

    def attach(self, copy_id: CopyId, record: LeaseRecord, remaining_seconds: float) -> Held | None:
        """What is known of a copy, made to conform to its record; None where there is nothing left to know, or another
        proxy owns the queue: that one is told."""
        if self.is_others(record):
            self._room.router.tell(LearnedRecord(self.broker_queue, copy_id, record, remaining_seconds))
            return None
        held = self.held.get(copy_id)
        if held is None:
            held = self.held[copy_id] = Held(self, copy_id)
        self.conform(held, record, remaining_seconds)
        return None if held.state is HeldState.DROPPED else held

    def conform(self, held: Held, record: LeaseRecord, remaining_seconds: float) -> None:
        """Make ``held`` what the store says of it, ``remaining_seconds`` having been read before now."""
        if held.state is HeldState.DROPPED:
            return
        if held.lease_id != record.lease_id:
            self.unkeep(held)
            held.lease_id = record.lease_id
            held.epoch = record.epoch
            held.delivery_count = record.delivery_count
            held.first_delivered_at = record.first_delivered_at
            held.leased_at = record.leased_at
            held.client, held.invisibility_seconds = None, 0.0
        if record.state in SETTLED_STATES:
            self.settle([held], record.changed_at)
        elif record.state is RecordState.MOVING:
            self.begin_move(held, record)
            if held.tag is not None:
                self._sink.must_move([held])
        elif remaining_seconds > 0.0:
            held.state = HeldState.LEASED if record.state is RecordState.LEASED else HeldState.WAITING
            self.hold_until(held, self._room.clock.monotonic() + remaining_seconds)
            if held.state is HeldState.WAITING:
                self.unkeep(held)
                self._sink.fewer_out()
            else:
                self._sink.leased(held)
        elif record.state is RecordState.LEASED:
            held.state = HeldState.LEASED
            held.deadline = self._room.clock.monotonic()
            self._sink.lease_ended(held)
        else:
            self.make_ready([held])

    def begin_move(self, held: Held, record: LeaseRecord) -> None:
        """The store says that it is on its way to the dead letters."""
        held.state = HeldState.MOVING
        self.moves[held.copy_id] = record

    def hold_until(self, held: Held, deadline: float) -> None:
        held.deadline = deadline
        if deadline < held.timer:
            self._room.deadlines.schedule(deadline, held)

    def deadline_passed(self, held: Held) -> None:
        if held.state is HeldState.LEASED:
            self._sink.lease_ended(held)
        else:
            self.make_ready([held])

    def make_ready(self, many: Iterable[Held]) -> None:
        """Offer messages to the next pop. Those that the broker holds will be offered when it delivers them."""
        ready: list[Held] = []
        for held in many:
            if held.state is HeldState.DROPPED:
                continue
            held.deadline = NEVER
            self.unkeep(held)
            if held.tag is None:
                if held.rank:
                    held.state = HeldState.RETURNING
                else:
                    self._drop_until_it_comes(held)
            elif held.message is None:
                self.returns.give_back(held)
            else:
                held.state = HeldState.READY
                ready.append(held)
        if ready:
            self._sink.became_ready(ready)

    def settle(self, many: Iterable[Held], settled_at: float) -> None:
        """The store settled these: ack them at the broker, now or when they come back."""
        tags: list[int] = []
        for held in many:
            if held.state is HeldState.DROPPED:
                continue
            if held.tag is not None:
                tags.append(held.tag)
            else:
                self.settle_unknown(held.copy_id, settled_at)
            self.drop(held)
        self.ack(tags, settled_at)
        self._sink.fewer_out()

    def settle_unknown(self, copy_id: CopyId, settled_at: float) -> None:
        """The store settled a copy that is not held here: it is acked when the broker delivers it."""
        self.handed_out.pop(copy_id, None)
        if self.is_owned and not self.queue_gone and not copy_id.startswith(TRANSIENT_PREFIX):  # those will never come
            self.evidence.detached[copy_id] = settled_at

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def return_buffer(self) -> None:
        """Nobody asks: give the buffer back, should there be one. Leases of unidentified messages would end with the
        channel, so for their sake single messages go back instead."""
        if self.channel is None or (self.held and not any(self.tally.all(state) for state in UNSEEN)):
            return
        if any(
            held.copy_id.startswith(TRANSIENT_PREFIX)
            for held in self.held.values()
            if held.state is not HeldState.READY
        ):
            self.supply.pause()
            return
        self.deliver_again()

    def ack(self, tags: Sequence[int], settled_at: float) -> None:
        if tags and self.channel is not None:
            self.channel.ack(tags)
            self.evidence.sent(len(tags), settled_at)

    def clear_body(self, held: Held) -> None:
        """Forget a body, should it be here."""
        message = held.message
        if message is not None:
            self.unkeep(held)
            held.message = None
            self.supply.freed(cost_of(message))

    def keep(self, held: Held) -> None:
        """Hold on to a leased body, as far as memory allows: it will be read soon, and maybe more than once."""
        message = held.message
        if message is not None and not held.is_kept:
            held.is_kept = self.supply.keep(cost_of(message))

    def unkeep(self, held: Held) -> None:
        """Its lease has ended, or its body goes: from now on it is like all others."""
        if held.is_kept and held.message is not None:
            held.is_kept = False
            self.supply.let_go(cost_of(held.message))

    def drop(self, held: Held) -> None:
        """Forget a message: it is settled, or will come like a new one."""
        if held.tag is not None:
            self.supply.returned(held.tag)
        held.state = HeldState.DROPPED
        held.tag = None
        self.clear_body(held)
        self._room.deadlines.cancel(held)
        self.held.pop(held.copy_id, None)
        self.moves.pop(held.copy_id, None)
        self.stuck.discard(held.copy_id)
        self._places.left(held)

    def _drop_until_it_comes(self, held: Held) -> None:
        if held.delivery_count:
            self.handed_out[held.copy_id] = held.delivery_count
        self.drop(held)

    def _drop_all(self) -> None:
        self.handed_out.clear()
        self._places.dissolve()
        for held in list(self.held.values()):
            self.drop(held)
