"""The view of the replicas for requests to this process: cached, so that not each request asks the broker."""

import asyncio
from typing import NamedTuple

from popgate.ports.clock import Clock
from popgate.replicas.keeper import ReplicaKeeper
from popgate.replicas.keeper_lock import KeeperAtWork
from popgate.replicas.survey import Survey

FRESH_SECONDS = 2.0
"""Maximum age, in seconds, of the view."""


class ReplicaView(NamedTuple):
    """A survey. ``at_work``: the keeper that holds the lock, in this process or another."""

    survey: Survey
    at_work: KeeperAtWork | None


class CachedReplicaView:
    """Answers questions about replicas, also while this process's keeper only waits for the lock."""

    def __init__(self, keeper: ReplicaKeeper, clock: Clock) -> None:
        self.keeper = keeper
        self._clock = clock
        self._latest: ReplicaView | None = None
        self._looked_at = 0.0
        self._asking = asyncio.Lock()

    async def view(self) -> ReplicaView:
        """Return the present view. Raises: BrokerUnavailable, LockUnavailable."""
        async with self._asking:
            if self._latest is None or self._clock.monotonic() - self._looked_at > FRESH_SECONDS:
                self._latest = ReplicaView(await self.keeper.survey(), await self.keeper.at_work())
                self._looked_at = self._clock.monotonic()
            return self._latest
