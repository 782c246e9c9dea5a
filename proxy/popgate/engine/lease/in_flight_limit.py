"""``max_in_flight`` of one subscription: how many more leases may be given now.

Owns what is known of that. A proxy that is alone counts what it has out. In a cluster the store counts, in the same
step in which it gives leases (``ports.limits``), and says how many are left; what others do meanwhile is found out when
it refuses, and then by asking it again and again while somebody waits for what is ready here.
"""

import random
from collections.abc import Callable

from popgate.domain.errors import RetryLater, TooManyInFlight
from popgate.domain.lease import GrantAnswer
from popgate.domain.message import BATCH_COUNT_MAX
from popgate.domain.names import InstanceId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.served_group import ServedGroup
from popgate.ports.leases import GrantRequest
from popgate.ports.limits import ASK_AGAIN_SECONDS, Limit, Limits, Vacancy
from popgate.runtime.deadlines import NEVER


class InFlightLimit:
    """``is_waited_for``: whether somebody wants what is ready; ``has_room`` is called when he may get some of it."""

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        *,
        is_waited_for: Callable[[], bool],
        has_room: Callable[[], object],
    ) -> None:
        self.timer = NEVER
        self._context = context
        self._group = group
        self._is_waited_for = is_waited_for
        self._has_room = has_room
        self._left: int | None = None
        """What the store has last said, less what was taken since; None: nothing yet."""
        self._is_full = False
        """Whether there is nothing left for anybody, where there is nothing left here."""
        self._under_way = 0
        """Messages that the store is being asked to lease."""
        self._looking = False

    def left(self) -> int:
        """How many more messages may be handed out now, as far as is known."""
        most = self._group.policy.max_in_flight
        if most is None:
            return BATCH_COUNT_MAX
        if self._counting() is None:
            return most - sum(host.state.counts.in_flight for host in self._group.hosts)
        return BATCH_COUNT_MAX if self._left is None else self._left

    def counting(self) -> Limits | None:
        """Who gives leases within the limit; None: whoever gives all others."""
        return None if self._group.policy.max_in_flight is None else self._counting()

    async def grant(self, limits: Limits, request: GrantRequest) -> list[GrantAnswer]:
        """As ``LeaseStore.grant``. Raises: as that."""
        count = len(request.entries)
        self._under_way += count
        try:
            answers, vacancy = await limits.grant(request, self._limit())
        finally:
            self._under_way -= count
        self._note(vacancy)
        return answers

    async def look(self, *, waits: bool = False) -> bool:
        """Ask how many are left; whether somebody who waits may get one soon. ``waits``: somebody does. Raises:
        StateUnavailable."""
        limits = self.counting()
        if limits is None:
            return self.left() > 0
        self._note(await limits.vacancy(self._limit(), waits=waits))
        return self.left() > 0 or not self._is_full

    async def raise_if_full(self) -> None:
        """Raises: TooManyInFlight, where as many are in flight as may be; StateUnavailable."""
        most = self._group.policy.max_in_flight
        if most is None or (not self._is_known_full() and await self.look()):
            return
        raise TooManyInFlight(
            f"{most} messages are in flight, the max_in_flight of this group: acknowledge some, or raise it",
            retry_after_seconds=1.0,
        )

    def taken(self, count: int) -> None:
        """So many are about to be handed out."""
        if self._left is not None:
            self._left = max(0, self._left - count)

    def fewer_out(self) -> None:
        """One of this proxy's leases has ended: whoever it was that the limit kept from it, it may be its turn."""
        if self._is_known_full():
            self._left = 1

    def changed(self) -> None:
        """The policy is another one."""
        self._left = None

    def look_soon(self) -> None:
        """Somebody waits: where nothing is left, ask again until there is."""
        if self._left == 0 and self.timer == NEVER:
            self._context.deadlines.schedule(self._context.clock.monotonic() + _pause(), self)

    def due(self, now: float) -> float | None:
        """The time to ask again."""
        if self._left != 0 or self.counting() is None or not self._is_waited_for():
            return None
        if not self._looking:
            self._looking = True
            self._context.background.spawn(self._look_again(), name=f"look for room in {self._group.name}")
        return now + _pause()

    async def _look_again(self) -> None:
        try:
            await self.look(waits=True)
        except RetryLater:
            pass  # the store is away: it is asked again
        finally:
            self._looking = False

    def _note(self, vacancy: Vacancy) -> None:
        self._left, self._is_full = max(0, vacancy.left - self._under_way), vacancy.is_full
        if self._left:
            self._has_room()
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
