"""Lets the users of one dead-letter queue take turns, and holds the queue's only walk.

A walk stays open after its owner's turn, so that the owner can continue in its next turn. If another owner needs a walk
meanwhile, the open one is closed, and its letters are in their old places again.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from popgate.domain.errors import RetryLater
from popgate.domain.names import Layout
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_moves import Overtaken
from popgate.engine.dead_letters.dead_walk import DeadWalk


class DeadTurns:
    """The turns at one queue. ``epoch``: the epoch of the claim; 0 while the queue is not claimed.

    ``closed``: this proxy does not own the letters, so there are no turns.
    """

    def __init__(self, context: EngineContext, layout: Layout) -> None:
        self.closed = context.router.cluster is not None
        self.epoch = 0
        self.turn = asyncio.Lock()
        """The lock of a turn. ``taken`` takes it."""
        self._context = context
        self._layout = layout
        self._walk: DeadWalk | None = None
        self._owner: object = None

    @property
    def held_count(self) -> int:
        """The number of dead letters that the open walk holds."""
        return self._walk.held_count if self._walk is not None else 0

    def begin(self) -> None:
        """Allow turns, because this proxy owns the letters. Idempotent."""
        if self.closed:
            self.closed, self.epoch = False, 0

    def check_open(self) -> None:
        """Raise RetryLater if this proxy does not own the letters."""
        if self.closed:
            raise shutting_down()

    @contextlib.asynccontextmanager
    async def taken(self, *, closes: bool = False) -> AsyncGenerator[None]:
        """Take a turn. Close the walk after an error, or if ``closes`` is set. Raises: RetryLater."""
        async with self.turn:
            self.check_open()
            try:
                yield
            except BaseException as error:
                if isinstance(error, Overtaken):
                    self.epoch = 0
                await self.close_walk()
                raise
            if closes or self.closed:
                await self.close_walk()

    def has_walk(self, owner: object) -> bool:
        """Whether the open walk is the one of ``owner``."""
        return self._walk is not None and self._owner is owner

    async def walk_of(self, owner: object) -> DeadWalk:
        """Return the open walk of ``owner``, or open a new walk. Call it in a turn."""
        if self._walk is not None and (self._owner is not owner or self._walk.ended):
            await self.close_walk()
        if self._walk is None:
            await self.claim()
            walk = DeadWalk(self._context, self._layout, epoch=self.epoch)
            await walk.open()
            self._walk, self._owner = walk, owner
        return self._walk

    async def close_walk(self, *, in_order: bool = True) -> None:
        """Close the open walk, if there is one. Call it in a turn, or when there are no turns any more."""
        walk, self._walk, self._owner = self._walk, None, None
        if walk is not None:
            await walk.close(in_order=in_order)

    async def claim(self) -> None:
        """Claim the queue if it is not claimed. Raises: StateUnavailable."""
        if not self.epoch:
            self.epoch = await self._context.leases.claim(self._layout.dead)


def shutting_down() -> RetryLater:
    """Return the error of a request for letters that this proxy does not own."""
    return RetryLater(
        "the proxy is shutting down, or the group is being changed, or moves to another proxy", retry_after_seconds=1.0
    )
