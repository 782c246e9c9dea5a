"""Applies ``max_in_flight`` of one subscription: decides how many more leases may be granted now.

Outside a cluster, the proxy counts its own leases. In a cluster, the store counts the leases of all proxies in the same
step in which it grants leases (``ports.limits``), and returns how many more leases may be granted. Until the next
answer, the proxy subtracts the messages that it takes from this number. While the number is 0, the proxy asks the store
repeatedly, as long as pops wait for messages that are ready on this proxy.
"""

import random

from popgate.domain.errors import RetryLater, TooManyInFlight
from popgate.domain.lease import GrantAnswer
from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_events import PopEvents
from popgate.engine.lease.served_group import ServedGroup
from popgate.ports.leases import GrantRequest
from popgate.ports.limits import ASK_AGAIN_SECONDS, Limit, Limits, Vacancy
from popgate.runtime.deadlines import NEVER


class InFlightLimit:
    """Limits the leases of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup, pops: PopEvents) -> None:
        self.timer = NEVER
        self._context = context
        self._group = group
        self._pops = pops
        self._left: int | None = None
        """How many more leases the store's last answer allows, minus the messages taken since then. None before the
        first answer."""
        self._is_full = False
        """Whether the limit was reached at the store's last answer (``Vacancy.is_full``). Used while ``_left`` is 0."""
        self._under_way = 0
        """Number of messages in grant requests that are in progress."""
        self._looking = False

    def left(self) -> int:
        """Return how many more messages may be handed out now, as far as this proxy knows."""
        most = self._group.policy.max_in_flight
        if most is None:
            return BATCH_COUNT_MAX
        if self._counting() is None:
            return most - sum(host.state.counts.in_flight for host in self._group.hosts)
        return BATCH_COUNT_MAX if self._left is None else self._left

    def counting(self) -> Limits | None:
        """Return the port that counts and grants the leases of all proxies. None: the lease store grants leases."""
        return None if self._group.policy.max_in_flight is None else self._counting()

    async def grant(self, limits: Limits, request: GrantRequest) -> list[GrantAnswer]:
        """Grant leases like ``LeaseStore.grant``, but at most as many as ``max_in_flight`` allows.

        Raises the same errors.
        """
        count = len(request.entries)
        self._under_way += count
        try:
            answers, vacancy = await limits.grant(request, self._limit())
        finally:
            self._under_way -= count
        self._note(vacancy)
        return answers

    async def look(self, *, waits: bool = False) -> bool:
        """Ask the store how many more leases may be granted. Return whether a waiting pop may get a lease soon.

        ``waits``: whether a pop is waiting. Raises: StateUnavailable.
        """
        limits = self.counting()
        if limits is None:
            return self.left() > 0
        self._note(await limits.vacancy(self._limit(), waits=waits))
        return self.left() > 0 or not self._is_full

    async def raise_if_full(self) -> None:
        """Raise TooManyInFlight if the maximum number of messages is in flight.

        Raises: TooManyInFlight, StateUnavailable.
        """
        most = self._group.policy.max_in_flight
        if most is None or (not self._is_known_full() and await self.look()):
            return
        raise TooManyInFlight(
            f"{most} messages are in flight, the max_in_flight of this group: acknowledge some, or raise it",
            retry_after_seconds=1.0,
        )

    def taken(self, count: int) -> None:
        """Subtract ``count`` messages, which are about to be leased, from the estimate."""
        if self._left is not None:
            self._left = max(0, self._left - count)

    def fewer_out(self) -> None:
        """If the limit was reached, allow one more lease, because a lease of this proxy has ended."""
        if self._is_known_full():
            self._left = 1

    def changed(self) -> None:
        """Discard the estimate, because the policy has changed."""
        self._left = None

    def look_soon(self) -> None:
        """If the limit is reached, schedule the next query to the store, because a pop may be waiting for room."""
        if self._left == 0 and self.timer == NEVER:
            self._context.deadlines.schedule(self._context.clock.monotonic() + _pause(), self)

    def due(self, now: float) -> float | None:
        """Ask the store again while no more leases may be granted and pops wait. Return the time of the next call."""
        if self._left != 0 or self.counting() is None or not self._pops.is_waited_for():
            return None
        if not self._looking:
            self._looking = True
            self._context.background.spawn(self._look_again(), name=f"look for room in {self._group.name}")
        return now + _pause()

    async def _look_again(self) -> None:
        try:
            await self.look(waits=True)
        except RetryLater:
            pass  # the store is unavailable: the next ``due`` asks again
        finally:
            self._looking = False

    def _note(self, vacancy: Vacancy) -> None:
        self._left, self._is_full = max(0, vacancy.left - self._under_way), vacancy.is_full
        if self._left:
            self._pops.serve_waiting()
        else:
            self.look_soon()

    def _is_known_full(self) -> bool:
        return self._left == 0 and self._is_full and self.counting() is not None

    def _counting(self) -> Limits | None:
        cluster = self._context.router.cluster
        return None if cluster is None else cluster.limits

    def _limit(self) -> Limit:
        most = self._group.policy.max_in_flight
        assert most is not None, "nothing is counted without a limit"
        return Limit(self._group.name, self._group.layout.queues, most, InstanceId(self._context.instance))


def _pause() -> float:
    return random.uniform(*ASK_AGAIN_SECONDS)
