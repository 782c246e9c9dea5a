"""Limits how much the broker pushes to one queue's channel: tracks the prefetch, its use, and the buffered bytes.

This module decides without I/O when the prefetch changes; the queue host then changes it (``next_resize``). ``state``
decides which messages are requeued at the broker when memory runs out.

    OPEN -- budget passed, or no demand --> PAUSED (prefetch 0; messages beyond the budget are requeued)
      ^---- half of the budget is free, and there is demand ----'
"""

from popgate.engine.context.engine_context import BufferBudget
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.prefetch_window import PrefetchWindow


class Flow:
    """The prefetch credit and the memory of queue ``number``.

    ``held_bytes``: the memory of the queue's buffered messages. The flow adds the queue to ``lacking`` if the queue can
    deliver more only after the next ``widen``.
    """

    def __init__(self, budget: BufferBudget, number: int, lacking: LackingQueues) -> None:
        self._budget = budget
        self._number = number
        self._constrained = lacking.constrained
        self._window = PrefetchWindow()
        self._is_open = False
        self._prefetch = 0
        """The channel's prefetch, or its next prefetch while a resize is due or in progress."""
        self.is_resizing = self._is_asked = False
        self.held_count = 0
        """Number of deliveries of the present channel that are buffered, and neither settled nor requeued."""
        self._held_before = 0
        """How many of them use no credit, because the present prefetch does not include them."""
        self._credit_from_tag = 0
        self.last_tag = 0
        self.held_bytes = 0
        self._has_freed = False
        self._kept_bytes = 0

    # -- the channel ----------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Return the prefetch for a channel that is about to be opened."""
        self._budget.opened(self)
        self.held_count = self._held_before = self._credit_from_tag = self.last_tag = 0
        self.is_resizing = self._is_asked = False
        self._prefetch = self._window.restart(self._share_bytes)
        return self._prefetch

    def opened(self) -> None:
        self._is_open = True
        self.note()

    def closed(self) -> None:
        """Release the share of the memory budget, because the channel, or the attempt to open a channel, has ended."""
        self._is_open = self.is_resizing = self._is_asked = False
        self.held_count = self._held_before = 0
        self._budget.closed(self)
        if not self.is_half_full:
            self._constrained.discard(self._number)

    @property
    def is_paused(self) -> bool:
        """Whether the broker pushes nothing, because there is too little memory or no demand."""
        return self._is_open and self._prefetch == 0

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def _share_bytes(self) -> int:
        return self._budget.share_bytes()

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the buffered messages exceed the queue's memory share; 0 or less if they do not exceed it."""
        return self.held_bytes - self._kept_bytes - self._share_bytes

    @property
    def is_half_full(self) -> bool:
        return self.held_bytes - self._kept_bytes > self._share_bytes // 2

    @property
    def mean_bytes(self) -> float | None:
        """The mean memory of this queue's messages, in bytes; None before the first message."""
        return self._window.mean_bytes

    def keep(self, size: int) -> bool:
        """Reserve memory for a body that must stay in memory. Return False if too little memory is available."""
        if not self._budget.keep(size):
            return False
        self._kept_bytes += size
        return True

    def unkeep(self, size: int) -> None:
        """Release the memory that ``keep`` reserved for a body."""
        self._kept_bytes -= size
        self._budget.let_go(size)
        self.note()

    def took(self, tag: int, size: int) -> None:
        """Count a delivery of ``size`` bytes that has been buffered. The caller must call ``note`` afterwards."""
        if tag > self.last_tag:  # a batch of late deliveries may arrive before this one
            self.last_tag = tag
        self.held_count += 1
        self.held_bytes += size
        self._window.observe(size)

    def skipped(self, tag: int) -> None:
        """Record the tag of a delivery that is settled without being buffered."""
        self.last_tag = tag

    def returned(self, tag: int) -> None:
        """Free the prefetch credit of a buffered delivery that has been settled or requeued."""
        self.held_count -= 1
        if tag <= self._credit_from_tag:
            self._held_before -= 1

    def freed(self, size: int) -> None:
        """Subtract the ``size`` of a body that has been dropped from memory."""
        self.held_bytes -= size
        self._has_freed = True

    def note(self) -> None:
        """Add the queue to ``LackingQueues.constrained`` if its prefetch or half of its memory share is used up.

        This is called after each change that may use them up, so that no pop waits for a queue that delivers nothing. A
        paused channel has a prefetch of 0, which is always used up.
        """
        if (self._is_open and self.held_count - self._held_before >= self._prefetch) or self.is_half_full:
            self._constrained.add(self._number)

    # -- the prefetch ---------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """Raise the prefetch for pops that lack messages, if the prefetch is used up and memory is available."""
        if self.held_count - self._held_before < self._prefetch:
            if not self.is_half_full:
                self._constrained.discard(self._number)
            return
        if self.excess_bytes > 0:
            return
        if self._prefetch < self._window.prefetch:  # the channel was resumed only for some missing bodies
            self._resize(self._window.prefetch)
        else:
            self._resize(self._window.grown(self._share_bytes))

    def throttle(self) -> bool:
        """Pause the channel, because the memory share is exceeded. The channel will resume with a lower prefetch.

        Return True if only requeues to the broker free memory: the channel was already paused, or it is being paused
        and too much is still on the way. The answer of RabbitMQ to the pause comes behind everything that it has sent.
        """
        if self._prefetch:
            self._window.shrunk(self._share_bytes)
            self.pause()
            return False
        return not self.is_resizing or self.excess_bytes > self._share_bytes // 2

    def pause(self) -> None:
        self._has_freed = False
        self._resize(0)

    @property
    def may_resume(self) -> bool:
        """Whether memory was freed during a pause, and ``state`` has not yet checked whether it is enough."""
        return self._has_freed and self.is_paused

    def looked(self) -> None:
        """Reset ``may_resume``, because ``state`` has decided whether to resume."""
        self._has_freed = False

    def resume(self, needed: int) -> None:
        """End a pause with a prefetch of ``needed`` messages, or with the full prefetch if ``needed`` is 0."""
        self._resize(needed or self._window.prefetch)

    def _resize(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._is_asked = True
        self.note()

    @property
    def is_resize_due(self) -> bool:
        """Whether the channel has to be resized, and is not being resized yet."""
        return self._is_asked and self._is_open and not self.is_resizing

    def next_resize(self) -> int | None:
        """Return the prefetch to set on the channel, or None if the channel already has the right prefetch.

        A resize begins with the first call, and ends when a call returns None.
        """
        self.is_resizing = self._is_asked
        if not self._is_asked:
            return None
        self._is_asked = False
        self._held_before = self.held_count
        self._credit_from_tag = self.last_tag
        return self._prefetch

    def resize_failed(self) -> None:
        self.is_resizing = False
