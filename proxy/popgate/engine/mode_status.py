"""The consume mode of a group: what was decided, and what this proxy makes of it."""

from typing import NamedTuple

from popgate.domain.errors import GroupNotFound
from popgate.domain.names import InstanceId
from popgate.domain.topics import GroupSpec
from popgate.engine.counting import held_counts
from popgate.engine.room import Room
from popgate.engine.subscription import ServedSubscription


class QueueLeases(NamedTuple):
    queue: int
    leases: int


class ModeHere(NamedTuple):
    """What one proxy makes of a group. ``pollers``: pops, or pulls, that wait there; ``queues``: those that it owns."""

    proxy: InstanceId
    mode: str
    generation: int
    pollers: int
    queues: list[QueueLeases]


class ModeStanding(NamedTuple):
    """What was decided of a group, the store's time, and how many pull clients have sessions."""

    spec: GroupSpec
    now: float
    pull_clients: int

    @property
    def seconds_left(self) -> float | None:
        """Until a drain ends whatever is leased; None where there is none."""
        drain = self.spec.drain
        return None if drain is None else max(0.0, drain.ends_at - self.now)


def mode_here(room: Room, served: ServedSubscription) -> ModeHere:
    queues = [QueueLeases(one.number, one.in_flight) for one in held_counts(served)]
    spec = served.spec
    return ModeHere(InstanceId(room.instance), spec.mode, spec.mode_generation, served.parked_pops, queues)


async def mode_standing(room: Room, served: ServedSubscription) -> ModeStanding:
    """Raises: GroupNotFound, StateUnavailable."""
    spec = await room.catalog.group(served.name)
    if spec is None:
        raise GroupNotFound(f"group {served.name.group!r} of topic {served.name.topic!r} was deleted just now")
    assigned = await room.assignments.read(served.name)
    return ModeStanding(spec, await room.catalog.now(), len(assigned.assignment.sessions))
