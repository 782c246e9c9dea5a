"""Reports the consume mode of a group: the mode in the catalog, and the state at this proxy."""

from typing import NamedTuple

from popgate.domain.errors import GroupNotFound
from popgate.domain.names import InstanceId
from popgate.domain.topics import GroupSpec
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


class ModeStanding(NamedTuple):
    """A group's spec in the catalog, the store's time, and the number of pull clients that have sessions."""

    spec: GroupSpec
    now: float
    pull_clients: int

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
    return ModeStanding(spec, await context.catalog.now(), len(assigned.assignment.sessions))
