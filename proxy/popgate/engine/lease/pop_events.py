"""The events that the parts for granting and ending leases report to the pops of their subscription."""

from typing import Protocol


class PopEvents(Protocol):
    """The pops of one subscription (``Serving``). Synchronous."""

    def changed(self) -> None:
        """Note that messages arrived, or no longer block other messages."""
        ...

    def serve_waiting(self) -> bool:
        """Serve the waiting pops soon, because they may get messages now. Return whether there are any."""
        ...

    def is_waited_for(self) -> bool:
        """Whether a pop would get a ready message if ``max_in_flight`` did not prevent it."""
        ...
