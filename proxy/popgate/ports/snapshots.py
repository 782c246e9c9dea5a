"""Defines the port to copy the store while it is in use."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

Tell: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are copied so far, and the bytes of the store."""


class Snapshots(Protocol):
    """A store that can be copied while it is in use."""

    @property
    def schema(self) -> int:
        """The schema version of the store."""
        ...

    async def copy_to(self, target: Path, tell: Tell) -> None:
        """Copy the store to the new file ``target``. The copy is the committed state at the moment when this returns.

        If the caller is cancelled, copying ends soon. ``tell`` is called on another thread.

        Raises: RetryLater if the store can't be copied now.
        """
