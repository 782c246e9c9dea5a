"""Changes the consume mode of a group, and decides which leases are valid in each mode (decision 10).

Pure: each step returns a new spec, which replaces the previous one only if that is still current (``ports.catalog``).
The generation grows by one with each step, and the store grants no lease under an earlier generation. So a proxy that
has not yet learned of a step is harmless.

               to pull                    the last lease is over, or its time is
    POP g ----------------> DRAINING g+1 ----------------------------------------> PULL g+2
      ^                          |                                                    |
      +--------------------------+                                                    |
      |    back to pop (g+2): no lease is cut off                                     |
      +-------------------------------------------------------------------------------+
           to pop (g+3): uncommitted messages return, at once or after a drain (PULL, DRAINING, POP)

A lease is valid as long as the mode in which it was granted lasts, including the drain of that mode and the way back.
A queue's owner releases the leases that are no longer valid.
"""

from dataclasses import replace

from popgate.domain.errors import WrongMode
from popgate.domain.names import LeaseId
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec

DRAIN_SECONDS = 60.0
"""Default maximum seconds of a drain from pop to pull. From pull to pop there is no drain by default."""
DRAIN_SECONDS_MAX = 43_200.0
_PULL = "pull-"


def switched(spec: GroupSpec, to: ConsumeMode, *, now: float, drain_seconds: float | None = None) -> GroupSpec:
    """Return ``spec`` after a request for mode ``to`` (pop or pull), or ``spec`` itself if there is nothing to do.

    ``now``: the store's time. ``drain_seconds``: the maximum time until all leases end, counted from now even if a
    drain is under way. None: the default, or the deadline of the drain under way.
    """
    assert to is not ConsumeMode.DRAINING, "a switch leads to pop or pull"
    if spec.drain is not None:
        if spec.drain.to is not to:
            return _entered(spec, to, spec.lease_generation)
        return spec if drain_seconds is None else replace(spec, drain=Drain(to=to, ends_at=now + drain_seconds))
    if spec.mode is to:
        return spec
    seconds = drain_seconds
    if seconds is None:
        seconds = DRAIN_SECONDS if to is ConsumeMode.PULL else 0.0
    if seconds <= 0 and to is ConsumeMode.POP:
        return _entered(spec, to, spec.mode_generation + 1)
    draining = _entered(spec, ConsumeMode.DRAINING, spec.lease_generation)
    return replace(draining, drain=Drain(to=to, ends_at=now + seconds))


def drained(spec: GroupSpec) -> GroupSpec:
    """Return ``spec`` after its drain: leases of the previous mode are no longer valid."""
    assert spec.drain is not None, "only a draining group can end its drain"
    return _entered(spec, spec.drain.to, spec.mode_generation + 1)


def leased_by(spec: GroupSpec) -> ConsumeMode:
    """Return the mode, pop or pull, in which the valid leases were granted."""
    if spec.drain is None:
        return spec.mode
    return ConsumeMode.POP if spec.drain.to is ConsumeMode.PULL else ConsumeMode.PULL


def is_good(spec: GroupSpec, lease_id: LeaseId) -> bool:
    """Return whether a lease belongs to the mode that is in force or that drains."""
    if leased_by(spec) is ConsumeMode.PULL:
        return lease_id.startswith(pull_prefix(spec))
    return not lease_id.startswith(_PULL)


def pull_prefix(spec: GroupSpec) -> str:
    """Return the prefix of the ids of all leases that pull clients get while ``spec`` is in force."""
    return f"{_PULL}{spec.lease_generation}-"


def pull_lease_id(spec: GroupSpec, since: int) -> LeaseId:
    """Return the lease id of all messages that a client pulls from a queue that it has held since generation ``since``
    of the assignment."""
    return LeaseId(f"{pull_prefix(spec)}{since}")


def extended_under(spec: GroupSpec) -> int:
    """Return the mode generation under which leases are extended. Outside pop mode it is -1, which is always overtaken.

    So a drain does not revive expired leases. It ends when no lease is left, and no lease may follow.
    """
    return spec.mode_generation if spec.mode is ConsumeMode.POP else -1


def is_pulled(lease_id: LeaseId) -> bool:
    """Return whether the lease belongs, or belonged, to a pull client."""
    return lease_id.startswith(_PULL)


def wrong_mode(spec: GroupSpec, wanted: ConsumeMode) -> WrongMode:
    """Return the error for a client that asked for ``wanted``, pop or pull, which is not the current mode."""
    topic, group = spec.subscription
    return WrongMode(f"{_situation(spec, wanted)} (group {group!r} of topic {topic!r})", mode=spec.mode)


def _situation(spec: GroupSpec, wanted: ConsumeMode) -> str:
    if spec.drain is None:
        if spec.mode is ConsumeMode.PULL:
            return "the group is in pull mode: ask for an assignment, or let an admin switch it to pop"
        return "the group is in pop mode: pop, or let an admin switch it to pull"
    if spec.drain.to is wanted:
        return f"the group is changing to {wanted} mode: try again when all leases have ended"
    return f"the group is changing to {spec.drain.to} mode: leased messages can be settled, but no new ones are leased"


def _entered(spec: GroupSpec, mode: ConsumeMode, lease_generation: int) -> GroupSpec:
    return replace(
        spec, mode=mode, mode_generation=spec.mode_generation + 1, lease_generation=lease_generation, drain=None
    )
