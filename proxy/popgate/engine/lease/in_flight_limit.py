"""Applies ``max_in_flight`` of one subscription: decides how many more leases may be granted now.

Owns this proxy's estimate of the number of leases left. Outside a cluster, the proxy counts its own leases. In a
cluster, the store counts in the same step in which it grants leases (``ports.limits``), and returns how many are left.
A proxy notices the leases of the other proxies when the store's answer leaves none. It then asks the store repeatedly
while pops wait for messages that are ready here.
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
        """The number in the store's last answer, minus the messages taken since then; None: no answer yet."""
        self._is_full = False
        """Whether the limit is reached (``Vacancy.is_full``). Used only if this proxy has no leases left."""
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
        """Return the port that grants leases within the limit; None: the lease store grants them as usual."""
        return None if self._group.policy.max_in_flight is None else self._counting()

    async def grant(self, limits: Limits, request: GrantRequest) -> list[GrantAnswer]:
        """Grant leases within the limit. Otherwise do the same, and raise the same errors, as ``LeaseStore.grant``."""
        count = len(request.entries)
        self._under_way += count
        try:
            answers, vacancy = await limits.grant(request, self._limit())
        finally:
            self._under_way -= count
        self._note(vacancy)
        return answers

    async def look(self, *, waits: bool = False) -> bool:
        """Ask the store how many leases are left. Return whether a waiting pop may get a lease soon.

        ``waits``: a pop is waiting. Raises: StateUnavailable.
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
        """Note that ``count`` messages are about to be handed out."""
        if self._left is not None:
            self._left = max(0, self._left - count)

    def fewer_out(self) -> None:
        """Allow one more attempt if the limit is reached, because one of this proxy's leases has ended."""
        if self._is_known_full():
            self._left = 1

    def changed(self) -> None:
        """Forget the number that is left, because the policy has changed."""
        self._left = None

    def look_soon(self) -> None:
        """Schedule the next request to the store if no leases are left. A pop may be waiting."""
        if self._left == 0 and self.timer == NEVER:
            self._context.deadlines.schedule(self._context.clock.monotonic() + _pause(), self)

    def due(self, now: float) -> float | None:
        """Ask the store again while no leases are left and pops wait."""
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
