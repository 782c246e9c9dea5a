"""The numbers that a `Consumer` keeps about itself. They only grow, and are written by its event loop only."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counters:
    """Read them from anywhere; each is exact, and together they are a moment apart at most."""

    popped: int = 0
    """Messages that came out of a pop."""
    pulled: int = 0
    """Messages that came out of a pull, those included that come again because they were not handled."""
    handled: int = 0
    """Handlers that returned."""
    failed: int = 0
    """Handlers that raised; `Retry` and `Reject` are not counted here."""
    acked: int = 0
    committed: int = 0
    """Pulled messages that were settled."""
    released: int = 0
    """Leases given back: after a failure, a `Retry`, or a stop."""
    rejected: int = 0
    extended: int = 0
    """Extensions granted, several a message where its handler takes long."""
    leases_lost: int = 0
    """Leases that ended, and queues that were lost, before what was handled was settled: it is delivered again."""
    settlements_abandoned: int = 0
    """Settlements that the server could not be told before the lease ended or the consumer stopped."""
    mode_changes: int = 0
    """How often the consumer changed over between pop and pull."""
    calls_failed: int = 0
    """HTTP calls that failed and were or will be repeated."""
