"""The result of a chaos run as text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chaos.nemesis import Fault
from support.audit_rules import Violation

SHOWN_MAX = 5
"""Maximum number of violations shown of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`seconds` is the length of the faults. `ended`: proxies that ended by themselves; `stuck`: why it could not be
    drained; `left`: the messages RabbitMQ still has, by queue, dead letters excluded.
    """

    seed: int
    seconds: float
    faults: Counter[Fault]
    operations: Mapping[str, int]
    refusals: Mapping[str, int]
    repeats: Mapping[str, int]
    left: Mapping[str, int]
    dead_letters: int
    failed_starts: int
    violations: Sequence[Violation]
    ended: Sequence[str] = field(default=())
    tracebacks: Sequence[str] = field(default=())
    stuck: str = ""

    @property
    def is_good(self) -> bool:
        return not (self.violations or self.ended or self.tracebacks or self.stuck)

    def __str__(self) -> str:
        lines = [
            f"chaos: seed {self.seed}, {self.seconds:g} s",
            f"  faults: {sum(self.faults.values())}: {_listed(self.faults)}",
            f"  refused starts: {self.failed_starts}",
            f"  operations: {_listed(self.operations)}",
            f"  told to retry later: {_listed(self.refusals) or 'none'}",
            f"  repeated hand-outs by cause: {_listed(self.repeats) or 'none'}; dead letters {self.dead_letters}",
        ]
        kinds = Counter(str(violation.kind) for violation in self.violations)
        lines.append(f"  left on RabbitMQ: {_listed(self.left) or 'nothing'}")
        lines.append(f"  violations: {_listed(kinds) or 'none'}")
        for kind in kinds:
            alike = [violation for violation in self.violations if violation.kind == kind]
            lines += [str(violation) for violation in alike[:SHOWN_MAX]]
        lines += [f"  ENDED: {what}" for what in self.ended]
        lines += [f"  UNFORESEEN: {what}" for what in self.tracebacks[:SHOWN_MAX]]
        if self.stuck:
            lines.append(f"  NOT DRAINED: {self.stuck}")
        lines.append(f"  verdict: {'every promise was kept' if self.is_good else 'BROKEN'}")
        return "\n".join(lines)


def _listed(counts: Mapping[str, int] | Mapping[Fault, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
