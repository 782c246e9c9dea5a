"""Divides the list of dead letters into pages.

This module decides which dead letters a page contains. It also decides where a page begins if the last dead letter of
the previous page (``after``) no longer exists. ``dead_walk`` reads the queue.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from popgate.domain.message import Message
from popgate.domain.names import CopyId
from popgate.engine.dead_letters.dead_walk import READ_COUNT, DeadWalk, Letter
from popgate.engine.lease.selection import ANSWER_BYTES_MAX
from popgate.engine.queue.buffered import size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """The parameters of a request for a page of dead letters.

    ``after``: the ``next`` of the previous page, or None for the first page. ``cut`` shortens a message for the answer.
    ``answer_bytes`` returns an upper bound for the size that the shortened message takes in the answer. A page has at
    most ``max_messages`` dead letters and at most ``ANSWER_BYTES_MAX`` bytes, but always at least one dead letter.
    """

    max_messages: int
    after: CopyId | None = None
    cut: Callable[[Message], Message] = lambda message: message
    answer_bytes: Callable[[Message], int] = size_of


class ListedLetter(NamedTuple):
    """A dead letter on a page. ``body_bytes``: the length of its body before the body was shortened for the page."""

    letter: Letter
    body_bytes: int


class Page(NamedTuple):
    """One page of the list.

    ``dead``: the number of dead letters in the queue. ``next``: the ``after`` with which to request the next page; None
    if this is the last page.
    """

    letters: list[ListedLetter]
    dead: int
    next: CopyId | None


class PageBuilder:
    """Fills one page with the dead letters of a walk.

    ``is_there``: whether the page begins at the walk's present place. If not, the walk first has to reach the dead
    letter ``after``. Meanwhile the builder collects dead letters with higher copy ids than ``after``, which were
    dead-lettered later. If the walk ends without reaching ``after``, these dead letters form the page.
    """

    def __init__(self, walk: DeadWalk, request: PageRequest, *, is_there: bool) -> None:
        self.is_there = is_there
        self._walk = walk
        self._request = request
        self._shown: list[ListedLetter] = []
        self._size = 0
        self._is_full = False

    async def run(self) -> Page:
        while not (self.is_there and self._is_full):
            letters = await self._walk.read(READ_COUNT)
            if not letters:
                break
            for place, letter in enumerate(letters):
                if self.is_there and self._is_full:
                    self._walk.unread(letters[place:])
                    break
                if not self._take(letter):
                    self._walk.unread(letters[place:])
                    break
        more = self._is_full
        if more and self.is_there:
            following = await self._walk.read(1)
            self._walk.unread(following)
            more = bool(following)
        return Page(self._shown, self._walk.dead, self._shown[-1].letter.copy_id if more else None)

    def _take(self, letter: Letter) -> bool:
        """Add a dead letter if it is part of this page. Return False if it is the first one of the next page."""
        after = self._request.after
        if not self.is_there and letter.copy_id == after:
            self.is_there, self._is_full = True, False
            self._shown, self._size = [], 0
            return True
        if self._is_full or (not self.is_there and after is not None and letter.copy_id < after):
            return True
        message = self._request.cut(letter.message)
        self._size += self._request.answer_bytes(message)
        if self._shown and self._size > ANSWER_BYTES_MAX:
            self._is_full = True
            return not self.is_there
        self._shown.append(ListedLetter(letter._replace(message=message), len(letter.message.body)))
        self._is_full = len(self._shown) >= self._request.max_messages
        return True
