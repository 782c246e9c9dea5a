"""What is forgotten or given back to the broker unsettled: when memory runs short, when nobody asks, and in time.

Owns the choice. A body that is forgotten comes back with a requeue; a message that is given back alone keeps its place
(``HeldState.RETURNING``) and comes again. Only unidentified messages lose what is known of them: nothing tells that
they are the same when they come again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from popgate.domain.names import TRANSIENT_PREFIX
from popgate.engine.held import Held, HeldState, cost_of

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost

BROUGHT_BACK = (HeldState.LEASED, HeldState.WAITING)
"""Their bodies may be forgotten: the broker has them."""
UNSEEN = (HeldState.READY, HeldState.RETURNING)
"""No client knows of them."""


class Returns:
    """Of one queue host. ``wanted`` are leases whose bodies somebody waits for.

    ``count`` says how often unseen messages were given back for want of demand, memory or time: each of them at most
    once each time.
    """

    def __init__(self, host: QueueHost, has_demand: Callable[[], bool]) -> None:
        self.wanted: set[Held] = set()
        self.count = 0
        self._host = host
        self._has_demand = has_demand

    def note(self) -> None:
        """Unseen messages are about to be given back."""
        self.count += 1

    # -- bodies -------------------------------------------------------------------------------------------------

    def spare_bodies(self, many: Iterable[Held]) -> None:
        """Over half of the budget: forget bodies that are leased, or that wait for their places (``places`` asks for
        them when it is their turn). A requeue fetches those needed once more.

        Not those that are kept, nor those of unidentified messages: a requeue would end their leases.
        """
        for held in many:
            if held.message is None or held.is_kept or held.copy_id.startswith(TRANSIENT_PREFIX):
                continue
            if held.state not in BROUGHT_BACK and not _is_unsorted(held):
                continue
            if not self._host.supply.is_half_full:
                return
            self._host.clear_body(held)

    def spare_unwanted(self) -> None:
        """Over half of the budget: forget whatever is leased, not kept and not waited for."""
        self.spare_bodies(
            held for held in self._host.held.values() if held.message is not None and held not in self.wanted
        )

    def needed_count(self) -> int:
        """How many bodies have to come, whatever they cost: those that are waited for, or that all others wait for."""
        needed = sum(held.message is None for held in self.wanted)
        if needed or not self._has_demand():
            return needed
        tally = self._host.tally
        if tally.first(HeldState.READY) or not tally.first(HeldState.RETURNING):
            return 0
        return tally.all(HeldState.RETURNING)

    def fetch_again(self, held: Held) -> None:
        """Ask the broker for a message whose body was forgotten. What we know of it stays and is attached again."""
        channel, tag = self._host.channel, held.tag
        if channel is None or tag is None or held.message is not None:
            return
        self._host.supply.returned(tag)
        held.tag = None
        channel.requeue([tag])

    # -- messages -----------------------------------------------------------------------------------------------

    def give_back(self, held: Held) -> None:
        """Return one message to the queue: it comes again like a new one, but in its place."""
        host = self._host
        channel, tag = host.channel, held.tag
        if channel is None or tag is None:
            return
        if held.copy_id.startswith(TRANSIENT_PREFIX):
            host.upkeep.forget([held.copy_id])
            host.drop(held)
        else:
            held.state = HeldState.RETURNING
            host.clear_body(held)
            host.supply.returned(tag)
            held.tag = None
        channel.requeue([tag])

    def rehome(self, held: Held) -> None:
        """Return one message to the queue lest its delivery grows too old: what we know of it stays."""
        if held.state in UNSEEN or held.copy_id.startswith(TRANSIENT_PREFIX):
            self.give_back(held)
        else:
            self._host.clear_body(held)
            self.fetch_again(held)

    def shed(self) -> None:
        """The broker has stopped: give back all that is ready, or only what passes the budget: first the newest that
        stand behind others.

        Of what has no place yet only the bodies go: given back it would come again before the rest of it does, and
        where all of it is larger than the budget, it would do so for ever.
        """
        ready = [held for held in self._host.held.values() if held.state is HeldState.READY]
        ready.sort(key=lambda held: (not held.is_first, held.rank))
        keep = 1 if self._has_demand() else 0
        returned: list[Held] = []
        excess = self._host.supply.excess_bytes
        while len(ready) > keep and (excess > 0 or not keep or ready[-1].is_unsorted):
            held = ready.pop()
            excess -= cost_of(held.message) if held.message is not None else 0
            if keep and held.is_unsorted:
                self._host.clear_body(held)
            else:
                returned.append(held)
        if returned:
            self.note()
        for held in reversed(returned):
            self.give_back(held)


def _is_unsorted(held: Held) -> bool:
    return held.state is HeldState.READY and held.is_unsorted
