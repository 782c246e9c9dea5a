"""What the broker delivers to one queue's channel: each delivery meets what is known of its message.

Owns that meeting. A leased message is attached to its lease, a half-moved one is finished, a settled one is acked
silently, a repeated copy too; the rest becomes ready.

If popgate fails on a batch of deliveries, the broker delivers them again, and each is taken alone. A message that fails
twice alone is set aside, and the others flow. If many fail in a row, they are not to blame: they stay with the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popgate.domain.dead_letter import bare
from popgate.domain.names import TRANSIENT_PREFIX, CopyId
from popgate.engine.held import Held, HeldState, cost_of
from popgate.engine.places import Places
from popgate.engine.rehoming import Rehoming
from popgate.engine.room import Room
from popgate.engine.sink import Sink
from popgate.ports.broker import Delivery

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost

ALONE_COUNT = 65_536
"""Number of deliveries that are taken alone after a fault: more than one channel can hold."""
SET_ASIDE_MAX = 16
"""Maximum number of messages that are set aside in a row."""

_log = logging.getLogger(__name__)


class Deliveries:
    """Those of ``host``."""

    def __init__(self, room: Room, host: QueueHost, places: Places, rehoming: Rehoming, sink: Sink) -> None:
        self._room = room
        self._host = host
        self._places = places
        self._rehoming = rehoming
        self._sink = sink
        self._alone_left = 0
        self._failed_in_a_row = 0

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Take deliveries of the present channel, in queue order."""
        if self._alone_left <= 0:
            try:
                self._take(deliveries)
            except Exception as error:
                self._alone_left = ALONE_COUNT
                place = {"queue": self._host.broker_queue, "deliveries": len(deliveries)}
                _log.warning("deliveries come again, to be taken one by one", exc_info=error, extra=place)
                self._host.deliver_again()
                self._sink.host_lost(self._host)
            return
        self._alone_left -= len(deliveries)
        for delivery in deliveries:
            self._take_alone(delivery)

    def _take_alone(self, delivery: Delivery) -> None:
        queue, message = self._host.broker_queue, delivery.message
        while True:
            try:
                self._take([delivery])
                self._failed_in_a_row = 0
                return
            except Exception as error:
                for held in [held for held in self._host.held.values() if held.tag == delivery.tag]:
                    self._host.drop(held)
                if self._room.faults.message_failed(queue, message.copy_id or f"tag {delivery.tag}", error):
                    self._set_aside(delivery, error)
                    return

    def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        host, message = self._host, bare(delivery.message)
        self._failed_in_a_row += 1
        if self._failed_in_a_row > SET_ASIDE_MAX:
            host.stuck.add(message.copy_id)
            return
        held = Held(host, message.copy_id if delivery.identified else self._transient_id())
        held.tag, held.message = delivery.tag, message
        host.held[held.copy_id] = held
        host.supply.took(delivery.tag, cost_of(message))
        self._sink.set_aside(held, error)

    def _transient_id(self) -> CopyId:
        return CopyId(f"{TRANSIENT_PREFIX}{self._room.instance}.{self._host.epoch}.{self._room.next_transient()}")

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        host = self._host
        ready: list[Held] = []
        attached: list[Held] = []
        moving: list[Held] = []
        repeated: list[int] = []
        supply, detached = host.supply, host.evidence.detached
        wall = self._room.clock.wall()
        for delivery in deliveries:
            tag = delivery.tag
            message = delivery.message
            copy_id = message.copy_id
            if not delivery.identified:
                copy_id = self._transient_id()
            held = host.held.get(copy_id)
            if held is not None and held.tag is not None:
                supply.passed(tag)
                repeated.append(tag)  # a second copy with the same identity, such as a repeated dead-lettering
                continue
            if copy_id in detached:
                supply.passed(tag)
                host.ack([tag], detached.pop(copy_id))
                continue
            if held is None:
                held = host.held[copy_id] = Held(host, copy_id)
                held.delivery_count = host.handed_out.pop(copy_id, 0)
                ready.append(held)
            elif held.state is HeldState.RETURNING:
                held.state = HeldState.READY
                ready.append(held)
            else:
                host.clear_body(held)
                (moving if held.state is HeldState.MOVING else attached).append(held)
            held.tag = tag
            # The broker counts deliveries into buffers as well. Where a record would be, only records count; elsewhere
            # at least what was returned unseen is left out, lest messages be dead-lettered that no client ever saw.
            unseen = host.returns.count
            held.earlier_deliveries = 0 if delivery.identified else max(0, delivery.earlier_deliveries - unseen)
            if not held.rank:
                self._places.give(held, delivery, wall)
            held.message = message
            supply.took(tag, cost_of(message))
        if repeated and host.channel is not None:
            host.channel.ack(repeated)
            host.evidence.sent_for_nothing(len(repeated))
        if attached:
            self._sink.attached(attached)
            host.returns.spare_bodies(held for held in attached if held not in host.returns.wanted)
        if moving:
            self._sink.must_move(moving)
        if ready:
            self._sink.became_ready(ready)
            host.returns.spare_bodies(held for held in ready if held.is_unsorted)
        self._places.sort_soon(host.channel)
        if deliveries:
            self._rehoming.arrived(deliveries[-1].tag)
        self._sink.changed()
        if supply.excess_bytes > 0:
            supply.throttle()


class ChannelListener:
    """Ties callbacks to one channel: those of an earlier one are ignored."""

    def __init__(self, host: QueueHost, deliveries: Deliveries) -> None:
        self._host = host
        self._deliveries = deliveries

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        if self._host.listener is self:
            self._deliveries.deliver(deliveries)

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        if self._host.listener is self:
            self._host.channel_lost(reason, queue_gone=queue_gone)
