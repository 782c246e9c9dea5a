"""Reports the consume mode of a group: the mode in the catalog, its pull clients, and the state at this proxy."""

from typing import NamedTuple

from popgate.domain.assignment import Assignment
from popgate.domain.errors import GroupNotFound
from popgate.domain.modes import leased_by
from popgate.domain.names import ClientId, InstanceId
from popgate.domain.topics import ConsumeMode, GroupSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.subscription.counting import queue_counts
from popgate.engine.subscription.subscription import ServedSubscription


class QueueLeases(NamedTuple):
    queue: int
    leases: int


class ModeHere(NamedTuple):
    """A group's consume mode at one proxy. ``pollers``: the number of pops and pulls that are parked at the proxy.

    ``queues``: the number of leases in each queue that the proxy owns.
    """

    proxy: InstanceId
    mode: str
    generation: int
    pollers: int
    queues: list[QueueLeases]


class PullClient(NamedTuple):
    """A client that sends heartbeats. ``generation``: the latest generation in which its queues changed.

    ``queues``: the numbers of the queues from which it may pull. ``leaving``: those that it must release, because they
    go to another client.
    """

    client_id: ClientId
    generation: int
    queues: list[int]
    leaving: list[int]


class ModeStanding(NamedTuple):
    """A group's spec in the catalog, the store's time, and the sessions of pull clients with their queues."""

    spec: GroupSpec
    now: float
    assignment: Assignment

    @property
    def clients(self) -> list[PullClient]:
        """The clients that have sessions. Outside of pull mode, they have no queues."""
        assignment = self.assignment
        found = {
            client_id: PullClient(client_id, session.generation, [], [])
            for client_id, session in sorted(assignment.sessions.items())
        }
        is_pulled = leased_by(self.spec) is ConsumeMode.PULL
        if is_pulled and assignment.lease_generation == self.spec.lease_generation:
            for number, holding in sorted(assignment.holdings.items()):
                if holding.client_id in found:
                    client = found[holding.client_id]
                    (client.queues if holding.to is None else client.leaving).append(number)
        return list(found.values())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until a drain ends even if leases are left; None if no drain is in progress."""
        drain = self.spec.drain
        return None if drain is None else max(0.0, drain.ends_at - self.now)


def mode_here(context: EngineContext, served: ServedSubscription) -> ModeHere:
    queues = [QueueLeases(one.number, one.in_flight) for one in queue_counts(served.group)]
    spec = served.spec
    return ModeHere(InstanceId(context.instance), spec.mode, spec.mode_generation, served.parked_pops, queues)


async def mode_standing(context: EngineContext, served: ServedSubscription) -> ModeStanding:
    """Return a group's consume mode as the catalog contains it. Raises: GroupNotFound, StateUnavailable."""
    spec = await context.catalog.group(served.name)
    if spec is None:
        raise GroupNotFound(f"group {served.name.group!r} of topic {served.name.topic!r} was deleted just now")
    assigned = await context.assignments.read(served.name)
    return ModeStanding(spec, await context.catalog.now(), assigned.assignment)
