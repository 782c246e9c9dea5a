"""The limits port: at most so many leases of a subscription at a time, whoever of a cluster gives them.

Theory of operation. The store counts the leases of every subscription that somebody has given under a limit, where it
writes their records: so a lease counts from its grant until it is settled, given back, moved or over, whichever proxy
does that, and the count outlives every proxy. Leases that were given before there was a limit are counted when it is
met first. Nothing is reserved, so nothing has to be given back.

Who is refused stands in line, as long as it asks again within half a second each time (``ASK_AGAIN_SECONDS``): after a
fifth of a second all who came later leave one lease to it. So the queues of no proxy starve behind another's.

All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from popgate.domain.lease import GrantAnswer
from popgate.domain.names import BrokerQueue, InstanceId, Subscription
from popgate.ports.leases import GrantRequest

ASK_AGAIN_SECONDS = (0.04, 0.08)
"""How soon who was refused asks again, at least and at most."""


class Limit(NamedTuple):
    """At most ``in_flight_max`` leases of ``subscription``, which has these ``queues``; ``member`` is who asks."""

    subscription: Subscription
    queues: Sequence[BrokerQueue]
    in_flight_max: int
    member: InstanceId


class Vacancy(NamedTuple):
    """How many more leases the asker may give (``left``). ``is_full``: none, because there are as many as there may be.
    Where there is none and it is not, others are to have theirs first, or the store has yet to count what there is."""

    left: int
    is_full: bool


class Limits(Protocol):
    async def grant(self, request: GrantRequest, limit: Limit) -> tuple[list[GrantAnswer], Vacancy]:
        """As ``LeaseStore.grant``, within ``limit``, in one atomic step: what has no room is FULL, from the end of the
        batch. And what is left afterwards."""
        ...

    async def vacancy(self, limit: Limit, *, waits: bool) -> Vacancy:
        """What is left. ``waits``: somebody wants it, and stands in line where there is nothing."""
        ...

    async def keep(self, subscriptions: Collection[Subscription]) -> None:
        """Count for no others than these any more; one that is met again is counted again."""
        ...
