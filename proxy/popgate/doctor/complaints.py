"""Defines the faults that the rules find in single queues. ``queue_rules`` combines equal faults into findings."""

from dataclasses import dataclass, field

from popgate.doctor.facts import BrokerPolicy, Queue
from popgate.doctor.findings import Severity
from popgate.doctor.policies import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A fault of one queue.

    ``edit`` is the policy change that fixes the fault. If ``of_operator`` is True, the change concerns the queue's
    operator policy; otherwise it concerns the queue's policy. If ``edit`` is None, ``command`` tells the administrator
    what to do.
    """

    code: str
    severity: Severity
    found: str
    why: str
    edit: Edit | None = None
    of_operator: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A queue, the policy and the operator policy that apply to it, and the complaints about the queue."""

    queue: Queue
    policy: BrokerPolicy | None
    operator: BrokerPolicy | None
    complaints: list[Complaint] = field(default_factory=list[Complaint])
