"""The state port's locks half: what administrators have said of locks, and how far fencing tokens were given.

Who holds a lock is not kept: a proxy that ends loses what it held (design: section 7).
"""

from typing import Protocol

from popgate.domain.locks import LockDefinition


class LockStore(Protocol):
    """All calls are on stable storage when they return, and raise StateUnavailable where that can't be."""

    async def definitions(self) -> list[LockDefinition]:
        """All of them, by name."""
        ...

    async def find(self, name: str) -> LockDefinition | None:
        """The one of that name."""
        ...

    async def put(self, definition: LockDefinition) -> None:
        """Add it, or replace the one of that name."""
        ...

    async def add(self, definition: LockDefinition) -> LockDefinition:
        """Add it, unless there is one of that name; the one that is there now."""
        ...

    async def delete(self, name: str) -> None:
        """Idempotent."""
        ...

    async def reserve_tokens(self, count: int, *, at_least: int) -> int:
        """The first of ``count`` tokens in a row which are higher than all that were reserved before, by any process,
        and not below ``at_least``."""
        ...
