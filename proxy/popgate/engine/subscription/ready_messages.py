"""The messages that may be handed out now, oldest first, and which of them a pop gets.

Theory of operation. Only the head of each ordering key (``ordering_keys``) is in the heap; the messages behind it may
go to the same pop, each after the one before it. Entries stay in the heap when their messages are no longer ready. Such
an entry is stale until its message is ready again. Stale entries are removed when they come to the top, or when they
are the majority. A pop with a filter looks at every entry; once parked, it looks only at messages offered later that
pass its filter (``parked_pops``).
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from popgate.engine.lease.pop_request import ANSWER_BYTES_MAX, PopRequest
from popgate.engine.lease.pull_lease import PullLease
from popgate.engine.queue.buffered import BufferedMessage, MessageState

_Entry = tuple[int, BufferedMessage]
HEAP_MIN = 10_000
"""Minimum number of heap entries before stale ones are counted and removed."""


class ReadyMessages:
    """The ready messages of one subscription. ``discards`` takes out an expired message, and returns whether it did."""

    def __init__(self, discards: Callable[[BufferedMessage], bool]) -> None:
        self._heap: list[_Entry] = []
        self._looked_through_at = HEAP_MIN
        self._discards = discards

    def offer(self, held: BufferedMessage) -> bool:
        """Offer ``held``, which is READY. Return whether it may be handed out, as the head of its ordering key."""
        if held.is_head and not held.is_offered:
            held.is_offered = True
            heappush(self._heap, (held.rank, held))
            if len(self._heap) > self._looked_through_at:  # pulls take nothing out of the heap
                self._looked_through_at = max(HEAP_MIN, 2 * len(self.offered()))
        return held.is_head

    def has(self, request: PopRequest) -> bool:
        """Whether there is a message that ``request`` may get."""
        if request.group is not None and any(self._is_for(held, request) for held in request.group.followers()):
            return True
        if request.pull is not None:
            following = next(request.pull.candidates(), None)
            return following is not None and self._is_for(following, request)
        if request.matches is None:
            return self._next() is not None
        return any(self._is_for(held, request) for held in self.offered())

    def count(self, count_max: int) -> int:
        """Count the messages that a pop without a filter would get, at most ``count_max``.

        An upper bound, because stale entries and expired messages may count. Takes at most ``count_max`` steps.
        """
        if len(self._heap) >= count_max:
            return count_max
        found = 0
        for _, first in self._heap:
            held: BufferedMessage | None = first if first.is_head else None
            while held is not None and held.state is MessageState.READY and held.message is not None:
                found += 1
                if found == count_max:
                    return found
                held = held.next_of_key()
        return found

    def take(self, request: PopRequest, count_max: int) -> list[BufferedMessage]:
        """Take the oldest messages for ``request``, in order, bounded in number and in bytes of the answer. They are
        GRANTING now."""
        if request.pull is not None:
            return self._take_in_line(request.pull, request, count_max)
        if request.matches is not None:
            return self.take_of(self.offered(), request, count_max)
        group = request.group
        followers = [] if group is None else self._entries(group.followers(), request)
        taken: list[BufferedMessage] = []
        size = 0
        while len(taken) < count_max:
            held = self._next()
            source = self._heap
            if followers and (held is None or followers[0][0] < held.rank):
                held, source = followers[0][1], followers
            if held is None:
                break
            size = _size_with(held, size, request)
            if taken and size > ANSWER_BYTES_MAX:
                break
            heappop(source)
            if source is self._heap:
                held.is_offered = False
            self._take(held, taken, followers, request)
        if group is not None:
            group.note(taken)
        return taken

    def take_of(self, many: Iterable[BufferedMessage], request: PopRequest, count_max: int) -> list[BufferedMessage]:
        """Take as ``take`` does, but only from ``many``, which were offered, and the messages behind them."""
        picked = self._entries((held for held in many if held.is_head), request)
        taken: list[BufferedMessage] = []
        size = 0
        while picked and len(taken) < count_max:
            held = picked[0][1]
            if held.state is not MessageState.READY:  # it was offered twice
                heappop(picked)
                continue
            size = _size_with(held, size, request)
            if taken and size > ANSWER_BYTES_MAX:
                break
            heappop(picked)
            self._take(held, taken, picked, request)
        return taken

    def _take_in_line(self, lease: PullLease, request: PopRequest, count_max: int) -> list[BufferedMessage]:
        """Take the next messages of one queue, without skipping any."""
        taken: list[BufferedMessage] = []
        size = 0
        for held in lease.candidates():
            if not self._is_for(held, request):
                break
            size = _size_with(held, size, request)
            if len(taken) == count_max or (taken and size > ANSWER_BYTES_MAX):
                break
            held.enter(MessageState.GRANTING)
            taken.append(held)
        return taken

    def offered(self) -> list[BufferedMessage]:
        """Return all messages that may be handed out now. Remove the stale entries if they are the majority."""
        live = [entry for entry in self._heap if entry[1].is_head and entry[1].state is MessageState.READY]
        if 2 * len(live) < len(self._heap):
            for _, held in self._heap:
                held.is_offered = False
            for _, held in live:
                held.is_offered = True
            heapify(live)
            self._heap = live
        return [held for _, held in live]

    def _next(self) -> BufferedMessage | None:
        """Return the oldest message that may be handed out."""
        heap = self._heap
        while heap:
            held = heap[0][1]
            is_ready = held.state is MessageState.READY and held.is_head and held.message is not None
            if is_ready and not self._discards(held):
                return held
            heappop(heap)
            held.is_offered = False
        return None

    def can_be_taken(self, held: BufferedMessage) -> bool:
        """Whether a pop without a filter could get ``held``. An expired message is discarded here, because otherwise it
        would block the messages behind it as long as it passes no filter."""
        return held.state is MessageState.READY and held.message is not None and not self._discards(held)

    def _is_for(self, held: BufferedMessage, request: PopRequest) -> bool:
        if not self.can_be_taken(held):
            return False
        return request.matches is None or (held.message is not None and request.matches(held.message.headers))

    def _entries(self, many: Iterable[BufferedMessage], request: PopRequest) -> list[_Entry]:
        """Return a heap of the messages that ``request`` may get."""
        entries = [(held.rank, held) for held in many if self._is_for(held, request)]
        heapify(entries)
        return entries

    def _take(
        self, held: BufferedMessage, taken: list[BufferedMessage], others: list[_Entry], request: PopRequest
    ) -> None:
        """Take ``held``. The message behind it may be taken next."""
        held.enter(MessageState.GRANTING)
        taken.append(held)
        behind = held.next_of_key()
        if behind is not None and self._is_for(behind, request):
            heappush(others, (behind.rank, behind))


def _size_with(held: BufferedMessage, size: int, request: PopRequest) -> int:
    assert held.message is not None, "what is offered is here"
    return size + request.answer_bytes(held.message)
