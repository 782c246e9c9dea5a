"""The ports through which replicas are seen and changed (seven verbs), and what popgate's groups ask for is learnt.

An adapter chooses how it asks, by what the broker can. All calls raise BrokerUnavailable where the broker can't be
asked, and those that change something ReplicaRefused where it says no. A call that is cancelled may yet take effect.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from popgate.domain.errors import RetryLater
from popgate.domain.replica_wanted import GroupReplicas
from popgate.domain.replicas import MemberState, Observation, QueueRef

Proof: TypeAlias = Callable[[], Awaitable[object]]
"""Returns where its caller is still the one to make changes; else it raises."""


class ReplicaRefused(RetryLater):
    """The broker does not make this change of a queue's replicas, now or at all; ``detail`` has its words."""

    code = "replica_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCapabilities:
    """``version`` is the broker's. The others say how queues are seen, how each kind is changed and how the leader of a
    quorum queue is moved (None: not at all), in words for operators. ``voters_join_late``: a new member of a quorum
    queue gets its vote when it has caught up. ``forgets_absent_streams``: a member of a stream can be removed while its
    node is away."""

    version: str
    sees_by: str
    changes_quorum_by: str | None
    changes_streams_by: str | None
    voters_join_late: bool = False
    forgets_absent_streams: bool = True
    moves_leaders_by: str | None = None


class ReplicaBroker(Protocol):
    async def start(self) -> ReplicaCapabilities:
        """Find out what the broker can. Repeatable: a broker may have been upgraded. Raises: BrokerUnavailable."""
        ...

    async def stop(self) -> None:
        """Idempotent, and safe before ``start``."""
        ...

    async def observe(self) -> Observation:
        """All nodes, and all quorum queues and streams of the virtual host."""
        ...

    async def look(self, queue: QueueRef) -> tuple[MemberState, ...]:
        """The members of one queue as they are now, asked of themselves. None at all: there is no such queue."""
        ...

    async def add(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Make a member on ``node``; idempotent. It still has to catch up when this returns.

        ``prove`` is awaited right before each time that the broker is asked: a way that led nowhere, or a place in
        line, may have taken a minute. What it raises goes to the caller, and nothing is asked any more.
        """
        ...

    async def forget(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Remove the member on ``node`` for good; idempotent. ``prove`` as for ``add``."""
        ...

    async def lead(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Ask the member on ``node`` to lead the queue; idempotent. Whether it does, ``look`` tells. ``prove`` as for
        ``add``."""
        ...


class ReplicaGroups(Protocol):
    async def asking(self) -> Sequence[GroupReplicas]:
        """The groups of this virtual host whose policies have a ``min_replicas``. Raises: PeerUnavailable."""
        ...
