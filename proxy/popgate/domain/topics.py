"""What an admin configures: topics, groups and their policies.

Owns defaults and limits. Does not know how they are stored or what stands on the broker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.names import BrokerQueue, Layout, Subscription, TopicName, dead_letter_queue, own_layout

INVISIBILITY_SECONDS_MAX = 43_200
RELEASE_DELAY_SECONDS_MAX = 43_200
DELAY_SECONDS_MAX = 2_592_000
"""Of a publish: 30 days."""
TTL_SECONDS_MAX = 31_536_000
"""365 days."""
WAIT_SECONDS_MAX = 30
MAX_DELIVERIES_MAX = 1_000_000
MAX_IN_FLIGHT_MAX = 1_000_000


class ConsumeMode(StrEnum):
    """How a group's messages are consumed; how it changes is told in ``domain.modes``."""

    POP = "pop"
    DRAINING = "draining"
    """On the way from one of the others to the other: nothing new is handed out."""
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long a message waits after an expiry, or after a release without a delay of its own.

    ``initial_seconds`` after the first delivery, then ``multiplier`` times as long each time, up to ``max_seconds``.
    """

    initial_seconds: float = 0.0
    multiplier: float = 2.0
    max_seconds: float = 600.0

    def delay_seconds(self, delivery_count: int) -> float:
        """The wait after the ``delivery_count``-th hand-out (1 is the first)."""
        if self.initial_seconds <= 0:
            return 0.0
        try:
            grown = self.initial_seconds * self.multiplier ** max(0, delivery_count - 1)
        except OverflowError:
            grown = self.max_seconds
        return min(grown, self.max_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a subscription treats its messages.

    ``max_lease_seconds``: no extension lets a lease grow older; a lease group has a limit of its own.
    ``max_deliveries`` None: never dead-letter by count. ``max_in_flight`` None: as many leases as are asked for.
    ``paused``: nothing is handed out; what is leased can be settled. ``min_replicas``: how many replicas a
    replica keeper is to keep of the group's queues; None: the group does not say.
    """

    invisibility_seconds: float = 30.0
    max_lease_seconds: float = INVISIBILITY_SECONDS_MAX
    max_deliveries: int | None = 16
    retry: RetryPolicy = RetryPolicy()
    max_in_flight: int | None = None
    paused: bool = False
    min_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic: ``queue_count`` queues of popgate's own, or the ``adopted`` ones of somebody else."""

    topic: TopicName
    queue_count: int
    adopted: Sequence[BrokerQueue] = ()
    unique_message_ids: bool = False

    def layout(self, subscription: Subscription) -> Layout:
        if not self.adopted:
            return own_layout(subscription, self.queue_count)
        return Layout(
            subscription=subscription,
            queues=self.adopted,
            dead=dead_letter_queue(subscription),
            adopted=True,
            unique_message_ids=self.unique_message_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Where a draining group goes: ``to`` pop or pull, when its last lease is over, or at ``ends_at``, in the store's
    Unix seconds; what is leased then is cut off."""

    to: ConsumeMode
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group of a topic, with the consume mode and the generation that only grows with each change of it.

    ``lease_generation``: that with which the leases began that are good now; a drain and the way back leave it.
    ``drain``: there while the mode is DRAINING, and only then.
    """

    subscription: Subscription
    policy: Policy = Policy()
    mode: ConsumeMode = ConsumeMode.POP
    mode_generation: int = 1
    lease_generation: int = 1
    drain: Drain | None = None
