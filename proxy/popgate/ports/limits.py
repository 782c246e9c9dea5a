"""Defines the limits port, which limits the leases of a subscription across all proxies of a cluster.

Theory of operation. The store counts the leases of every subscription that has a limit, in the same step that writes
the lease records. So a lease counts from its grant until it is settled, released, moved or expired, no matter which
proxy does this. The count does not depend on any running proxy. When a limit is first used, the store counts the leases
that exist already. Proxies reserve no leases in advance, so they need not return any.

A refused proxy stands in line as long as it asks again within half a second each time. It should ask again after
``ASK_AGAIN_SECONDS``. When it has stood in line for a fifth of a second, every proxy that came later, or that does not
stand in line, may grant one lease less. So the queues of every proxy get leases.

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
    """The limit of a subscription: at most ``in_flight_max`` leases at the same time.

    ``queues``: all queues of the subscription. ``member``: the proxy that asks.
    """

    subscription: Subscription
    queues: Sequence[BrokerQueue]
    in_flight_max: int
    member: InstanceId


class Vacancy(NamedTuple):
    """The number of leases that a proxy may still grant (``left``).

    ``is_full``: the limit is reached. If ``left`` is 0 but ``is_full`` is False, other proxies are ahead in line, or
    the store has not yet counted the existing leases.
    """

    left: int
    is_full: bool


class Limits(Protocol):
    async def grant(self, request: GrantRequest, limit: Limit) -> tuple[list[GrantAnswer], Vacancy]:
        """Grant leases as ``LeaseStore.grant`` does, within ``limit``, in one atomic step. Also return the new vacancy.

        If the limit does not allow all leases of the batch, the last entries of the batch get the answer FULL.
        """
        ...

    async def vacancy(self, limit: Limit, *, waits: bool) -> Vacancy:
        """Return how many more leases the proxy may grant now.

        ``waits``: the proxy has pops that wait for leases. If no lease is left for the proxy, it then gets in line.
        """
        ...

    async def keep(self, subscriptions: Collection[Subscription]) -> None:
        """Stop counting the leases of all subscriptions that are not in ``subscriptions``.

        If a limit of such a subscription is used again, the store first counts its leases from the records.
        """
        ...
