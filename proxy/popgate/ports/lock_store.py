"""Defines the locks part of the state port: the locks that administrators have defined, and the fencing tokens given so
far.

The holders of locks are not stored: a proxy that ends loses its locks (decision 19).
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
        """Return the definition of that name, or None."""
        ...

    async def put(self, definition: LockDefinition) -> None:
        """Add the definition, or replace the one of that name."""
        ...

    async def add(self, definition: LockDefinition) -> LockDefinition:
        """Add the definition unless one of that name exists; return the one that is stored now."""
        ...

    async def delete(self, name: str) -> None:
        """Delete the definition of that name. Idempotent."""
        ...

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        """Reserve ``count`` consecutive tokens and return the first.

        They are higher than all tokens that any process reserved before, and not below ``at_least``.
        """
        ...
