"""How much the broker pushes to one queue's channel: the prefetch, what is used of it, and the memory that it costs.

Decides, and does no I/O: the host carries a resize out (``next_resize``). Which messages go back when memory runs out
is the decision of ``state``.

    OPEN -- budget passed, or no demand --> PAUSED (prefetch 0; messages beyond the budget are requeued)
      ^---- half of the budget is free, and there is demand ----'
"""

from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.prefetch_window import PrefetchWindow


class Flow:
    """The credit and the memory of one queue. ``held_bytes``: what its buffered bodies take."""

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self._window = PrefetchWindow()
        self._is_open = False
        self._prefetch = 0
        """What the channel has, or gets by the resize under way."""
        self.is_resizing = self._is_asked = False
        self._credit_used = 0
        self._credit_from_tag = 0
        self.last_tag = 0
        self.held_bytes = 0
        self._has_freed = False
        self._kept_bytes = 0

    # -- the channel ----------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Return the prefetch for a channel that is about to be opened."""
        self._budget.opened(self)
        self._credit_used = self._credit_from_tag = self.last_tag = 0
        self.is_resizing = self._is_asked = False
        self._prefetch = self._window.restart(self._share_bytes)
        return self._prefetch

    def opened(self) -> None:
        self._is_open = True

    def closed(self) -> None:
        """The channel, or the attempt to open one, has ended."""
        self._is_open = self.is_resizing = self._is_asked = False
        self._budget.closed(self)

    @property
    def is_paused(self) -> bool:
        """Whether the broker pushes nothing, because memory or demand is missing."""
        return self._is_open and self._prefetch == 0

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def _share_bytes(self) -> int:
        return self._budget.share_bytes()

    @property
    def excess_bytes(self) -> int:
        """Bytes beyond the budget; 0 or less if there are none."""
        return self.held_bytes - self._kept_bytes - self._share_bytes

    @property
    def is_half_full(self) -> bool:
        return self.held_bytes - self._kept_bytes > self._share_bytes // 2

    @property
    def mean_bytes(self) -> float | None:
        """The memory that a message of this queue takes; None before the first one."""
        return self._window.mean_bytes

    def keep(self, size: int) -> bool:
        """Count a body as one that has to stay (``BufferBudget.keep``). Return False if it can't."""
        if not self._budget.keep(size):
            return False
        self._kept_bytes += size
        return True

    def unkeep(self, size: int) -> None:
        """A body that was kept need not stay any more."""
        self._kept_bytes -= size
        self._budget.let_go(size)

    def took(self, tag: int, size: int) -> None:
        """A delivery of ``size`` bytes is buffered."""
        if tag > self.last_tag:  # a batch of late deliveries may come first
            self.last_tag = tag
        self._credit_used += 1
        self.held_bytes += size
        self._window.observe(size)

    def skipped(self, tag: int) -> None:
        """A delivery was settled at once."""
        self.last_tag = tag

    def returned(self, tag: int) -> None:
        """A delivery that was buffered is settled or requeued."""
        if tag > self._credit_from_tag:
            self._credit_used -= 1

    def freed(self, size: int) -> None:
        """A body of ``size`` bytes is forgotten."""
        self.held_bytes -= size
        self._has_freed = True

    # -- the prefetch ---------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """Pops want more than is here: widen the window if the broker may be waiting for that."""
        if self.excess_bytes > 0 or self._credit_used < self._prefetch:
            return
        if self._prefetch < self._window.prefetch:  # it was resumed for the bodies that were needed, and no more
            self._resize(self._window.prefetch)
        else:
            self._resize(self._window.grown(self._share_bytes))

    def throttle(self) -> bool:
        """The budget is passed: pause, and go on with a narrower window later.

        Return whether the channel is paused already, so that only giving messages back helps.
        """
        if self._prefetch:
            self._window.shrunk(self._share_bytes)
            self.pause()
            return False
        return not self.is_resizing

    def pause(self) -> None:
        self._has_freed = False
        self._resize(0)

    @property
    def may_resume(self) -> bool:
        """Whether memory was freed during a pause, and ``state`` has not looked yet whether it is enough."""
        return self._has_freed and self.is_paused

    def looked(self) -> None:
        """``state`` has decided whether to resume."""
        self._has_freed = False

    def resume(self, needed: int) -> None:
        """Go on after a pause, for at most ``needed`` messages; 0: with the whole window."""
        self._resize(needed or self._window.prefetch)

    def _resize(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._is_asked = True

    @property
    def is_resize_due(self) -> bool:
        """Whether the channel has to be resized, and is not being resized yet."""
        return self._is_asked and self._is_open and not self.is_resizing

    def next_resize(self) -> int | None:
        """Return the prefetch to give the channel now; None: it has the right one.

        A resize begins with the first call, and has ended when a call returns None.
        """
        self.is_resizing = self._is_asked
        if not self._is_asked:
            return None
        self._is_asked = False
        self._credit_used = 0
        self._credit_from_tag = self.last_tag
        return self._prefetch

    def resize_failed(self) -> None:
        self.is_resizing = False
