"""The counters of a `Consumer`. They only grow, and only its event loop writes them."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts what a consumer has done. Any thread may read it: each counter is exact, but one read of all of them is
    not atomic."""

    popped: int = 0
    """Messages received by pops."""
    pulled: int = 0
    """Messages received by pulls, including those that are delivered again because they were not handled."""
    handled: int = 0
    """Handlers that returned."""
    failed: int = 0
    """Handlers that raised; `Retry` and `Reject` are not counted here."""
    acked: int = 0
    committed: int = 0
    """Pulled messages that were settled."""
    released: int = 0
    """Leases released after a failure, a `Retry`, or a stop."""
    rejected: int = 0
    extended: int = 0
    """Extensions granted; a message with a slow handler has several."""
    leases_lost: int = 0
    """Messages whose lease ended, or whose queue was lost, before they were settled: they are delivered again."""
    settlements_abandoned: int = 0
    """Settlements that could not be delivered to the server before the lease ended or the consumer stopped."""
    mode_changes: int = 0
    """Changes between pop and pull."""
    calls_failed: int = 0
    """Failed HTTP calls that were or will be repeated."""
