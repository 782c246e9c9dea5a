"""Defines the claims port: the members of the cluster, and the owner of each queue.

Theory of operation. There is one view with a version, which changes whenever members or owners change. A member proves
by ``beat`` that it is alive. A member that has not done so for ``GONE_SECONDS``, or whose process was seen to die
(``remove``), is removed, and its queues have no owner. Time in which the store was unavailable does not count. A
removed member may not notice. Therefore a claim only decides which proxy should consume a queue. Exclusion comes from
the epoch of the lease records (``ports.leases``), which every new owner of a queue raises.

A store that loses its data forgets all members and owners. Each proxy then joins again and keeps its own queues in the
same step. It gives the other proxies time to do the same before it takes their former queues.

A removed proxy may join again, and then owns nothing. An instance is one start of a process; its id is never reused.
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
    speaks. ``owns``: whether it owns queues. Other members only forward requests.
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
        """Become a member, and the owner of the queues of ``keeps`` that have no owner. Idempotent; also a heartbeat.

        If a member has no protocol version in common with this one, nothing is changed, and the returned view does
        not contain the new member. The incompatible member may be dead already, so try again."""
        ...

    async def beat(self, instance: InstanceId, known: int) -> ClusterView | None:
        """Send a heartbeat; return the view, or None if its version is still ``known``. Raises: NotAMember."""
        ...

    async def claim(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> tuple[list[BrokerQueue], int]:
        """Become the owner of the queues that have no owner. Raises: NotAMember.

        Returns the queues that ``instance`` owns now, and the version of the view with this change.
        """
        ...

    async def release(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> int:
        """Release the queues that ``instance`` owns, and return the version of the view with this change."""
        ...

    async def remove(self, instance: InstanceId) -> None:
        """Remove a member that left or whose process is known to be dead. Idempotent."""
        ...

    async def changed(self) -> None:
        """Return when the view has changed since the last return. ``beat`` finds changes without a notification."""
        ...
