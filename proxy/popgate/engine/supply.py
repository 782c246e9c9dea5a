"""How much the broker pushes to one queue's channel: its prefetch, what is used of it, and the memory it costs.

Owns the credit and the resizing of one channel. What is given back when memory runs out, or when nobody asks for
messages, is the queue host's choice.

    OPEN -- budget passed, or nobody asks --> PAUSED (prefetch 0; the host sheds what is too much)
      ^------- half of the budget is free and somebody asks -------'
"""

import logging
from collections.abc import Callable

from popgate.domain.errors import PopgateError
from popgate.domain.names import BrokerQueue
from popgate.engine.room import Room
from popgate.engine.window import Window
from popgate.ports.broker import Channel

_log = logging.getLogger(__name__)


class Supply:
    """The flow of messages into one queue host.

    ``wanted`` says whether somebody asks for messages, ``needed`` for how many bodies somebody waits whatever they
    cost; ``spare`` drops bodies that can be fetched again; ``paused`` is called once the broker has stopped,
    ``changed`` when it may go on.
    """

    def __init__(
        self,
        room: Room,
        queue: BrokerQueue,
        *,
        wanted: Callable[[], bool],
        needed: Callable[[], int],
        spare: Callable[[], None],
        paused: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._room = room
        self._queue = queue
        self._wanted = wanted
        self._needed = needed
        self._spare = spare
        self._paused = paused
        self._changed = changed
        self._window = Window()
        self._channel: Channel | None = None
        self._prefetch = 0
        """What the channel has, or gets by the resize under way."""
        self._resizing: Channel | None = None
        self._resize_asked = False
        self._credit_used = 0
        self._credit_from_tag = 0
        self._last_tag = 0
        self.held_bytes = 0
        self._kept_bytes = 0

    # -- the channel ----------------------------------------------------------------------------------------------

    def open(self) -> int:
        """The prefetch for a channel that is about to be opened."""
        self._room.buffer.opened(self)
        self._credit_used = self._credit_from_tag = self._last_tag = 0
        self._resize_asked = False
        self._prefetch = self._window.restart(self.share_bytes)
        return self._prefetch

    def began(self, channel: Channel) -> None:
        self._channel = channel

    def ended(self) -> None:
        """The channel, or the attempt to open one, has ended."""
        self._channel = None
        self._room.buffer.closed(self)

    @property
    def is_paused(self) -> bool:
        """Whether the broker was told to push nothing, for want of memory or of demand."""
        return self._channel is not None and self._prefetch == 0

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def share_bytes(self) -> int:
        return self._room.buffer.share_bytes()

    @property
    def excess_bytes(self) -> int:
        """How far the budget is passed; 0 or less where it isn't."""
        return self.held_bytes - self._kept_bytes - self.share_bytes

    @property
    def is_half_full(self) -> bool:
        return self.held_bytes - self._kept_bytes > self.share_bytes // 2

    @property
    def mean_bytes(self) -> float | None:
        """What a message of this queue costs; None before the first one."""
        return self._window.mean_bytes

    def keep(self, size: int) -> bool:
        """Count a body as one that has to stay (``Buffer.keep``); False where it can't."""
        if not self._room.buffer.keep(size):
            return False
        self._kept_bytes += size
        return True

    def let_go(self, size: int) -> None:
        """A body that was kept need not stay any more."""
        self._kept_bytes -= size
        self._room.buffer.let_go(size)

    def took(self, tag: int, size: int) -> None:
        """A delivery of ``size`` bytes is held."""
        if tag > self._last_tag:  # what came back late is handed over first
            self._last_tag = tag
        self._credit_used += 1
        self.held_bytes += size
        self._window.observe(size)

    def passed(self, tag: int) -> None:
        """A delivery came that is not held: it was settled at once."""
        self._last_tag = tag

    def returned(self, tag: int) -> None:
        """A delivery that was held is settled or given back."""
        if tag > self._credit_from_tag:
            self._credit_used -= 1

    def freed(self, size: int) -> None:
        """A body of ``size`` bytes is forgotten."""
        self.held_bytes -= size
        if self._prefetch == 0:
            self._resume()

    # -- the flow -------------------------------------------------------------------------------------------------

    def starve(self) -> None:
        """A pop wanted more than is here: widen the window if the broker may be waiting for that."""
        if self.is_half_full:
            self._spare()
        if self._channel is None or self._is_resizing:
            return
        if self._prefetch == 0:
            self._resume()
        elif self.excess_bytes <= 0 and self._credit_used >= self._prefetch:
            if self._prefetch < self._window.prefetch:  # it was resumed for bodies that somebody waited for, no more
                self._resize(self._window.prefetch)
            else:
                self._resize(self._window.grown(self.share_bytes))

    def throttle(self) -> None:
        """The budget is passed: pause, and go on with a narrower window."""
        if self._prefetch:
            self._window.shrunk(self.share_bytes)
            self.pause()
        elif not self._is_resizing:
            self._paused()  # what was under way when the broker stopped

    def pause(self) -> None:
        self._resize(0)

    @property
    def _is_resizing(self) -> bool:
        return self._resizing is not None and self._resizing is self._channel

    def _resume(self) -> None:
        if self._channel is None:
            return
        if not self.is_half_full and self._wanted():
            self._resize(self._window.prefetch)
        elif needed := self._needed():
            self._resize(needed)

    def _resize(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._resize_asked = True
        channel = self._channel
        if channel is not None and not self._is_resizing:
            self._resizing = channel
            self._room.background.spawn(self._resize_channel(channel), name=f"resize {self._queue}")

    async def _resize_channel(self, channel: Channel) -> None:
        try:
            while self._resize_asked and self._channel is channel:
                self._resize_asked = False
                self._credit_used = 0
                self._credit_from_tag = self._last_tag
                await channel.resize(self._prefetch)
        except PopgateError as error:  # then the channel is lost, and the host knows
            _log.warning("a channel could not be resized", extra={"queue": self._queue, "error": error.detail})
        finally:
            if self._resizing is channel:
                self._resizing = None
        if self._channel is channel:
            if self._prefetch == 0:
                self._paused()
            self._changed()  # what the new size brought may be taken already
