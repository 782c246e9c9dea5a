"""Decides which bodies of one queue stay in memory, so that the queue stays within its share of the budget.

Owns the choice. ``flow`` owns the sums and the prefetch, and ``state`` returns messages to the broker.

Theory of operation. There are three ways to free memory. Each is used if the ways before it are not enough:

1. ``spare``: forget bodies that a requeue fetches again.
2. Pause the channel, so that the broker pushes nothing.
3. ``surplus``: return ready messages to the broker.

A pause ends when half of the budget is free, or earlier for the bodies without which no message could continue.
"""

from collections.abc import Iterable, Mapping

from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import RECOVERABLE, BufferedMessage, Counts, MessageState, cost_of
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.flow import Flow


class BodyMemory:
    """The bodies of ``messages``, which are all messages of the queue. Never changes the state of a message."""

    def __init__(self, flow: Flow, messages: Mapping[CopyId, BufferedMessage], counts: Counts) -> None:
        self.wanted: set[BufferedMessage] = set()
        """Leased messages for whose bodies a call is waiting."""
        self._flow = flow
        self._messages = messages
        self._counts = counts

    # -- one body -------------------------------------------------------------------------------------------------

    def forget(self, message: BufferedMessage) -> None:
        """Forget the body of a message, if it is here."""
        body = message.message
        if body is not None:
            self.unkeep(message)
            message.message = None
            self._flow.freed(cost_of(body))

    def keep(self, message: BufferedMessage) -> None:
        """Retain a leased body if memory allows, because the client will read it soon, and maybe more than once."""
        body = message.message
        if body is not None and not message.is_kept:
            message.is_kept = self._flow.keep(cost_of(body))

    def unkeep(self, message: BufferedMessage) -> None:
        """Note that the body of a message no longer has to stay. Idempotent."""
        if message.is_kept and message.message is not None:
            message.is_kept = False
            self._flow.unkeep(cost_of(message.message))

    # -- too little memory ----------------------------------------------------------------------------------------

    def relieve(self, arrived: Effects) -> bool:
        """Stay within the budget after a delivery: forget bodies, then pause the channel.

        Return whether only returning messages to the broker helps, because the channel is already paused.
        """
        self.spare(message for message in arrived.redelivered if message not in self.wanted)
        self.spare(message for message in arrived.ready if message.awaits_order)
        return self._flow.excess_bytes > 0 and self._flow.throttle()

    def spare(self, messages: Iterable[BufferedMessage]) -> None:
        """Forget bodies while more than half of the budget is used. A requeue fetches a body that is needed again.

        Only bodies of leased and delayed messages, and of ready messages that await their places, are forgotten.
        Bodies with ``is_kept`` stay. Bodies of transient messages stay because a requeue would end their leases.
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
        """Return the ready messages to return to the broker while the channel is paused: heads first, oldest first.

        Without demand, all ready messages are returned. With demand, only as many as exceed the budget, and at least
        one stays. Messages behind others of their key are returned first, and the newest of them first.

        While there is demand, a message that awaits its place only loses its body. If it were requeued, the broker
        would deliver it again before the rest. If these messages together exceed the budget, that would never end.
        """
        ready = [message for message in self._messages.values() if message.state is MessageState.READY]
        ready.sort(key=lambda message: (not message.is_head, message.rank))
        keep = 1 if has_demand else 0
        returned: list[BufferedMessage] = []
        excess = self._flow.excess_bytes
        while len(ready) > keep and (excess > 0 or not keep or ready[-1].awaits_order):
            message = ready.pop()
            excess -= cost_of(message.message) if message.message is not None else 0
            if keep and message.awaits_order:
                self.forget(message)
            else:
                returned.append(message)
        returned.reverse()
        return returned

    # -- more demand than memory ----------------------------------------------------------------------------------

    def widen(self, *, has_demand: bool) -> None:
        """Let the broker push more if memory allows, because pops want more messages than are ready."""
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
        """End a pause if there is memory and demand, or if a body is needed (``_needed_count``)."""
        self._flow.looked()
        if not self._flow.is_half_full and has_demand:
            self._flow.resume(0)
        elif needed := self._needed_count(has_demand=has_demand):
            self._flow.resume(needed)

    def _needed_count(self, *, has_demand: bool) -> int:
        """Return how many messages must be delivered even beyond the budget.

        These are the missing bodies in ``wanted``. If there are none, and there is demand but no ready head while
        requeued heads block the rest, these are all requeued messages.
        """
        needed = sum(message.message is None for message in self.wanted)
        if needed or not has_demand:
            return needed
        if self._counts.heads(MessageState.READY) or not self._counts.heads(MessageState.REQUEUED):
            return 0
        return self._counts.all(MessageState.REQUEUED)
