"""Changes the consume mode of a group, and decides which leases are valid in each mode (decision 10).

Pure. Each step returns a new ``GroupSpec``. The caller stores it only if the previous spec is still the stored one
(``ports.catalog``). The mode generation grows by one with each step, and the store grants no lease under an earlier
generation. So a proxy that does not know a step yet can't grant leases of the previous mode. In the diagram, g is the
mode generation before the first step.

               to pull                     no lease is left, or the time is up
    POP g ----------------> DRAINING g+1 ----------------------------------------> PULL g+2
      ^                          |                                                    |
      +--------------------------+                                                    |
      |    back to pop (g+2): all leases stay valid                                   |
      +-------------------------------------------------------------------------------+
           to pop (g+3): uncommitted messages return, at once or after a drain (PULL, DRAINING, POP)

A lease is valid as long as the group stays in the mode in which the lease was granted. This includes the drain of that
mode, and a return to the mode before the drain ends. The owner of a queue releases the leases that are no longer valid.
"""

from dataclasses import replace

from popgate.domain.errors import WrongMode
from popgate.domain.names import LeaseId
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec

DRAIN_SECONDS = 60.0
"""Default maximum duration, in seconds, of a drain from pop to pull. By default, there is no drain from pull to pop."""
DRAIN_SECONDS_MAX = 43_200.0
_PULL = "pull-"


def switched(spec: GroupSpec, to: ConsumeMode, *, now: float, drain_seconds: float | None = None) -> GroupSpec:
    """Return ``spec`` after a request for mode ``to`` (pop or pull), or ``spec`` itself if nothing changes.

    ``now``: the store's time. ``drain_seconds``: the maximum number of seconds from ``now`` until all leases end, even
    if a drain is under way. If it is None, a new drain gets the default, and a drain that is under way keeps its
    deadline.
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
    """Return ``spec`` after the end of its drain, when leases of the previous mode are no longer valid."""
    assert spec.drain is not None, "only a draining group can end its drain"
    return _entered(spec, spec.drain.to, spec.mode_generation + 1)


def leased_by(spec: GroupSpec) -> ConsumeMode:
    """Return the mode, pop or pull, in which the valid leases were granted."""
    if spec.drain is None:
        return spec.mode
    return ConsumeMode.POP if spec.drain.to is ConsumeMode.PULL else ConsumeMode.PULL


def is_good(spec: GroupSpec, lease_id: LeaseId) -> bool:
    """Return whether the lease is valid, because it was granted in the present mode or in the mode that drains."""
    if leased_by(spec) is ConsumeMode.PULL:
        return lease_id.startswith(pull_prefix(spec))
    return not lease_id.startswith(_PULL)


def pull_prefix(spec: GroupSpec) -> str:
    """Return the prefix of the ids of all leases that pull clients get while ``spec`` is in force."""
    return f"{_PULL}{spec.lease_generation}-"


def pull_lease_id(spec: GroupSpec, since: int) -> LeaseId:
    """Return the lease id of all messages that a client pulls from one queue.

    ``since``: the generation of the assignment in which the client received the queue (``domain.assignment.Holding``).
    """
    return LeaseId(f"{pull_prefix(spec)}{since}")


def extended_under(spec: GroupSpec) -> int:
    """Return the mode generation to state when leases are extended. Outside pop mode it is -1, which is always
    outdated.

    Then the store does not extend expired leases, so a drain does not revive them. The drain ends when no lease is
    left, and no lease may become valid after that.
    """
    return spec.mode_generation if spec.mode is ConsumeMode.POP else -1


def is_pulled(lease_id: LeaseId) -> bool:
    """Return whether the lease was granted to a pull client, even if it is no longer valid."""
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
