"""One group of a topic, as this proxy serves it: the data that the parts of its subscription share."""

from collections.abc import Sequence

from popgate.domain.modes import leased_by
from popgate.domain.names import BrokerQueue, Layout, Subscription
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost


class ServedGroup:
    """Holds the group's ``spec``, its queues and their hosts. Only its subscription writes ``spec``."""

    def __init__(self, spec: GroupSpec, layout: Layout, hosts: Sequence[QueueHost]) -> None:
        self.spec = spec
        self.layout = layout
        self.hosts = hosts
        self.name: Subscription = spec.subscription

    @property
    def policy(self) -> Policy:
        return self.spec.policy

    @property
    def is_pulled(self) -> bool:
        """Whether pull clients have the leases: then the messages of each queue are handed out strictly in order."""
        return leased_by(self.spec) is ConsumeMode.PULL

    def host(self, message: BufferedMessage) -> QueueHost:
        """Return the host of the queue that ``message`` is in."""
        return self.hosts[message.queue_index]

    def queue(self, message: BufferedMessage) -> BrokerQueue:
        """Return the broker's name of the queue that ``message`` is in."""
        return self.layout.queues[message.queue_index]
