"""Lets requests and redrives take turns at one dead-letter queue, and stores the queue's open walk.

Each walk has an owner, for example a redrive. A walk can stay open after its owner's turn, so that the owner continues
the walk in its next turn. If another owner needs a walk in the meantime, the open walk is closed first, and its
unsettled dead letters return to their old places.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from popgate.domain.errors import RetryLater
from popgate.domain.names import Layout
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_moves import Overtaken
from popgate.engine.dead_letters.dead_walk import READ_COUNT, DeadWalk, Letter


class DeadTurns:
    """Allows one turn at a time at one dead-letter queue.

    ``epoch``: the epoch of this proxy's claim on the queue; 0 while the queue is not claimed. ``closed``: whether turns
    are refused, because this proxy does not own the dead letters.
    """

    def __init__(self, context: EngineContext, layout: Layout) -> None:
        self.closed = context.router.cluster is not None
        self.epoch = 0
        self.turn = asyncio.Lock()
        """The lock that is locked during a turn. ``taken`` locks it."""
        self._context = context
        self._layout = layout
        self._walk: DeadWalk | None = None
        self._owner: object = None

    @property
    def held_count(self) -> int:
        """The number of dead letters that are unsettled on the open walk's channel; 0 if no walk is open."""
        return self._walk.held_count if self._walk is not None else 0

    def begin(self) -> None:
        """Allow turns, because this proxy owns the dead letters. Idempotent."""
        if self.closed:
            self.closed, self.epoch = False, 0

    def check_open(self) -> None:
        """Raise RetryLater if this proxy does not own the dead letters."""
        if self.closed:
            raise shutting_down()

    @contextlib.asynccontextmanager
    async def taken(self, *, closes: bool = False) -> AsyncGenerator[None]:
        """Wait for a turn, which lasts until the context exits.

        At the exit, close the open walk if ``closes`` is True, if the body raised an error, or if this proxy no longer
        owns the dead letters. Raises: RetryLater.
        """
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
        """Whether a walk is open and belongs to ``owner``."""
        return self._walk is not None and self._owner is owner

    async def walk_of(self, owner: object) -> DeadWalk:
        """Return the open walk of ``owner``. If it has none, open a new walk. Call this method only in a turn."""
        if self._walk is not None and (self._owner is not owner or self._walk.ended):
            await self.close_walk()
        if self._walk is None:
            await self.claim()
            walk = DeadWalk(self._context, self._layout, epoch=self.epoch)
            await walk.open()
            self._walk, self._owner = walk, owner
        return self._walk

    async def search(
        self, is_wanted: Callable[[Letter], bool], *, count_max: int, seconds: float
    ) -> tuple[list[Letter], bool]:
        """Return the first wanted dead letters, in a turn of its own.

        The second result is whether ``count_max`` were found, or all dead letters were compared within ``seconds``.
        """
        found: list[Letter] = []
        deadline = self._context.clock.monotonic() + seconds
        async with self.taken(closes=True):
            walk = await self.walk_of(is_wanted)
            while letters := await walk.read(READ_COUNT):
                found += filter(is_wanted, letters)
                if len(found) >= count_max:
                    return found[:count_max], True
                if self._context.clock.monotonic() > deadline:
                    return found, False
        return found, True

    async def close_walk(self, *, in_order: bool = True) -> None:
        """Close the open walk, if there is one. Call this method only in a turn, or when turns are refused."""
        walk, self._walk, self._owner = self._walk, None, None
        if walk is not None:
            await walk.close(in_order=in_order)

    async def claim(self) -> None:
        """Claim the queue if it is not claimed. Raises: StateUnavailable."""
        if not self.epoch:
            self.epoch = await self._context.leases.claim(self._layout.dead)


def shutting_down() -> RetryLater:
    """Return the error for a request for dead letters that this proxy does not own."""
    return RetryLater(
        "the proxy is shutting down, or the group is being changed, or moves to another proxy", retry_after_seconds=1.0
    )
