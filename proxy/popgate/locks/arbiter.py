"""The interface of an arbiter, which decides which client gets a slot of a lock that the proxy holds.

There are two: RabbitMQ, which programs on AMQP use as well (``on_broker``), and a single proxy itself (``embedded``).
``hosted`` adds the rest that a client sees: tokens, and the times to live.
"""

from typing import Protocol

from popgate.domain.locks import LockDefinition
from popgate.locks.administration import LockStatus
from popgate.locks.grants import Grant


class Arbiter(Protocol):
    """Decides about slots. All calls except ``start`` and ``stop`` raise BrokerUnavailable or StateUnavailable if no
    decision is possible."""

    async def start(self) -> None:
        """Get ready to decide. Raises: StartupError, StateUnavailable."""
        ...

    async def stop(self) -> None:
        """Free all held slots. Idempotent, and safe before ``start``."""
        ...

    async def set_slots(self, definition: LockDefinition) -> None:
        """Set the number of slots that can be held. The holder of a removed slot notices it through its grant, and no
        other client gets that slot before. Raises: LockHeld."""
        ...

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        """Grant a slot, or return None if none becomes free in time. Waiting clients are served in order.

        A cancellation returns a slot that was granted meanwhile, and leaves the line.
        """
        ...

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        """Return the holders, and the number of waiting clients; None if the lock has no slot."""
        ...

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        """Take a slot away from a holder that is not this proxy's. Raises: LockHeld."""
        ...

    async def delete(self, definition: LockDefinition) -> None:
        """Delete the lock. Idempotent. Raises: LockHeld."""
        ...
