"""One owned queue: its channel, what it holds, and the records it must respect.

Theory of operation. The host claims its queue (a new epoch), loads the live records, and consumes while there is
demand. A delivery meets its record first: a leased one is attached to its lease, a half-moved one is finished, a
settled one is acked silently; the rest becomes ready. When the channel ends, deliveries vanish but leases stay: they
wait without a tag until the broker delivers the message again. Nothing here decides who gets a lease; that is the
store's conditional write.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from popgate.domain.errors import PopgateError
from popgate.domain.lease import LeaseRecord, RecordState
from popgate.domain.names import TRANSIENT_PREFIX, BrokerQueue, CopyId, Layout, QueueId
from popgate.engine.evidence import SettlementEvidence
from popgate.engine.held import NEVER, Held, HeldState
from popgate.engine.room import Room
from popgate.engine.window import Window
from popgate.ports.broker import Channel, Delivery

_log = logging.getLogger(__name__)

SETTLED_KEPT_SECONDS = 900.0
"""How long a settled record answers ``already_acked`` (design: section 2)."""
_MICROSECONDS = 1_000_000
_RANK_BITS = 24


class Sink(Protocol):
    """What a host tells its subscription. All synchronous."""

    def next_sequence(self) -> int: ...
    def became_ready(self, held: Sequence[Held]) -> None: ...
    def lease_ended(self, held: Held) -> None: ...
    def must_move(self, held: Sequence[Held]) -> None: ...
    def attached(self, held: Sequence[Held]) -> None: ...
    def host_lost(self, host: "QueueHost") -> None: ...
    def has_demand(self) -> bool: ...


class _ChannelListener:
    """Ties callbacks to one channel: those of an earlier one are ignored."""

    def __init__(self, host: "QueueHost") -> None:
        self._host = host

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        if self._host.listener is self:
            self._host.deliver(deliveries)

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        if self._host.listener is self:
            self._host.channel_lost(reason, queue_gone=queue_gone)


class QueueHost:
    """Owns one queue of a subscription. ``epoch`` is 0 until ``start`` has claimed it."""

    def __init__(self, room: Room, layout: Layout, queue: QueueId, sink: Sink) -> None:
        self.queue = queue
        self.broker_queue: BrokerQueue = layout.queues[queue.number]
        self.epoch = 0
        self.held: dict[CopyId, Held] = {}
        self.channel: Channel | None = None
        self.listener: _ChannelListener | None = None
        self.queue_gone = False
        self.held_bytes = 0
        self.evidence = SettlementEvidence()
        self._room = room
        self._layout = layout
        self._sink = sink
        self._window = Window(room.buffer.share_bytes())
        self._wanted_prefetch = 0
        self._resizing = False
        self._starved_meanwhile = False
        self._credit_used = 0
        self._credit_from_tag = 0
        self._last_tag = 0
        self._last_rank = 0
        self._returning: dict[CopyId, int] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim the queue and load its records. Raises: StateUnavailable."""
        self.epoch = await self._room.leases.claim(self.broker_queue)
        for copy_id, record, remaining in await self._room.leases.load(self.broker_queue):
            held = self.held[copy_id] = Held(self, copy_id)
            self.conform(held, record, remaining)

    async def open(self) -> None:
        """Consume, if not consuming already. Raises: BrokerUnavailable, StateUnavailable, QueueGone, Conflict."""
        if self.channel is not None or self.listener is not None:
            return
        if not self.epoch:
            await self.start()
        listener = self.listener = _ChannelListener(self)
        self._room.buffer.opened(self)
        self._window.share_bytes = self._room.buffer.share_bytes()
        prefetch = self._wanted_prefetch = self._window.restart()
        self._credit_used = self._credit_from_tag = self._last_tag = self._last_rank = 0
        try:
            channel = await self._room.broker.consume(self.broker_queue, self._layout, prefetch, listener)
        except BaseException as error:
            if self.listener is listener:
                self.listener = None
                self._room.buffer.closed(self)
            self.queue_gone = isinstance(error, PopgateError) and error.code == "topic_not_found"
            raise
        if self.listener is not listener:
            await channel.close()
            return
        self.queue_gone = False
        self.channel = channel

    async def close(self) -> None:
        """Stop consuming: the buffer goes back to the queue in order; leases live on in their records. Idempotent."""
        channel = self.channel
        if channel is not None:
            self._let_go()
            await channel.close()

    async def step_down(self) -> None:
        """Our claim was overtaken: let go of everything; the next ``open`` has to claim again."""
        await self.close()
        for held in list(self.held.values()):
            self._drop(held)
        self.epoch = 0

    def channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        """The broker ended the channel; whatever was unsettled comes back on the next one."""
        _log.warning("a channel was lost", extra={"queue": self.broker_queue, "reason": reason})
        self.queue_gone = queue_gone
        self._let_go()
        self._sink.host_lost(self)

    def _let_go(self) -> None:
        channel, self.channel, self.listener = self.channel, None, None
        self._room.buffer.closed(self)
        self._returning.clear()
        unsettled = sum(held.tag is not None for held in self.held.values())
        transient: list[CopyId] = []
        for held in list(self.held.values()):
            held.tag = None
            if held.copy_id.startswith(TRANSIENT_PREFIX):
                transient.append(held.copy_id)
                self._drop(held)
            elif held.state is HeldState.READY:
                self._drop(held)
        self.evidence.channel_ended(channel.settled_evidence() if channel is not None else 0, unsettled)
        if transient:
            self._room.background.spawn(self._forget(transient), name=f"forget {self.broker_queue}")

    async def _forget(self, copy_ids: Sequence[CopyId]) -> None:
        try:
            await self._room.leases.forget(self.broker_queue, copy_ids)
        except PopgateError as error:
            _log.warning("records of ended deliveries stay until the next claim", extra={"error": error.detail})

    # -- deliveries ---------------------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Take deliveries of the present channel, in queue order."""
        ready: list[Held] = []
        attached: list[Held] = []
        moving: list[Held] = []
        again: list[int] = []
        wall = int(self._room.clock.wall() * _MICROSECONDS)
        for delivery in deliveries:
            message = delivery.message
            copy_id = message.copy_id
            if not delivery.identified or copy_id.startswith(TRANSIENT_PREFIX):
                copy_id = CopyId(f"{TRANSIENT_PREFIX}{self._room.instance}.{self.epoch}.{self._room.next_transient()}")
            self._last_tag = delivery.tag
            held = self.held.get(copy_id)
            if held is not None and held.tag is not None:
                again.append(delivery.tag)  # a second copy with the same identity, such as a repeated dead-lettering
                continue
            if copy_id in self.evidence.detached:
                settled_at = self.evidence.detached.pop(copy_id)
                self._ack([delivery.tag], settled_at)
                continue
            self._credit_used += 1
            if held is None:
                held = self.held[copy_id] = Held(self, copy_id)
                ready.append(held)
            else:
                self._clear_body(held)
                (moving if held.state is HeldState.MOVING else attached).append(held)
            held.tag = delivery.tag
            # The broker also counts crashes, hand-overs and resizes: where a record would be, only records count.
            held.earlier_deliveries = 0 if delivery.identified else delivery.earlier_deliveries
            held.message = message
            held.rank = self._rank(copy_id, message.published_at, wall)
            size = len(message.body)
            self.held_bytes += size
            self._window.observe(size)
        if again:
            self._ack(again, self._room.clock.wall())
        if self.held_bytes > self._window.share_bytes:
            self._throttle()
        if attached:
            self._sink.attached(attached)
        if moving:
            self._sink.must_move(moving)
        if ready:
            self._sink.became_ready([held for held in ready if held.state is HeldState.READY])

    def _rank(self, copy_id: CopyId, published_at: float, wall: int) -> int:
        """The place among the ready: queue order within this queue, oldest first across queues.

        Only popgate's own time stamps count, and never a future one, so that no clock starves a queue.
        """
        returning = self._returning.pop(copy_id, None)
        if returning is not None:
            return returning
        moment = wall if self._layout.adopted else min(wall, int(published_at * _MICROSECONDS))
        self._last_rank = max(self._last_rank, moment)
        return (self._last_rank << _RANK_BITS) + (self._sink.next_sequence() & ((1 << _RANK_BITS) - 1))

    # -- what a record says -------------------------------------------------------------------------------------

    def conform(self, held: Held, record: LeaseRecord, remaining_seconds: float) -> None:
        """Make ``held`` what the store says of it, ``remaining_seconds`` having been read before now."""
        if held.state is HeldState.DROPPED:
            return
        held.lease_id = record.lease_id
        held.epoch = record.epoch
        held.delivery_count = record.delivery_count
        held.first_delivered_at = record.first_delivered_at
        if record.state in (RecordState.ACKED, RecordState.DEAD):
            self.settle([held], record.changed_at)
        elif record.state is RecordState.MOVING:
            held.state = HeldState.MOVING
            if held.tag is not None:
                self._sink.must_move([held])
        elif remaining_seconds > 0.0:
            held.state = HeldState.LEASED if record.state is RecordState.LEASED else HeldState.WAITING
            held.leased_at = record.changed_at
            self.hold_until(held, self._room.clock.monotonic() + remaining_seconds)
        elif record.state is RecordState.LEASED and held.state is not HeldState.GRANTING:
            held.state = HeldState.LEASED
            self._sink.lease_ended(held)
        else:
            self.make_ready([held])

    def hold_until(self, held: Held, deadline: float) -> None:
        held.deadline = deadline
        if deadline < held.timer:
            held.timer = deadline
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
            if held.tag is None:
                self._drop(held)
            elif held.message is None:
                self.fetch_again(held)
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
                self.evidence.detached[held.copy_id] = settled_at
            self._drop(held)
        self._ack(tags, settled_at)

    def settle_unknown(self, copy_id: CopyId, settled_at: float) -> None:
        """The store settled a copy that is not held here: it is acked when the broker delivers it."""
        self.evidence.detached[copy_id] = settled_at

    async def trim(self) -> None:
        """Forget settled records whose acks are proved. Raises: StateUnavailable."""
        proved = self.channel.settled_evidence() if self.channel is not None else 0
        before = self.evidence.settled_before(proved)
        if before is not None:
            await self._room.leases.trim(
                self.broker_queue, settled_before=before, older_than_seconds=SETTLED_KEPT_SECONDS
            )

    # -- memory -------------------------------------------------------------------------------------------------

    def spare_bodies(self, leased: Iterable[Held]) -> None:
        """Over half of the budget: forget bodies that were handed out. A requeue fetches those needed once more."""
        for held in leased:
            if self.held_bytes <= self._window.share_bytes // 2:
                break
            self._clear_body(held)
        self._resume()  # parked pops may wait for what the full buffer kept away

    def fetch_again(self, held: Held) -> None:
        """Ask the broker for a message whose body was dropped. Its record attaches it when it returns."""
        channel, tag = self.channel, held.tag
        if channel is None or tag is None:
            return
        self._returning[held.copy_id] = held.rank
        self._credit_back(tag)
        held.tag = None
        if held.copy_id.startswith(TRANSIENT_PREFIX):
            self._room.background.spawn(self._forget([held.copy_id]), name=f"forget {self.broker_queue}")
            self._drop(held)
        elif held.state not in (HeldState.LEASED, HeldState.WAITING, HeldState.MOVING):
            self._drop(held)
        channel.requeue([tag])

    def starve(self) -> None:
        """A pop wanted more than is here: widen the window if the broker may be waiting for that."""
        if self._resizing:
            self._starved_meanwhile = True  # what the new size brings may be taken before the resize returns
            return
        if self.channel is None or self.held_bytes > self._window.share_bytes:
            return
        if self._wanted_prefetch == 0:
            self._resume()
            return
        wider = self._window.grown(self._credit_used)
        if wider is not None:
            self._resize(wider)

    def is_hoarding(self) -> bool:
        """Whether consuming serves nobody: ready messages wait here, or there is nothing at all."""
        return not self.held or any(held.state is HeldState.READY for held in self.held.values())

    async def return_buffer(self) -> None:
        """Nobody asks: give the buffer back. Leases of unidentified messages would end with the channel, so for
        their sake single messages go back instead."""
        leased = (held for held in self.held.values() if held.state is not HeldState.READY)
        if not any(held.copy_id.startswith(TRANSIENT_PREFIX) for held in leased):
            await self.close()
            return
        self._resize(0)
        for held in [held for held in self.held.values() if held.state is HeldState.READY]:
            self.fetch_again(held)

    def _throttle(self) -> None:
        """Over the budget: stop the broker, and give back the newest of what is ready."""
        self._window.shrunk()
        self._resize(0)
        ready = sorted(
            (held for held in self.held.values() if held.state is HeldState.READY), key=lambda held: held.rank
        )
        excess = self.held_bytes - self._window.share_bytes
        returned: list[Held] = []
        while excess > 0 and len(ready) > 1:
            held = ready.pop()
            excess -= len(held.message.body) if held.message is not None else 0
            returned.append(held)
        for held in reversed(returned):
            self.fetch_again(held)

    def _resize(self, prefetch: int) -> None:
        self._wanted_prefetch = prefetch
        if not self._resizing:
            self._resizing = True
            self._room.background.spawn(self._resize_channel(), name=f"resize {self.broker_queue}")

    async def _resize_channel(self) -> None:
        try:
            while (channel := self.channel) is not None:
                wanted = self._wanted_prefetch
                self._credit_used = 0
                self._credit_from_tag = self._last_tag
                await channel.resize(wanted)
                if self._wanted_prefetch == wanted:
                    return
        except PopgateError as error:
            _log.warning("a channel could not be resized", extra={"queue": self.broker_queue, "error": error.detail})
        finally:
            self._resizing = False
            starved, self._starved_meanwhile = self._starved_meanwhile, False
            if starved:
                self.starve()

    def _ack(self, tags: Sequence[int], settled_at: float) -> None:
        if tags and self.channel is not None:
            self.channel.ack(tags)
            self.evidence.sent(len(tags), settled_at)
            self._resume()

    def _resume(self) -> None:
        """After a pause for want of memory or of demand: consume again once half of the budget is free."""
        if self._wanted_prefetch == 0 and self.held_bytes <= self._window.share_bytes // 2 and self._sink.has_demand():
            self._resize(self._window.prefetch)

    def _credit_back(self, tag: int) -> None:
        if tag > self._credit_from_tag:
            self._credit_used -= 1

    def _clear_body(self, held: Held) -> None:
        if held.message is not None:
            self.held_bytes -= len(held.message.body)
            held.message = None

    def _drop(self, held: Held) -> None:
        if held.tag is not None:
            self._credit_back(held.tag)
        self._clear_body(held)
        held.state = HeldState.DROPPED
        held.tag = None
        self.held.pop(held.copy_id, None)
