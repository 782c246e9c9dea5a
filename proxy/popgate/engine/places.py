"""The places of one queue's messages: their ranks among all that is ready, and their lines.

Owns when a message that came back gets its place: once all that came back is here, for the broker may deliver it in
another order (``lines``). Something new proves that, or a queue that has nothing else to deliver.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from popgate.domain.errors import PopgateError
from popgate.domain.names import CopyId, Layout
from popgate.engine.held import Held, HeldState
from popgate.engine.lines import Lines
from popgate.engine.room import Room
from popgate.ports.broker import Channel, Delivery

_log = logging.getLogger(__name__)

SORT_SECONDS, SORT_SECONDS_MAX = 0.02, 0.3
"""How often the broker is asked whether all that came back was delivered: at first, and where it takes long."""
_MICROSECONDS = 1_000_000
_SEQUENCE_BITS = 36
_ONE_LINE = ""
"""The key of all messages where they stand in one line."""


class Places:
    """``next_sequence`` tells messages of one moment apart; ``is_one_line`` says whether all stand in one line;
    ``became_ready`` is told who may be handed out now, and ``sorted_out`` is called when all that came back has its
    place; ``starve`` asks the broker for more, ``give_back`` for a body that was forgotten while its message waited.
    """

    def __init__(
        self,
        room: Room,
        layout: Layout,
        held: Mapping[CopyId, Held],
        *,
        next_sequence: Callable[[], int],
        is_one_line: Callable[[], bool],
        became_ready: Callable[[Sequence[Held]], None],
        sorted_out: Callable[[], None],
        starve: Callable[[], None],
        give_back: Callable[[Held], None],
    ) -> None:
        self._room = room
        self._layout = layout
        self._held = held
        self._next_sequence = next_sequence
        self._is_one_line = is_one_line
        self._became_ready = became_ready
        self._sorted_out = sorted_out
        self._starve = starve
        self._give_back = give_back
        self._lines = Lines()
        self._last_rank = 0
        self._sorting: Channel | None = None

    @property
    def is_sorting(self) -> bool:
        """Whether some wait until all that came back is here."""
        return self._sorting is not None

    def begin(self) -> None:
        """A channel is about to be opened."""
        self._last_rank = 0

    def give(self, held: Held, delivery: Delivery, wall: float) -> None:
        """``held`` was delivered for the first time on this channel."""
        message = delivery.message
        held.rank = self._rank(message.waiting_since, wall)
        key = _ONE_LINE if self._is_one_line() else message.ordering_key
        if delivery.returned and delivery.identified and not self._layout.adopted:
            if key is not None:
                self._lines.join_later(held, key, message)
            return
        if not self._lines.is_sorted:  # it never came back, so all that did is here
            self._line_up()
        if key is not None:
            self._lines.join(held, key)

    def sort_soon(self, channel: Channel | None) -> None:
        """Line up what came back on ``channel`` when all of it is here."""
        if self._lines.is_sorted or channel is None or channel is self._sorting:
            return
        self._sorting = channel
        self._room.background.spawn(self._sort(channel), name=f"sort {self._layout.subscription}")

    def left(self, held: Held) -> None:
        """``held`` was dropped: whoever stood behind it may be handed out."""
        following = self._lines.leave(held)
        if following is not None:
            self._became_first([following])

    def dissolve(self) -> None:
        """The channel has ended, and the queue delivers everything again: until then nobody stands behind anybody."""
        self._sorting = None
        if self._lines.dissolve():
            for held in self._held.values():
                held.key = held.behind = None
                held.is_first = True

    async def _sort(self, channel: Channel) -> None:
        pause = SORT_SECONDS
        try:
            while not self._lines.is_sorted and self._sorting is channel:
                backlog = await channel.backlog()
                given_back = sum(held.tag is None and held.rank != 0 for held in self._held.values())
                if self._sorting is channel and backlog <= given_back:
                    self._line_up()
                    break
                self._starve()
                await asyncio.sleep(pause)
                pause = min(2 * pause, SORT_SECONDS_MAX)
        except PopgateError as error:  # then the channel is lost, and the next one sees it all again
            _log.info("what came back could not be sorted", extra={"error": error.detail})
        finally:
            if self._sorting is channel:
                self._sorting = None

    def _line_up(self) -> None:
        self._became_first(self._lines.line_up())
        self._sorted_out()

    def _became_first(self, many: Iterable[Held]) -> None:
        """Those of them that nobody has may be handed out now."""
        ready: list[Held] = []
        for held in many:
            if held.state is HeldState.READY:
                if held.message is None:
                    self._give_back(held)
                else:
                    ready.append(held)
        if ready:
            self._became_ready(ready)

    def _rank(self, waiting_since: float, wall: float) -> int:
        """Queue order within this queue, oldest first across queues.

        Only popgate's own time stamps count, and never a future one, so that no clock starves a queue.
        """
        moment = wall if self._layout.adopted else min(wall, waiting_since)
        self._last_rank = max(self._last_rank, int(moment * _MICROSECONDS))
        return (self._last_rank << _SEQUENCE_BITS) + self._next_sequence()
