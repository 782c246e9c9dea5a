"""Stores the messages that may be handed out, oldest first, and takes messages for a pop from them.

Theory of operation. Only the head of each ordering key (``ordering_keys``) is in the heap. The messages behind it may
be handed out to the same pop, in the order of their chain. Entries stay in the heap when their messages are no longer
ready. Such an entry is stale until its message is ready again. Stale entries are removed when they reach the top of the
heap, or when they are the majority. A new pop with a filter is compared with every entry, but only if these are few. If
not, it is parked, and compared with some of them at a time (``parked_pops``).
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from popgate.domain.filters import HeaderFilter
from popgate.engine.lease.discarding import Discarder
from popgate.engine.lease.selection import COMPARED_AT_ONCE_MAX, Basket, Ready
from popgate.engine.queue.buffered import BufferedMessage, MessageState

_Entry = tuple[int, BufferedMessage]
HEAP_MIN = 10_000
"""Minimum number of heap entries before stale ones are counted and removed."""


class ReadyMessages:
    """The ready messages of one subscription. ``discarder`` removes expired messages."""

    def __init__(self, discarder: Discarder) -> None:
        self._heap: list[_Entry] = []
        self._looked_through_at = HEAP_MIN
        self._discards = discarder.takes

    def offer(self, buffered: BufferedMessage) -> bool:
        """Add ``buffered``, which is READY, to the heap if it is the head of its ordering key.

        Return whether it is the head. Only the head may be handed out.
        """
        if buffered.is_head and not buffered.is_offered:
            buffered.is_offered = True
            heappush(self._heap, (buffered.rank, buffered))
            if len(self._heap) > self._looked_through_at:  # pulls remove nothing from the heap
                self._looked_through_at = max(HEAP_MIN, 2 * len(self.offered()))
        return buffered.is_head

    def are_many(self) -> bool:
        return len(self._heap) > COMPARED_AT_ONCE_MAX

    def has_any(self) -> bool:
        return self._next() is not None

    def first(self) -> BufferedMessage | None:
        """Return the oldest message that may be handed out, or None."""
        return self._next()

    def count(self, count_max: int) -> int:
        """Count the messages that a pop without a filter would get, at most ``count_max``.

        The count is an upper bound, because it may include stale entries and expired messages. Makes at most
        ``count_max`` steps.
        """
        if len(self._heap) >= count_max:
            return count_max
        found = 0
        for _, first in self._heap:
            buffered: BufferedMessage | None = first if first.is_head else None
            while buffered is not None and buffered.state is MessageState.READY and buffered.message is not None:
                found += 1
                if found == count_max:
                    return found
                buffered = buffered.next_of_key()
        return found

    def take_oldest(self, basket: Basket, followers: Iterable[BufferedMessage] = ()) -> None:
        besides = self._entries(followers)
        while True:
            buffered = self._next()
            source = self._heap
            if besides and (buffered is None or besides[0][0] < buffered.rank):
                buffered, source = besides[0][1], besides
            if buffered is None or not basket.add(buffered):
                return
            heappop(source)
            if source is self._heap:
                buffered.is_offered = False
            if buffered.key is not None:
                self._add_behind(buffered, besides)

    def take_of(self, many: Iterable[BufferedMessage], basket: Basket, passes: HeaderFilter | None) -> None:
        picked = self._entries((buffered for buffered in many if buffered.is_head), passes)
        while picked:
            buffered = picked[0][1]
            is_ready = buffered.state is MessageState.READY  # otherwise it was offered twice
            if is_ready and not basket.add(buffered):
                return
            heappop(picked)
            if is_ready and buffered.key is not None:
                self._add_behind(buffered, picked, passes)

    def offered(self) -> list[BufferedMessage]:
        """Return all messages that may be handed out now. Remove the stale entries if they are the majority."""
        live = [entry for entry in self._heap if entry[1].is_head and entry[1].state is MessageState.READY]
        if 2 * len(live) < len(self._heap):
            for _, buffered in self._heap:
                buffered.is_offered = False
            for _, buffered in live:
                buffered.is_offered = True
            heapify(live)
            self._heap = live
        return [buffered for _, buffered in live]

    def _next(self) -> BufferedMessage | None:
        """Return the oldest message that may be handed out, or None."""
        heap = self._heap
        while heap:
            buffered = heap[0][1]
            is_ready = buffered.state is MessageState.READY and buffered.is_head and buffered.message is not None
            if is_ready and not self._discards(buffered):
                return buffered
            heappop(heap)
            buffered.is_offered = False
        return None

    def can_be_taken(self, buffered: BufferedMessage) -> bool:
        """Whether a pop without a filter could get the message. If the message has expired, discard it.

        If it were not discarded, an expired message that passes no filter would block the messages behind it.
        """
        return buffered.state is MessageState.READY and buffered.message is not None and not self._discards(buffered)

    def _is_for(self, buffered: BufferedMessage, passes: HeaderFilter | None) -> bool:
        if not self.can_be_taken(buffered):
            return False
        return passes is None or (buffered.message is not None and passes(buffered.message.headers))

    def _entries(self, many: Iterable[BufferedMessage], passes: HeaderFilter | None = None) -> list[_Entry]:
        """Return a heap of the messages of ``many`` that may be taken."""
        entries = [(buffered.rank, buffered) for buffered in many if self._is_for(buffered, passes)]
        heapify(entries)
        return entries

    def _add_behind(self, taken: BufferedMessage, others: list[_Entry], passes: HeaderFilter | None = None) -> None:
        """Add the message behind ``taken`` in its ordering key to the heap ``others``, if it may be taken."""
        behind = taken.next_of_key()
        if behind is not None and self._is_for(behind, passes):
            heappush(others, (behind.rank, behind))


_conforms: type[Ready] = ReadyMessages
