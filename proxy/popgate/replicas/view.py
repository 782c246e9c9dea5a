"""Provides surveys for requests to this process. They are cached, so that not every request queries the broker."""

import asyncio
from typing import NamedTuple

from popgate.ports.clock import Clock
from popgate.replicas.keeper import ReplicaKeeper
from popgate.replicas.keeper_lock import KeeperAtWork
from popgate.replicas.survey import Survey

FRESH_SECONDS = 2.0
"""Maximum age of a cached view, in seconds."""


class ReplicaView(NamedTuple):
    """A survey, and the keeper that holds the lock.

    ``at_work`` is a keeper in this process or in another process, or None if no keeper holds the lock.
    """

    survey: Survey
    at_work: KeeperAtWork | None


class CachedReplicaView:
    """Makes surveys with ``keeper``, and caches the latest one.

    This also works while ``keeper`` does not hold the lock.
    """

    def __init__(self, keeper: ReplicaKeeper, clock: Clock) -> None:
        self.keeper = keeper
        self._clock = clock
        self._latest: ReplicaView | None = None
        self._looked_at = 0.0
        self._asking = asyncio.Lock()

    async def view(self) -> ReplicaView:
        """Return a view that is at most ``FRESH_SECONDS`` old.

        Raises: BrokerUnavailable, PeerUnavailable, LockUnavailable.
        """
        async with self._asking:
            if self._latest is None or self._clock.monotonic() - self._looked_at > FRESH_SECONDS:
                self._latest = ReplicaView(await self.keeper.survey(), await self.keeper.at_work())
                self._looked_at = self._clock.monotonic()
            return self._latest
