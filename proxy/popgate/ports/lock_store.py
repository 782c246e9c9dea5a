"""Defines the part of the state port for locks: the locks that administrators defined, and the reserved fencing tokens.

The holders of locks are not stored, because a proxy that ends loses its locks (decision 19).
"""

from typing import Protocol

from popgate.domain.locks import LockDefinition


class LockStore(Protocol):
    """Stores lock definitions. A change is on stable storage when its call returns.

    All calls raise StateUnavailable when the store can't be reached or can't write.
    """

    async def definitions(self) -> list[LockDefinition]:
        """Return all definitions, sorted by name."""
        ...

    async def find(self, name: str) -> LockDefinition | None:
        """Return the definition of the lock ``name``, or None if it is not defined. Raises: Conflict if it can't be
        read."""
        ...

    async def put(self, definition: LockDefinition) -> None:
        """Store the definition. It replaces a definition with the same name."""
        ...

    async def add(self, definition: LockDefinition) -> LockDefinition:
        """Store the definition, unless a definition with this name exists. Return the definition that is stored now.

        Raises: Conflict if that can't be read.
        """
        ...

    async def delete(self, name: str) -> None:
        """Delete the definition of the lock ``name``. Idempotent."""
        ...

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        """Reserve ``count`` consecutive tokens, and return the first token.

        The tokens are higher than all tokens that any process reserved before, and not below ``at_least``.
        """
        ...
