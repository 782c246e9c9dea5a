"""Results of the rules about one queue, before queues under one policy are grouped."""

from dataclasses import dataclass, field

from popgate.doctor.facts import BrokerPolicy, Queue
from popgate.doctor.findings import Severity
from popgate.doctor.policies import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A fault of one queue. ``edit`` fixes it in its policy, or the operator policy; without it, ``command`` does."""

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
