"""Lists the queues of one subscription that could give more messages to pops, if they were opened or widened.

A pop that lacks messages looks only at these queues. A topic can have 256 queues, and a proxy may park a thousand pops
a second. A queue that is missing here would not deliver although it has messages. Therefore the hosts add a queue at
once, and the sets may contain more queues than necessary.
"""

from popgate.engine.context.engine_context import BufferBudget


class LackingQueues:
    """The numbers of such queues.

    A reader removes a number when it finds that the queue is no longer in the state that the set describes.
    """

    __slots__ = ("_budget", "_cuts", "constrained", "unopened")

    def __init__(self, budget: BufferBudget) -> None:
        self.unopened: set[int] = set()
        """At least all queues that this proxy owns and does not consume."""
        self.constrained: set[int] = set()
        """At least the queues whose prefetch is used up, whose channels are paused, or whose buffered bodies fill half
        of their memory share. Only the ``Flow`` of a queue changes this.

        The memory share also falls because of other queues. So the set is complete only after all flows of the
        subscription have called ``note``, if ``share_was_cut``.
        """
        self._budget = budget
        self._cuts = -1

    def share_was_cut(self) -> bool:
        """Return whether the memory share of a queue was lowered since the last call."""
        before, self._cuts = self._cuts, self._budget.cuts
        return before != self._cuts
