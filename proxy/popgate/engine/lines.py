"""The lines of ordering keys in one queue: only the first of a line may be handed out.

A line is a chain through the messages themselves, so that a key with one message costs one entry of a table, and
whoever is not the first costs nothing more. A message stands in its line from its delivery until it is dropped,
whatever its state: leased, waiting for a retry, being moved, on its way back. Those that are dropped out of turn are
passed over when the line comes to them.
"""

from popgate.engine.held import Held


class Lines:
    """``join`` is called in queue order."""

    def __init__(self) -> None:
        self._last: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._last)

    def join(self, held: Held, key: str) -> None:
        """Stand behind whoever has the same key."""
        last = self._last.get(key)
        held.key = key
        held.is_first = last is None
        if last is not None:
            last.behind = held
        self._last[key] = held

    def leave(self, held: Held) -> Held | None:
        """``held`` was dropped: who is the first of its line now, where that is somebody else."""
        if held.key is None or not held.is_first:
            return None
        following = held.next_in_line()
        held.behind = None
        if following is None:
            del self._last[held.key]
        else:
            following.is_first = True
        return following

    def dissolve(self) -> None:
        """There are no lines any more: the queue will deliver everybody again, in order."""
        self._last.clear()
