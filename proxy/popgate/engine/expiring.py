"""Leases that ran out: their messages are ready again, now or after the delay that the retry policy asks for."""

import asyncio
from collections.abc import Callable, Sequence

from popgate.domain.errors import RetryLater
from popgate.domain.lease import SettleAction
from popgate.domain.names import Subscription
from popgate.domain.topics import RetryPolicy
from popgate.engine.held import Held, HeldState
from popgate.engine.room import Room
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry


class EndedLeases:
    """Those of one subscription. ``retry`` gives its present policy."""

    def __init__(self, room: Room, subscription: Subscription, retry: Callable[[], RetryPolicy]) -> None:
        self._room = room
        self._subscription = subscription
        self._retry = retry
        self._ended: list[Held] = []

    def add(self, held: Held) -> None:
        """A lease ran out. Collected, so that leases that end together cost one write."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._end)
        self._ended.append(held)

    def _end(self) -> None:
        now = self._room.clock.monotonic()
        ended = [held for held in dict.fromkeys(self._ended) if held.state is HeldState.LEASED and held.deadline <= now]
        self._ended = []
        retry = self._retry()
        self._room.journal.record(EventKind.EXPIRED, self._subscription, ended, self._room.clock.wall())
        delayed: list[Held] = []
        for held in ended:
            if retry.delay_seconds(held.delivery_count) > 0:
                delayed.append(held)
            else:
                held.host.make_ready([held])
        if delayed:
            self._room.background.spawn(self._delay_retries(delayed), name="delay retries")

    async def _delay_retries(self, ended: Sequence[Held]) -> None:
        """Write the retry delay into the records; where the store can't, the messages wait for it."""
        retry = self._retry()
        entries = [
            SettleEntry(
                held.host.broker_queue,
                held.copy_id,
                held.lease_id,
                SettleAction.EXPIRE,
                retry.delay_seconds(held.delivery_count),
            )
            for held in ended
        ]
        while True:
            try:
                answers = await self._room.leases.settle(entries)
                break
            except RetryLater as error:
                await asyncio.sleep(error.retry_after_seconds)
        for held, (_, remaining, record, _) in zip(ended, answers, strict=True):
            if held.state is not HeldState.LEASED:
                continue
            if record is None:
                held.host.make_ready([held])
            else:
                held.host.conform(held, record, remaining)
