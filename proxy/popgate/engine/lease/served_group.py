"""Contains the data of a group that all parts of its subscription on this proxy share."""

from collections.abc import Sequence

from popgate.domain import modes
from popgate.domain.names import BrokerQueue, Layout, Subscription
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.lease.expired_clients import ExpiredClients
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.ports.assignments import StoredAssignment


class ServedGroup:
    """The spec of a group, its queues, their hosts, and their assignment.

    Only the group's ``ServedSubscription`` changes them. ``lacking`` is the object that the hosts update.
    """

    def __init__(self, spec: GroupSpec, layout: Layout, hosts: Sequence[QueueHost], lacking: LackingQueues) -> None:
        self.spec = spec
        self.layout = layout
        self.hosts = hosts
        self.name: Subscription = spec.subscription
        self.expired_clients = ExpiredClients()
        self._lacking = lacking
        self.assigned: StoredAssignment | None = None
        """The latest assignment of queues to pull clients that this proxy has received."""

    @property
    def policy(self) -> Policy:
        return self.spec.policy

    @property
    def is_pulled(self) -> bool:
        """Whether the group's messages are leased to pull clients.

        If so, each queue's messages are handed out strictly in order.
        """
        return modes.leased_by(self.spec) is ConsumeMode.PULL

    def is_good(self, buffered: BufferedMessage) -> bool:
        """Whether the lease of a message is valid in the current consume mode.

        In pull mode, a lease is valid only if the queue is still assigned to the client of the lease.
        """
        spec, lease_id, stored = self.spec, buffered.lease_id, self.assigned
        if not modes.is_good(spec, lease_id) or not modes.is_pulled(lease_id) or stored is None:
            return modes.is_good(spec, lease_id)
        holding = stored.assignment.holdings.get(buffered.queue_index)
        is_held = holding is not None and lease_id == modes.pull_lease_id(spec, holding.since)
        return is_held or stored.assignment.lease_generation != spec.lease_generation

    def widen(self) -> None:
        """Raise the prefetch of the queues whose prefetch is used up, because pops want more messages."""
        for host in self.constrained():
            host.prefetch.widen()

    def constrained(self) -> list[QueueHost]:
        """Return at least the hosts whose prefetch, or half of whose memory share, is used up."""
        if self._lacking.share_was_cut():
            for host in self.hosts:
                host.state.flow.note()
        return [self.hosts[number] for number in sorted(self._lacking.constrained)]

    def host(self, message: BufferedMessage) -> QueueHost:
        """Return the host of the queue that ``message`` is in."""
        return self.hosts[message.queue_index]

    def queue(self, message: BufferedMessage) -> BrokerQueue:
        """Return the broker's name of the queue that ``message`` is in."""
        return self.layout.queues[message.queue_index]
