"""Decides which message bodies of one queue stay in memory, so that the queue does not exceed its memory share.

This module only makes the choice. ``flow`` counts the bytes and sets the prefetch, and ``state`` requeues messages.

Theory of operation. There are three steps to free memory. Each step is used only if the steps before it are not enough:

1. ``spare``: drop bodies that the broker can deliver again after a requeue.
2. Pause the channel, so that the broker delivers nothing.
3. ``surplus``: return ready messages to the broker.

A pause ends when at least half of the memory share is free and clients want messages. It ends earlier if messages must
be delivered because no client could get a message without them (``resume``).
"""

from collections.abc import Iterable, Mapping

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import RECOVERABLE, BufferedMessage, Counts, MessageState
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.flow import Flow


class BodyMemory:
    """Manages the bodies of ``messages``, which are all messages of the queue. It never changes a message's state."""

    def __init__(self, flow: Flow, messages: Mapping[CopyId, BufferedMessage], counts: Counts) -> None:
        self.wanted: set[BufferedMessage] = set()
        """Leased messages whose bodies a call is waiting for."""
        self._flow = flow
        self._messages = messages
        self._counts = counts

    # -- one body -------------------------------------------------------------------------------------------------

    def forget(self, message: BufferedMessage) -> None:
        """Drop the body of a message from memory. Do nothing if the body is not in memory."""
        if message.message is not None:
            self.unkeep(message)
            message.message = None
            self._flow.freed(message.cost)
            message.cost = 0

    def keep(self, message: BufferedMessage) -> None:
        """Exempt the body of a leased message from ``spare``, if enough memory is available.

        The client will soon read the body, perhaps more than once.
        """
        if message.message is not None and not message.is_kept:
            message.is_kept = self._flow.keep(message.cost)

    def unkeep(self, message: BufferedMessage) -> None:
        """Undo ``keep``: allow ``spare`` to drop the body of the message. Idempotent."""
        if message.is_kept and message.message is not None:
            message.is_kept = False
            self._flow.unkeep(message.cost)

    # -- too little memory ----------------------------------------------------------------------------------------

    def relieve(self, arrived: Effects) -> bool:
        """Free memory after a delivery if the queue's memory share is exceeded: drop bodies, then pause the channel.

        Return True if this is not enough because the channel is already paused. Then messages must be returned to the
        broker (``surplus``).
        """
        self.spare(message for message in arrived.redelivered if message not in self.wanted)
        self.spare(message for message in arrived.ready if message.awaits_order)
        return self._flow.excess_bytes > 0 and self._flow.throttle()

    def spare(self, messages: Iterable[BufferedMessage]) -> None:
        """Drop bodies from memory until at most half of the queue's memory share is used.

        If such a body is needed later, its message is requeued so that the broker delivers it again. Only these bodies
        are dropped: those of leased and delayed messages, and those of ready messages that have no place in the order
        yet. Bodies with ``is_kept`` stay in memory. Bodies of transient messages stay because a requeue would end the
        leases of their messages.
        """
        for message in messages:
            if message.message is None or message.is_kept or message.is_transient:
                continue
            if message.state not in RECOVERABLE and not (message.state is MessageState.READY and message.awaits_order):
                continue
            if not self._flow.is_half_full:
                return
            self.forget(message)

    def surplus(self, *, has_demand: bool) -> list[BufferedMessage]:
        """Return the ready messages that must go back to the broker while the channel is paused.

        Without demand, these are all ready messages. With demand, they are only as many as exceed the memory share, and
        at least one ready message stays. Messages that wait behind another message of their ordering key are chosen
        first, the newest of them before the older ones. The result lists heads first, and otherwise older messages
        first.

        With demand, this method only drops the body of a message that has no place in the order yet. If the message
        were requeued, the broker would deliver it before the redelivered messages that have not arrived yet. If all
        redelivered messages together exceed the memory share, this would repeat forever.
        """
        ready = [message for message in self._messages.values() if message.state is MessageState.READY]
        ready.sort(key=lambda message: (not message.is_head, message.rank))
        keep = 1 if has_demand else 0
        returned: list[BufferedMessage] = []
        excess = self._flow.excess_bytes
        while len(ready) > keep and (excess > 0 or not keep or ready[-1].awaits_order):
            message = ready.pop()
            excess -= message.cost if message.message is not None else 0
            if keep and message.awaits_order:
                self.forget(message)
            else:
                returned.append(message)
        returned.reverse()
        return returned

    # -- more demand than memory ----------------------------------------------------------------------------------

    def widen(self, *, has_demand: bool) -> None:
        """Raise the prefetch or end a pause, if memory allows, because pops want more messages than are ready."""
        if self._flow.is_half_full:
            self.spare(
                message
                for message in self._messages.values()
                if message.message is not None and message not in self.wanted
            )
        if self._flow.is_resizing:
            return
        if self._flow.is_paused:
            self.resume(has_demand=has_demand)
        else:
            self._flow.widen()

    def resume(self, *, has_demand: bool) -> None:
        """End a pause if clients want messages and memory is available, or if ``_needed_count`` is not 0."""
        self._flow.looked()
        if not self._flow.is_half_full and has_demand:
            self._flow.resume(0)
        elif needed := self._needed_count(has_demand=has_demand):
            self._flow.resume(needed)

    def _needed_count(self, *, has_demand: bool) -> int:
        """Return how many messages the broker must deliver even if they exceed the queue's memory share.

        These are the messages in ``wanted`` without a body. If there are no such messages, requeued messages can block
        all pops: clients want messages, no head of an ordering key is ready, and some heads are requeued. In this case
        all requeued messages must be delivered.
        """
        needed = sum(message.message is None for message in self.wanted)
        if needed or not has_demand:
            return needed
        if self._counts.heads(MessageState.READY) or not self._counts.heads(MessageState.REQUEUED):
            return 0
        return self._counts.all(MessageState.REQUEUED)
