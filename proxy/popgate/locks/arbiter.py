"""The interface of an arbiter, which decides which client is granted a slot of a lock that the proxy holds.

There are two arbiters: RabbitMQ, which programs on AMQP use as well (``on_broker``), and a proxy that runs alone
(``embedded``). ``hosted`` adds the tokens and the times to live that clients see.
"""

from typing import Protocol

from popgate.domain.locks import LockDefinition
from popgate.locks.administration import LockStatus
from popgate.locks.grants import Grant


class Arbiter(Protocol):
    """Grants slots. All calls except ``start`` and ``stop`` raise BrokerUnavailable or StateUnavailable if no decision
    is possible."""

    async def start(self) -> None:
        """Prepare to grant slots. Raises: StartupError, StateUnavailable."""
        ...

    async def stop(self) -> None:
        """Free all held slots. Idempotent, and safe before ``start``."""
        ...

    async def set_slots(self, definition: LockDefinition) -> None:
        """Set the number of slots that can be held.

        The holder of a removed slot notices the removal through its grant. No other client receives the slot before
        that.

        Raises: LockHeld.
        """
        ...

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        """Grant a slot, or return None if none becomes free in time. Waiting clients are served in order.

        If the call is cancelled, the client leaves the line, and a slot that was just granted is returned.
        """
        ...

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        """Return the holders and the number of waiting clients, or None if the lock has no slot."""
        ...

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        """Release a slot by force from a holder that does not hold it through this proxy. Raises: LockHeld."""
        ...

    async def delete(self, definition: LockDefinition) -> None:
        """Delete the lock. Idempotent. Raises: LockHeld."""
        ...
