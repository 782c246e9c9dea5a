"""Defines the limits port, which limits the leases of a subscription across all proxies of a cluster.

Theory of operation. The store counts the leases of every subscription that has a limit, in the step that writes their
records. So a lease counts from its grant until it is settled, given back, moved or expired, regardless of the proxy
that does it, and the count outlives every proxy. When a limit is first used, the store counts the leases that exist
already. Nothing is reserved, so nothing has to be given back.

A refused proxy stays in line as long as it asks again within half a second each time (``ASK_AGAIN_SECONDS``). After a
fifth of a second, all proxies that are behind it in line leave one lease for it. So no proxy's queues starve.

All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from popgate.domain.lease import GrantAnswer
from popgate.domain.names import BrokerQueue, InstanceId, Subscription
from popgate.ports.leases import GrantRequest

ASK_AGAIN_SECONDS = (0.04, 0.08)
"""Minimum and maximum seconds until a refused proxy asks again."""


class Limit(NamedTuple):
    """Allows at most ``in_flight_max`` leases of ``subscription``, which has these ``queues``. ``member``: the proxy
    that asks."""

    subscription: Subscription
    queues: Sequence[BrokerQueue]
    in_flight_max: int
    member: InstanceId


class Vacancy(NamedTuple):
    """The number of leases that the proxy may still grant (``left``).

    ``is_full``: the limit is reached. If ``left`` is 0 without ``is_full``, other proxies are ahead in line, or the
    store has not yet counted the existing leases.
    """

    left: int
    is_full: bool


class Limits(Protocol):
    async def grant(self, request: GrantRequest, limit: Limit) -> tuple[list[GrantAnswer], Vacancy]:
        """Grant as ``LeaseStore.grant`` does, within ``limit``, in one atomic step; also return the vacancy afterwards.

        Entries beyond the limit answer FULL, starting from the end of the batch.
        """
        ...

    async def vacancy(self, limit: Limit, *, waits: bool) -> Vacancy:
        """Return the vacancy. ``waits``: the proxy has pops that want leases, and gets in line if nothing is left."""
        ...

    async def keep(self, subscriptions: Collection[Subscription]) -> None:
        """Stop counting for all other subscriptions. If one is used again, its leases are counted from its records."""
        ...
