"""Stores the parked pops of one subscription, and decides in which order a serving tries them.

A serving is one pass over the parked pops, in which ``serving`` decides which pop gets which message.

Theory of operation. Pops that accept the same messages are in one line. There is one line for pops that accept any
message, and one line for each filter. If the first pop of a line gets no message, the serving skips the rest of this
line, because its other pops would get no message either. Each serving tries the line of pops without filters. It tries
the line of a filter only if a fresh message passes the filter (``FilterIndex``). Fresh messages are ready messages that
were not compared with the filters yet. The lines are merged, so that a pop that was parked earlier is tried earlier.

Special pops (of an administrator, for a lease group, or of a pull client) are tried individually in each serving,
because they may get a message when other pops get none. A new filter is compared once with all ready messages, in order
(a search), and from then on only with fresh messages.

Clients can send so many different filters that a message must be compared with thousands of them, or a filter with a
hundred thousand messages. So a serving makes at most ``ASKED_AT_ONCE_MAX`` and ``COMPARED_AT_ONCE_MAX`` comparisons,
and the caller decides when to make further ones (``next_asked``).

If the wait time of many pops is over at once, this module ends only some of them in each turn of the event loop. Each
pop has to be answered, and 10,000 answers in one turn would delay all other clients.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from popgate.domain.filter_index import Facts, FilterIndex
from popgate.domain.filters import HeaderFilter
from popgate.domain.message import HeaderValue
from popgate.engine.lease.pop_request import Waiter
from popgate.engine.lease.selection import COMPARED_AT_ONCE_MAX, Ready
from popgate.engine.queue.buffered import BufferedMessage, MessageState

ENDED_AT_ONCE_MAX = 100
"""Maximum number of pops of a subscription that time out in one turn of the event loop."""

ASKED_AT_ONCE_MAX = 200
"""Maximum number of filters that are compared with fresh messages in one serving."""

Line = OrderedDict[Waiter, None]
FreshFor = Mapping[HeaderFilter, list[list[BufferedMessage]]]
"""For each filter, the lists of fresh messages that pass it. One list can be shared by several filters."""


class _Unasked(NamedTuple):
    """Fresh messages that pass the same filters (``alike``), and that were not yet compared with all filters."""

    facts: Facts
    headers: Mapping[str, HeaderValue]
    alike: list[BufferedMessage]


class Turn:
    """The turn of one pop in a serving. ``line``: the line that the pop is first in; None: it is tried individually."""

    __slots__ = ("_fresh", "line", "waiter")

    def __init__(self, waiter: Waiter, line: Line | None, fresh: list[list[BufferedMessage]] | None) -> None:
        self.waiter = waiter
        self.line = line
        self._fresh = fresh

    @property
    def fresh(self) -> Iterable[BufferedMessage] | None:
        """The messages that the pop may get; None: all ready messages."""
        return None if self._fresh is None else chain.from_iterable(self._fresh)

    def following(self) -> "Turn | None":
        """Return the turn of the next pop in the line, or None. Call this after this turn's pop has left the line."""
        return _first_turn(self.line, self._fresh) if self.line else None


class Turns:
    """The turns of one serving, in order. When no ``fresh`` message is left, turns that need one are dropped."""

    def __init__(self, turns: Iterable[Turn], fresh: list[BufferedMessage]) -> None:
        self._turns = [(turn.waiter.position, turn) for turn in turns]
        self._fresh = fresh
        heapify(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        while self._turns:
            yield heappop(self._turns)[1]

    def goes_on(self, turn: Turn) -> None:
        """Add the turn of the next pop in the line of ``turn``, because the pop of ``turn`` has left the line."""
        following = turn.following()
        if following is not None:
            heappush(self._turns, (following.waiter.position, following))
        if self._fresh and turn.fresh is not None:
            while self._fresh and self._fresh[-1].state is not MessageState.READY:
                self._fresh.pop()
            if not self._fresh:
                self._turns = [entry for entry in self._turns if entry[1].fresh is None]
                heapify(self._turns)


class ParkedPops:
    """The parked pops of one subscription. A pop is added or removed in constant time."""

    def __init__(self) -> None:
        self._all: dict[Waiter, None] = {}
        self._plain: Line = OrderedDict()
        self._special: dict[Waiter, None] = {}
        """Pops of an administrator, for a lease group, or of a pull client."""
        self._filtered: dict[HeaderFilter, Line] = {}
        self._index = FilterIndex()
        self._unasked: deque[_Unasked] = deque()
        self._candidates: Iterator[HeaderFilter] | None = None
        """The filters that the first entry of ``_unasked`` was not compared with yet."""
        self._new: dict[HeaderFilter, None] = {}
        """Filters whose search has not begun yet."""
        self._search: tuple[HeaderFilter, Iterator[BufferedMessage]] | None = None
        """The search in progress: a filter, and the messages that it was not compared with yet."""
        self._short: dict[Waiter, None] = {}
        self._ending: deque[Waiter] = deque()
        """Pops whose wait time is over, but that have not ended yet."""
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate in the order in which the pops are served."""
        return iter(sorted(self._all, key=lambda waiter: waiter.position))

    def add(self, waiter: Waiter, *, first: bool) -> None:
        """Park ``waiter`` behind all other pops, or in front of them if ``first`` is True."""
        if first:
            self._first -= 1
        else:
            self._last += 1
        waiter.position = self._first if first else self._last
        waiter.when_due = self._end
        self._all[waiter] = None
        if waiter.short:
            self._short[waiter] = None
        line = self._line_for(waiter)
        if line is None:
            self._special[waiter] = None
            return
        line[waiter] = None
        if first:
            line.move_to_end(waiter, last=False)

    def remove(self, waiter: Waiter) -> None:
        """Remove ``waiter``. Idempotent."""
        if waiter not in self._all:
            return
        for waiters in (self._all, self._short, self._special, self._plain):
            waiters.pop(waiter, None)
        wanted = waiter.request.selection.filter
        line = None if wanted is None else self._filtered.get(wanted)
        if wanted is not None and line is not None:
            line.pop(waiter, None)
            if not line:
                del self._filtered[wanted]
                self._new.pop(wanted, None)
                self._index.remove(wanted)

    def has_admin(self) -> bool:
        return any(not waiter.request.selection.is_limited for waiter in self._special)

    def has_filters(self) -> bool:
        return bool(self._filtered)

    def filters(self, count_max: int) -> list[HeaderFilter]:
        """Return the filters of parked pops, at most ``count_max``."""
        return list(islice(self._filtered, count_max))

    def filtered_count(self) -> int:
        """Return the number of parked pops that have a filter."""
        return sum(map(len, self._filtered.values()))

    def give_up_short(self) -> None:
        """End the pops that wait only for messages that were at the broker when they began to wait (``short``)."""
        for waiter in self._short:
            waiter.give_up()

    def note_fresh(self, fresh: Iterable[BufferedMessage]) -> None:
        """Store fresh messages, which ``next_asked`` then compares with the filters."""
        by_facts: dict[Facts, list[BufferedMessage]] = {}
        for buffered in fresh:
            if buffered.message is not None:
                headers = buffered.message.headers
                facts = self._index.facts(headers)
                alike = by_facts.get(facts)
                if alike is None:
                    alike = by_facts[facts] = []
                    self._unasked.append(_Unasked(facts, headers, alike))
                alike.append(buffered)

    def has_unasked(self) -> bool:
        """Whether messages still have to be compared with filters."""
        return bool(self._unasked or self._new or self._search)

    def forget_unasked(self) -> None:
        """Drop the stored fresh messages without comparing them with filters, and end all searches."""
        self._unasked.clear()
        self._candidates = self._search = None
        self._new.clear()

    def next_asked(self, ready: Ready) -> FreshFor:
        """Compare filters with a limited number of messages. Return the filters that these pass, and the messages."""
        found = self._next_asked()
        left = COMPARED_AT_ONCE_MAX
        while left > 0 and (self._search or self._new):
            if self._search is None:
                wanted = next(iter(self._new))
                del self._new[wanted]
                self._search = wanted, iter(sorted(ready.offered(), key=_rank))
            wanted, messages = self._search
            some = list(islice(messages, left))
            if len(some) < left:
                self._search = None
            left -= len(some) + 1
            passing = [one for one in some if ready.can_be_taken(one) and one.message and wanted(one.message.headers)]
            if passing and wanted in self._filtered:
                found.setdefault(wanted, []).append(passing)
        return found

    def _next_asked(self) -> dict[HeaderFilter, list[list[BufferedMessage]]]:
        found: dict[HeaderFilter, list[list[BufferedMessage]]] = {}
        left = ASKED_AT_ONCE_MAX
        while self._unasked and left:
            facts, headers, alike = self._unasked[0]
            if any(buffered.state is MessageState.READY for buffered in alike):
                if self._candidates is None:
                    candidates = self._index.candidates(facts, headers)
                    self._candidates = merge(*candidates, key=self._first_position)
                for wanted in islice(self._candidates, left):
                    left -= 1
                    if wanted(headers) and wanted in self._filtered:
                        found.setdefault(wanted, []).append(alike)
            if left or self._candidates is None:
                self._unasked.popleft()
                self._candidates = None
        return found

    def _first_position(self, wanted: HeaderFilter) -> float:
        """Return the position of the first pop with the filter. Filters with lower positions are compared first."""
        line = self._filtered.get(wanted)
        return next(iter(line)).position if line else inf

    def turns(self, fresh: FreshFor | None) -> Turns:
        """Return the turns of the next serving. ``fresh`` is None if pops with filters can get no message now."""
        turns = [Turn(waiter, None, None) for waiter in self._special]
        if fresh is not None:
            turns += [_first_turn(self._filtered[wanted], messages) for wanted, messages in fresh.items()]
        if self._plain:
            turns.append(_first_turn(self._plain, None))
        lists = {id(alike): alike for many in (fresh or {}).values() for alike in many}
        return Turns(turns, [*chain.from_iterable(lists.values())])

    def _end(self, waiter: Waiter) -> None:
        if not self._ending:
            asyncio.get_running_loop().call_soon(self._end_some)
        self._ending.append(waiter)

    def _end_some(self) -> None:
        for _ in range(min(len(self._ending), ENDED_AT_ONCE_MAX)):
            self._ending.popleft().give_up()
        if self._ending:
            asyncio.get_running_loop().call_soon(self._end_some)

    def _line_for(self, waiter: Waiter) -> Line | None:
        selection = waiter.request.selection
        if not selection.is_choosy:
            return self._plain
        wanted = selection.filter
        if wanted is None:
            return None
        line = self._filtered.get(wanted)
        if line is None:
            line = self._filtered[wanted] = OrderedDict()
            self._new[wanted] = None
            self._index.add(wanted)
        return line


def _rank(buffered: BufferedMessage) -> int:
    return buffered.rank


def _first_turn(line: Line, fresh: list[list[BufferedMessage]] | None) -> Turn:
    return Turn(next(iter(line)), line, fresh)
