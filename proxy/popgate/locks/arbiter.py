"""The seam of the locks that a proxy holds for its clients: who decides which of them gets a slot.

Two do: RabbitMQ, whom programs on AMQP ask as well (``on_broker``), and the proxy itself where it is alone
(``embedded``). Everything that a client sees beyond that, tokens, times to live and their ends, is ``hosted``'s.
"""

from typing import Protocol

from popgate.domain.locks import LockDefinition
from popgate.locks.administration import LockStatus
from popgate.locks.grants import Grant


class Arbiter(Protocol):
    """All calls but those of its life raise BrokerUnavailable or StateUnavailable where nothing can be decided."""

    async def start(self) -> None:
        """Raises: StartupError, StateUnavailable."""
        ...

    async def stop(self) -> None:
        """All that is held is free. Idempotent, and safe before ``start``."""
        ...

    async def set_slots(self, definition: LockDefinition) -> None:
        """From now on so many slots of it can be held. Who has one that is removed learns it by its grant, and nobody
        gets that slot before. Raises: LockHeld."""
        ...

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        """A slot, or None where none came to be free in time. Who waits is served in order.

        A cancellation gives back what there was, and leaves the line.
        """
        ...

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        """Who holds it and who waits; None where there is no slot to be held."""
        ...

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        """Take a slot away from a holder that is not this proxy's. Raises: LockHeld."""
        ...

    async def delete(self, definition: LockDefinition) -> None:
        """Remove all that is left of it. Idempotent. Raises: LockHeld."""
        ...
