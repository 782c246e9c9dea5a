"""Defines the calls with which the parts that grant and end leases notify the pops of their subscription."""

from typing import Protocol


class PopEvents(Protocol):
    """The pops of one subscription, as implemented by ``Serving``. All calls are synchronous."""

    def changed(self) -> None:
        """Check the parked pops soon, because messages have arrived, or no longer block other messages."""
        ...

    def serve_waiting(self) -> bool:
        """Serve the waiting pops soon, because they may get messages now. Return whether any pops wait."""
        ...

    def is_waited_for(self) -> bool:
        """Whether a waiting pop would get a ready message if ``max_in_flight`` did not prevent it."""
        ...
