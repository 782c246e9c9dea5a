"""Defines the claims port: the members of the cluster, and the owner of each queue.

Theory of operation. The store has one view of members and owners. Its version changes whenever members or owners
change. A member proves by ``beat`` that it is alive. A member is removed if it sends no heartbeat for ``GONE_SECONDS``,
or if its process was seen to die (``remove``). The queues of a removed member have no owner. Time in which the store
was unavailable does not count. A member may not notice that it was removed. Therefore a claim only decides which proxy
should consume a queue. It does not prevent two proxies from leasing the same message. The epoch of the lease records
(``ports.leases``) does, because every new owner of a queue raises it.

If a store loses its data, it has no members and no owners. Each proxy then joins again, and in the same step becomes
the owner of the queues that it owned before. It waits before it claims the former queues of other proxies, so that
these proxies can do the same.

A removed proxy may join again, but then owns no queues. An instance is one start of a process; its id is never reused.
All calls raise StateUnavailable if the store can't be reached or can't write. In this case nothing was changed, and
the owners stay the owners.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from popgate.domain.names import BrokerQueue, InstanceId

BEAT_SECONDS = 2.0
GONE_SECONDS = 6.0


class Member(NamedTuple):
    """A member of the cluster.

    ``address``: the URL at which its peers reach it. ``protocols``: the lowest and the highest protocol version that it
    speaks. ``owns``: whether it may own queues. A member that may not own queues only forwards requests.
    """

    instance: InstanceId
    address: str
    protocols: tuple[int, int]
    owns: bool = True


class ClusterView(NamedTuple):
    """The members and the owners of queues. Owners are members; a queue that is not in ``owners`` has no owner."""

    version: int
    members: Mapping[InstanceId, Member]
    owners: Mapping[BrokerQueue, InstanceId]

    def owned_by(self, instance: InstanceId) -> set[BrokerQueue]:
        return {queue for queue, owner in self.owners.items() if owner == instance}


class Claims(Protocol):
    async def join(self, member: Member, keeps: Sequence[BrokerQueue] = ()) -> ClusterView:
        """Add ``member`` to the cluster, and make it the owner of those queues of ``keeps`` that have no owner.

        Idempotent. The call also counts as a heartbeat. If another member has no protocol version in common with
        ``member``, then ``member`` is not added, and the returned view does not contain it. The other member may
        already be dead, so the caller should try again.
        """
        ...

    async def beat(self, instance: InstanceId, known: int) -> ClusterView | None:
        """Send a heartbeat; return the view, or None if its version is still ``known``. Raises: NotAMember."""
        ...

    async def claim(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> tuple[list[BrokerQueue], int]:
        """Make ``instance`` the owner of those of ``queues`` that have no owner. Raises: NotAMember.

        Return those of ``queues`` that ``instance`` owns now, and the version of the view with this change.
        """
        ...

    async def release(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> int:
        """Release those of ``queues`` that ``instance`` owns, and return the version of the view with this change."""
        ...

    async def remove(self, instance: InstanceId) -> None:
        """Remove a member that left, or whose process is known to be dead. Idempotent."""
        ...

    async def changed(self) -> None:
        """Wait until the view has changed since the previous call returned.

        Notifications may be lost. ``beat`` finds changes without a notification.
        """
        ...
