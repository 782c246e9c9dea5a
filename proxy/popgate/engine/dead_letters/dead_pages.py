"""Divides the list of dead letters into pages, and searches them.

This module decides which dead letters a page contains. It also decides where a page begins if the last dead letter of
the previous page (``after``) no longer exists. ``dead_walk`` reads the queue.

A search reads the whole queue, which may be long. So each page of a search ends after ``SEARCH_SECONDS``, even if it
has no dead letters yet, and the next page goes on behind the last dead letter that was compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from popgate.domain.letter_filter import LetterFilter
from popgate.domain.message import Message
from popgate.domain.names import CopyId
from popgate.engine.dead_letters.dead_walk import READ_COUNT, DeadWalk, Letter
from popgate.engine.lease.selection import ANSWER_BYTES_MAX
from popgate.engine.queue.buffered import size_of
from popgate.ports.clock import Clock

SEARCH_SECONDS = 5.0
"""Seconds after which a page of a search ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """The parameters of a request for a page of dead letters.

    ``after``: the ``next`` of the previous page, or None for the first page. ``cut`` shortens a message for the answer.
    ``answer_bytes`` returns an upper bound for the size that the shortened message takes in the answer. A page has at
    most ``max_messages`` dead letters and at most ``ANSWER_BYTES_MAX`` bytes, but at least one dead letter if there is
    one. ``filter``: only dead letters that meet these conditions. If ``max_messages`` is 0, the dead letters are only
    counted.
    """

    max_messages: int
    after: CopyId | None = None
    filter: LetterFilter | None = None
    cut: Callable[[Message], Message] = lambda message: message
    answer_bytes: Callable[[Message], int] = size_of

    @property
    def is_search(self) -> bool:
        """Whether dead letters are compared or counted, and not only listed."""
        return self.filter is not None or not self.max_messages


class ListedLetter(NamedTuple):
    """A dead letter on a page. ``body_bytes``: the length of its body before the body was shortened for the page."""

    letter: Letter
    body_bytes: int


class Page(NamedTuple):
    """One page of the list.

    ``dead``: the number of dead letters in the queue. ``next``: the ``after`` with which to request the next page; None
    if this is the last page. ``searched``: the number of dead letters that were compared for this page. ``matching``:
    how many of them met the conditions.
    """

    letters: list[ListedLetter]
    dead: int
    next: CopyId | None
    searched: int = 0
    matching: int = 0


class PageBuilder:
    """Fills one page with the dead letters of a walk.

    ``is_there``: whether the page begins at the walk's present place. If not, the walk first has to reach the dead
    letter ``after``. Meanwhile the builder collects dead letters with higher copy ids than ``after``, which were
    dead-lettered later. If the walk ends without reaching ``after``, these dead letters form the page.
    """

    def __init__(self, walk: DeadWalk, request: PageRequest, clock: Clock, *, is_there: bool) -> None:
        self.is_there = is_there
        self._walk = walk
        self._request = request
        self._clock = clock
        self._deadline = clock.monotonic() + SEARCH_SECONDS
        self._shown: list[ListedLetter] = []
        self._size = 0
        self._is_full = False
        self._last = request.after
        """The last dead letter that was compared, or the one behind which the page begins."""
        self._searched = 0
        self._matching = 0

    async def run(self) -> Page:
        while letters := await self._walk.read(READ_COUNT):
            for place, letter in enumerate(letters):
                if self.is_there and self._is_full:
                    self._walk.unread(letters[place:])
                    break
                if not self._take(letter):
                    self._walk.unread(letters[place:])
                    break
            if self.is_there and (self._is_full or self._is_late()):
                break
        more = self._is_full or (self.is_there and self._is_late())
        if more and self.is_there:
            following = await self._walk.read(1)
            self._walk.unread(following)
            more = bool(following)
        return Page(self._shown, self._walk.dead, self._last if more else None, self._searched, self._matching)

    def _is_late(self) -> bool:
        return self._request.is_search and self._clock.monotonic() > self._deadline

    def _take(self, letter: Letter) -> bool:
        """Add a dead letter if it is part of this page. Return False if it is the first one of the next page."""
        after = self._request.after
        if not self.is_there and letter.copy_id == after:
            self.is_there, self._is_full = True, False
            self._shown, self._size, self._last, self._searched, self._matching = [], 0, after, 0, 0
            return True
        if self._is_full or (not self.is_there and after is not None and letter.copy_id < after):
            return True
        is_wanted = self._request.filter is None or letter.meets(self._request.filter)
        if is_wanted and self._request.max_messages and not self._show(letter):
            return not self.is_there
        self._last = letter.copy_id
        self._searched += 1
        self._matching += is_wanted
        return True

    def _show(self, letter: Letter) -> bool:
        """Add a dead letter to the page. Return False if it does not fit."""
        message = self._request.cut(letter.message)
        self._size += self._request.answer_bytes(message)
        if self._shown and self._size > ANSWER_BYTES_MAX:
            self._is_full = True
            return False
        self._shown.append(ListedLetter(letter._replace(message=message), len(letter.message.body)))
        self._is_full = len(self._shown) >= self._request.max_messages
        return True
