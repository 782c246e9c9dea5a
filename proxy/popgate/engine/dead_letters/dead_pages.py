"""Divides the list of dead letters into pages.

Decides what a page contains, and where it begins if the letter before it (``after``) no longer exists. ``dead_walk``
reads the queue.
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
    """The parameters of a page.

    ``after``: the ``next`` of the previous page. ``cut`` shortens a message for the answer. ``answer_bytes`` returns
    the maximum size of a message in the answer. A page has at most ``ANSWER_BYTES_MAX`` bytes, but at least one
    message.
    """

    max_messages: int
    after: CopyId | None = None
    cut: Callable[[Message], Message] = lambda message: message
    answer_bytes: Callable[[Message], int] = size_of


class ListedLetter(NamedTuple):
    """A letter on a page. ``body_bytes``: the length of its whole body."""

    letter: Letter
    body_bytes: int


class Page(NamedTuple):
    """A page. ``dead``: the number of dead letters in the queue. ``next`` None: this is the last page."""

    letters: list[ListedLetter]
    dead: int
    next: CopyId | None


class PageBuilder:
    """Fills one page from a walk.

    Until the walk reaches the letter ``after`` (``is_there``), letters later than ``after`` are collected. They form
    the page if the walk never reaches that letter.
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
        """Add a letter to the page if it belongs to the page. Return False if the letter belongs to the next page."""
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
