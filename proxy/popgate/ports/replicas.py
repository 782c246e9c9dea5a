"""Defines the port that observes and changes replicas, and the port that lists the groups with a ``min_replicas``.

An adapter uses those interfaces of the broker that are available. All calls raise BrokerUnavailable if the broker can't
be reached. Calls that change replicas raise ReplicaRefused if the broker refuses. A cancelled call may still take
effect.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from popgate.domain.errors import RetryLater
from popgate.domain.replica_wanted import GroupReplicas
from popgate.domain.replicas import MemberState, Observation, QueueRef

Proof: TypeAlias = Callable[[], Awaitable[object]]
"""Returns if the caller may still change replicas. Otherwise it raises an error."""


class ReplicaRefused(RetryLater):
    """The broker refuses this change of a queue's replicas, now or in general. ``detail`` contains the broker's
    message."""

    code = "replica_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCapabilities:
    """What the broker can do with replicas.

    ``version`` is the broker's. The ``..._by`` fields are texts for operators. They name the interface through which
    popgate observes queues, changes quorum queues, changes streams, and moves the leader of a quorum queue. None means
    that popgate can't do it. ``voters_join_late``: a new member of a quorum queue gets its vote only when it has caught
    up. ``forgets_absent_streams``: a stream's member can be removed while its node is down.
    """

    version: str
    sees_by: str
    changes_quorum_by: str | None
    changes_streams_by: str | None
    voters_join_late: bool = False
    forgets_absent_streams: bool = True
    moves_leaders_by: str | None = None


class ReplicaBroker(Protocol):
    async def start(self) -> ReplicaCapabilities:
        """Find out and return what the broker can do. Call it again after an upgrade of the broker. Raises:
        BrokerUnavailable."""
        ...

    async def stop(self) -> None:
        """Disconnect from the broker. Idempotent, and safe before ``start``."""
        ...

    async def observe(self) -> Observation:
        """Return all nodes, and all quorum queues and streams of the virtual host."""
        ...

    async def look(self, queue: QueueRef) -> tuple[MemberState, ...]:
        """Return the members of one queue as they report themselves now. Return an empty tuple if the queue does not
        exist."""
        ...

    async def add(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Add a member on ``node``. Idempotent. When the call returns, the member may not have caught up yet.

        ``prove`` is awaited immediately before each request to the broker, because an earlier request or a wait may
        have taken a minute. If ``prove`` raises an error, no request is sent and the caller gets the error.
        """
        ...

    async def forget(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Remove the member on ``node`` permanently. Idempotent. ``prove`` is used as in ``add``."""
        ...

    async def lead(self, queue: QueueRef, node: str, prove: Proof) -> None:
        """Ask the member on ``node`` to become the leader of the queue. Idempotent.

        ``look`` shows whether it has become the leader. ``prove`` is used as in ``add``.
        """
        ...


class ReplicaGroups(Protocol):
    async def asking(self) -> Sequence[GroupReplicas]:
        """Return the groups of this virtual host whose policies set ``min_replicas``. Raises: PeerUnavailable."""
        ...
