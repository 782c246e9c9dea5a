"""Defines the interface of an arbiter, which decides which client of the proxy is granted a slot of a lock.

There are two implementations. In ``on_broker``, RabbitMQ decides, so that the locks also exclude programs that use
AMQP. In ``embedded``, a proxy that runs alone decides by itself. ``hosted`` adds the tokens and times to live that
clients of the proxy see.
"""

from typing import ClassVar, Protocol

from popgate.domain.locks import LockDefinition
from popgate.locks.administration import IsDue, LockStatus
from popgate.locks.grants import Grant


class Arbiter(Protocol):
    """Grants slots of locks.

    All methods except ``start`` and ``stop`` raise BrokerUnavailable or StateUnavailable if the arbiter can't decide at
    present.
    """

    keeps_queues: ClassVar[bool]
    """Whether a lock has queues on the broker, which would outlast a definition that is forgotten early."""

    async def start(self) -> None:
        """Start the arbiter, so that it can grant slots. Raises: StartupError, StateUnavailable."""
        ...

    async def stop(self) -> None:
        """Stop the arbiter, which frees all held slots. Idempotent, and safe before ``start``."""
        ...

    async def set_slots(self, definition: LockDefinition) -> None:
        """Set the number of slots of the lock to the number of open slots in ``definition``.

        The holder of a removed slot notices the removal when it verifies its grant. Before that, no other client is
        granted this slot.

        Raises: LockHeld.
        """
        ...

    async def take(self, definition: LockDefinition, *, holder: str, wait_seconds: float) -> Grant | None:
        """Grant a free slot, or return None if no slot becomes free within ``wait_seconds``.

        Waiting clients are granted slots in the order of their calls. If the call is cancelled, the client no longer
        waits, and a slot that was granted at the same moment is released.
        """
        ...

    async def status(self, definition: LockDefinition) -> LockStatus | None:
        """Return the slots, their holders and the number of waiting clients, or None if the lock has no slot."""
        ...

    async def force_release(self, definition: LockDefinition, number: int) -> None:
        """Release a slot that a program or another proxy holds, although the holder has not released it.

        Raises: LockHeld.

        If a client of this proxy holds the slot, ``HostedLocks`` ends the grant without this method.
        """
        ...

    async def delete(self, definition: LockDefinition, is_due: IsDue) -> None:
        """Delete the lock if ``is_due``, which is called while no other proxy changes the lock. Idempotent.

        Raises: LockHeld, and the errors of ``is_due``.
        """
        ...
