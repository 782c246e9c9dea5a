"""The numbers that a `Consumer` keeps about itself. They only grow, and are written by its event loop only."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counters:
    """Read them from anywhere; each is exact, and together they are a moment apart at most."""

    popped: int = 0
    """Messages that came out of a pop."""
    handled: int = 0
    """Handlers that returned."""
    failed: int = 0
    """Handlers that raised; `Retry` and `Reject` are not counted here."""
    acked: int = 0
    released: int = 0
    """Leases given back: after a failure, a `Retry`, or a stop."""
    rejected: int = 0
    extended: int = 0
    """Extensions granted, several a message where its handler takes long."""
    leases_lost: int = 0
    """Leases that ended before they were settled: their messages are delivered again."""
    settlements_abandoned: int = 0
    """Settlements that the server could not be told before the lease ended or the consumer stopped."""
    calls_failed: int = 0
    """HTTP calls that failed and were or will be repeated."""
