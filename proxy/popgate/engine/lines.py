"""The lines of ordering keys in one queue: only the first of a line may be handed out.

A line is a chain through the messages themselves, so that a key with one message costs one entry of a table, and
whoever is not the first costs nothing more. A message stands in its line from its delivery until it is dropped,
whatever its state: leased, waiting for a retry, being moved, on its way back. Those that are dropped out of turn are
passed over when the line comes to them.

What came back from an earlier channel has no place yet: the broker may deliver it in another order (where a channel
ends before it has seen all of what came back, RabbitMQ puts what it has seen behind the rest). It waits until all of
that is here, and is lined up by its place in the queue.
"""

from popgate.domain.message import Message, place_of
from popgate.domain.names import CopyId
from popgate.engine.held import Held, HeldState

_READY = (HeldState.READY, HeldState.RETURNING)


class Lines:
    """``join`` is called in queue order."""

    def __init__(self) -> None:
        self._last: dict[str, Held] = {}
        self._unsorted: list[tuple[tuple[int, CopyId], str, Held]] = []

    @property
    def is_sorted(self) -> bool:
        """Whether nobody waits for a place."""
        return not self._unsorted

    def join(self, held: Held, key: str) -> None:
        """Stand behind whoever has the same key."""
        last = self._last.get(key)
        held.key = key
        held.is_first = last is None
        if last is not None:
            last.behind = held
        self._last[key] = held

    def join_later(self, held: Held, key: str, message: Message) -> None:
        """It came back: it gets its place when all have."""
        held.is_first = False
        self._unsorted.append((place_of(message), key, held))

    def line_up(self) -> list[Held]:
        """All that came back is here, and gets its place, and ranks in that order; who is the first of a line now."""
        unsorted = [one for one in self._unsorted if one[2].state is not HeldState.DROPPED]
        unsorted.sort(key=lambda one: (_is_new(one[2]), one[0]))
        self._unsorted = []
        ranks = sorted(held.rank for _, _, held in unsorted)
        for (_, key, held), rank in zip(unsorted, ranks, strict=True):
            held.rank = rank
            self.join(held, key)
        return [held for _, _, held in unsorted if held.is_first]

    def leave(self, held: Held) -> Held | None:
        """``held`` was dropped: who is the first of its line now, where that is somebody else."""
        if held.key is None or not held.is_first:
            return None
        key, following = held.key, held.next_in_line()
        held.key = held.behind = None
        if following is None:
            del self._last[key]
        else:
            following.is_first = True
        return following

    def dissolve(self) -> bool:
        """There are no lines any more: the queue will deliver everybody again. Whether there were any."""
        were_any = bool(self._last or self._unsorted)
        self._last.clear()
        self._unsorted.clear()
        return were_any


def _is_new(held: Held) -> bool:
    """Whether no client ever had it. Whatever clients have, or had, was in front of it, whatever their places say."""
    return held.state in _READY and not held.delivery_count
