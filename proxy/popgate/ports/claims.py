"""The claims port: who is a member of the cluster, and who owns which queue.

Theory of operation. There is one view, and it has a version: every change of members or owners makes a new one. Members
say that they live by ``beat``; who has not for ``GONE_SECONDS``, or was seen to have died (``remove``), is a member no
more, and what it owned belongs to nobody. While the store itself was away nobody could say so: that time does not
count. Who is no member may not know: a claim decides who should consume a queue, and nothing else. What keeps two apart
is the epoch of the lease records (``ports.leases``), which the owner of a queue begins anew.

A store that loses its data forgets all members and owners. Each joins again then, and keeps in the same step what it
has: it gives others time to do so before it takes what was theirs.

Who was removed may join again, and owns nothing then. An instance is one start of a process: its name never comes back.
All calls raise StateUnavailable when the store can't be reached or can't write; then nothing was changed, and the
owners stay the owners.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from popgate.domain.names import BrokerQueue, InstanceId

BEAT_SECONDS = 2.0
GONE_SECONDS = 6.0


class Member(NamedTuple):
    """``address``: the URL under which its peers reach it. ``protocols``: the lowest and the highest it speaks.

    ``owns``: whether it takes queues; one that does not only passes requests on.
    """

    instance: InstanceId
    address: str
    protocols: tuple[int, int]
    owns: bool = True


class ClusterView(NamedTuple):
    """``members`` by name; ``owners`` are members, and a queue that is not among the keys belongs to nobody."""

    version: int
    members: Mapping[InstanceId, Member]
    owners: Mapping[BrokerQueue, InstanceId]

    def owned_by(self, instance: InstanceId) -> set[BrokerQueue]:
        return {queue for queue, owner in self.owners.items() if owner == instance}


class Claims(Protocol):
    async def join(self, member: Member, keeps: Sequence[BrokerQueue] = ()) -> ClusterView:
        """Become a member, and the owner of those of ``keeps`` that belong to nobody. Idempotent, and proof of life.

        Where a member is in the way who speaks no protocol that this one does, nothing is changed, and the view that is
        answered is without this one. Who is in the way may be gone without anybody having noticed: ask again."""
        ...

    async def beat(self, instance: InstanceId, known: int) -> ClusterView | None:
        """Prove life. None where the view still has the version ``known``. Raises: NotAMember."""
        ...

    async def claim(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> tuple[list[BrokerQueue], int]:
        """Become the owner of those that belong to nobody: those that are ``instance``'s now, and the version that says
        so. Raises: NotAMember."""
        ...

    async def release(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> int:
        """Let go of queues; those of others stay theirs. The version that says so."""
        ...

    async def remove(self, instance: InstanceId) -> None:
        """It left, or somebody saw that its process is dead. Idempotent."""
        ...

    async def changed(self) -> None:
        """Return when somebody has changed the view since this returned last, as far as one hears of it: for who
        can't hear there is ``beat``."""
        ...
