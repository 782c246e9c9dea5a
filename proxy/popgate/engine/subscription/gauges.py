"""Collects the numbers that /metrics shows about each subscription, without asking the broker."""

from collections.abc import Mapping
from typing import NamedTuple

from popgate.domain.names import GroupName, Subscription, TopicName
from popgate.engine.queue.buffered import MessageState
from popgate.engine.subscription.backlogs import Backlogs
from popgate.engine.subscription.counting import ready_and_blocked
from popgate.engine.subscription.subscription import ServedSubscription


class SubscriptionGauges(NamedTuple):
    """Counts one subscription's parked pops on this proxy, and its messages in the queues that this proxy owns.

    ``ready``, ``dead`` and ``oldest_age_seconds`` come from the latest reading of the broker (``Backlogs``), like the
    part of ``delayed`` and ``blocked`` that only the broker has. ``polls``: the number of pops and pulls so far.
    ``oldest_lease_age_seconds``: the seconds since the oldest lease was granted, even if it was extended since, or 0.0.
    """

    topic: TopicName
    group: GroupName
    ready: int
    ready_buffered: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    buffer_bytes: int
    parked_pops: int
    polls: int
    stuck: int
    paused: int
    oldest_age_seconds: float
    oldest_lease_age_seconds: float

    def with_other(self, other: "SubscriptionGauges") -> "SubscriptionGauges":
        """Return the sums of these gauges and ``other``, with this topic and group, and the higher ages."""
        sums = (one + two for one, two in zip(self[2:-2], other[2:-2], strict=True))
        ages = (max(one, two) for one, two in zip(self[-2:], other[-2:], strict=True))
        return SubscriptionGauges(self.topic, self.group, *sums, *ages)


def subscription_gauges(
    served: Mapping[Subscription, ServedSubscription], backlogs: Backlogs, now: float
) -> list[SubscriptionGauges]:
    """Return the gauges of each subscription. ``now``: the wall time."""
    return [_gauges(one, backlogs, now) for one in served.values()]


def _gauges(served: ServedSubscription, backlogs: Backlogs, now: float) -> SubscriptionGauges:
    buffered = leased = waiting = blocked = 0
    leased_since = now
    for host in served.hosts:
        counts = host.state.counts
        leased += counts.all(MessageState.LEASED)
        waiting += counts.all(MessageState.DELAYED)
        buffered += counts.heads(MessageState.READY)
        blocked += ready_and_blocked(counts)[1]
        leased_since = min(leased_since, host.state.oldest_lease.leased_at() or now)
    backlog = backlogs.of(served.name)
    oldest_at = None if backlog is None else backlog.oldest_at
    return SubscriptionGauges(
        topic=served.name.topic,
        group=served.name.group,
        ready=0 if backlog is None else backlog.ready,
        ready_buffered=buffered,
        in_flight=leased,
        delayed=waiting + (0 if backlog is None else backlog.delayed),
        blocked=max(blocked, 0 if backlog is None else backlog.blocked),
        dead=0 if backlog is None else backlog.dead,
        buffer_bytes=sum(host.state.flow.held_bytes for host in served.hosts),
        parked_pops=served.parked_pops,
        polls=served.polls,
        stuck=sum(len(host.state.stuck) for host in served.hosts),
        paused=int(served.spec.policy.paused and served.hosts[0].is_owned),
        oldest_age_seconds=0.0 if oldest_at is None else max(0.0, now - oldest_at),
        oldest_lease_age_seconds=now - leased_since,
    )
