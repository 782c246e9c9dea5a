"""Defines the doctor's output: findings, the commands that fix them, and the fixes that the doctor can carry out
itself."""

import json
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from popgate.doctor.facts import Definition, Permissions, Unseen, Version


class Severity(StrEnum):
    INFO = "info"
    """Useful to know, but popgate works correctly without a change."""
    WARNING = "warning"
    ERROR = "error"
    """Messages can be lost, or popgate can't work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPolicy:
    """A fix that writes a complete RabbitMQ policy. The policy is new, or replaces the policy with the same name."""

    vhost: str
    name: str
    pattern: str
    definition: Definition
    priority: int
    apply_to: str = "queues"
    is_operator: bool = False

    @property
    def command(self) -> str:
        verb = "set_operator_policy" if self.is_operator else "set_policy"
        definition = json.dumps(self.definition, separators=(",", ":"))
        flags = ["--priority", str(self.priority), "--apply-to", self.apply_to]
        return shlex.join(["rabbitmqctl", verb, "-p", self.vhost, *flags, self.name, self.pattern, definition])


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPermissions:
    """A fix that sets all three permissions (configure, write, read) of a user for a virtual host."""

    vhost: str
    user: str
    permissions: Permissions

    @property
    def command(self) -> str:
        wanted = self.permissions
        words = ["rabbitmqctl", "set_permissions", "-p", self.vhost, self.user]
        return shlex.join([*words, wanted.configure, wanted.write, wanted.read])


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRedis:
    """A fix that changes a setting of the running Redis and, if Redis has a configuration file, in this file."""

    name: str
    value: str

    @property
    def command(self) -> str:
        return f"redis-cli CONFIG SET {self.name} {self.value} && redis-cli CONFIG REWRITE"


Fix: TypeAlias = SetPolicy | SetPermissions | SetRedis


@dataclass(frozen=True, slots=True, kw_only=True)
class FixResult:
    """The result of carrying out a fix.

    If ``is_done`` is False, ``note`` says why the fix failed. If ``is_done`` is True, ``note`` says what the
    administrator must still do, or is empty.
    """

    command: str
    is_done: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that the doctor has found.

    ``code`` identifies the kind of problem, and never changes between versions of popgate. ``command`` is the command
    or the advice that fixes the problem. If ``fix`` is set, ``popgate doctor --fix`` can fix the problem, too.
    """

    code: str
    severity: Severity
    found: str
    why: str
    command: str
    queues: tuple[str, ...] = ()
    fix: Fix | None = None

    @property
    def needs_fix(self) -> bool:
        return self.severity is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings, the most severe ones first, and the facts that could not be observed (``unseen``)."""

    version: Version
    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]

    @property
    def to_fix(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.needs_fix)

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """The fixes of the findings that need one. A fix appears only once, even if it fixes several findings."""
        found: list[Fix] = []
        for finding in self.to_fix:
            if finding.fix is not None and finding.fix not in found:
                found.append(finding.fix)
        return tuple(found)
