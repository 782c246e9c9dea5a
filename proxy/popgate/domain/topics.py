"""Defines the admin's configuration: topics, groups and their policies.

This module defines defaults and limits. It does not store the configuration, and declares nothing on the broker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.names import BrokerQueue, Layout, Subscription, TopicName, dead_letter_queue, own_layout

INVISIBILITY_SECONDS_MAX = 43_200
RELEASE_DELAY_SECONDS_MAX = 43_200
DELAY_SECONDS_MAX = 2_592_000
"""Maximum delay of a publish in seconds: 30 days."""
TTL_SECONDS_MAX = 31_536_000
"""Maximum time to live of a message in seconds: 365 days."""
WAIT_SECONDS_MAX = 30
MULTIPLIER_MAX = 100
MAX_DELIVERIES_MAX = 1_000_000
MAX_IN_FLIGHT_MAX = 1_000_000


class ConsumeMode(StrEnum):
    """How clients consume the messages of a group. ``domain.modes`` decides about changes of the mode."""

    POP = "pop"
    DRAINING = "draining"
    """The group is changing between the other two modes. No new messages are leased."""
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The delay before a message becomes visible again after an expiry, or after a release that names no delay.

    The delay is ``initial_seconds`` after the first delivery. After each further delivery it is ``multiplier`` times as
    long as before, up to ``max_seconds``.
    """

    initial_seconds: float = 0.0
    multiplier: float = 2.0
    max_seconds: float = 600.0

    def delay_seconds(self, delivery_count: int) -> float:
        """Return the delay after delivery number ``delivery_count`` (from 1)."""
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

    ``max_lease_seconds``: the maximum age that a lease can reach by extensions; lease groups have another limit.
    ``max_deliveries``: the number of deliveries after which a message is dead-lettered; None: no limit.
    ``max_in_flight``: the maximum number of leases at the same time; None: no limit. ``paused``: no message is leased,
    but leased messages can be settled. ``min_replicas``: the number of replicas that a replica keeper maintains of each
    queue of the group; None: the group sets no number.
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
    """The configuration of a topic. popgate declares ``queue_count`` queues for each group, unless the topic has
    ``adopted`` queues, which other programs declared. ``deleted``: the topic is being deleted, and not served."""

    topic: TopicName
    queue_count: int
    adopted: Sequence[BrokerQueue] = ()
    unique_message_ids: bool = False
    deleted: bool = False

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
    """The drain of a group that changes to mode ``to``, pop or pull.

    The drain ends when the last lease ends, but not later than at ``ends_at`` (Unix seconds of the store). Leases that
    remain at that time become invalid.
    """

    to: ConsumeMode
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The configuration of a group, and its consume mode with the mode's generation, which grows with each change.

    ``lease_generation``: the mode generation in which the valid leases began. It does not change at the start of a
    drain, or when a drain is cancelled. ``drain`` is set only while the mode is DRAINING. ``deleted``: the group is
    being deleted, and not served.
    """

    subscription: Subscription
    policy: Policy = Policy()
    mode: ConsumeMode = ConsumeMode.POP
    mode_generation: int = 1
    lease_generation: int = 1
    drain: Drain | None = None
    deleted: bool = False
