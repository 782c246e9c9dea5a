"""Defines the results of the rules about single queues, before queues under the same policy are grouped."""

from dataclasses import dataclass, field

from popgate.doctor.facts import BrokerPolicy, Queue
from popgate.doctor.findings import Severity
from popgate.doctor.policies import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A fault of one queue. ``edit`` fixes the fault in the queue's policy or operator policy. If there is no ``edit``,
    ``command`` fixes the fault."""

    code: str
    severity: Severity
    found: str
    why: str
    edit: Edit | None = None
    of_operator: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A queue with the policies that apply to it."""

    queue: Queue
    policy: BrokerPolicy | None
    operator: BrokerPolicy | None
    complaints: list[Complaint] = field(default_factory=list[Complaint])
