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
    """Useful to know; popgate does not need a change."""
    WARNING = "warning"
    ERROR = "error"
    """Messages can be lost, or popgate can't work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPolicy:
    """A complete policy to write. It is new, or replaces an existing one."""

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
    """All three permissions of a user for a virtual host."""

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
    """A setting of the running Redis, and of its configuration file if there is one."""

    name: str
    value: str

    @property
    def command(self) -> str:
        return f"redis-cli CONFIG SET {self.name} {self.value} && redis-cli CONFIG REWRITE"


Fix: TypeAlias = SetPolicy | SetPermissions | SetRedis


@dataclass(frozen=True, slots=True, kw_only=True)
class FixResult:
    """The result of a fix. ``note`` is the reason why the fix failed, or describes the work that remains to be done by
    hand."""

    command: str
    is_done: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding. ``code`` never changes between versions. ``command`` fixes the problem. If ``fix`` is set, ``--fix``
    may do the same."""

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
    """The result for a set of facts, with the most important findings first."""

    version: Version
    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]

    @property
    def to_fix(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.needs_fix)

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """Return each fix once, even if one policy fixes several findings."""
        found: list[Fix] = []
        for finding in self.to_fix:
            if finding.fix is not None and finding.fix not in found:
                found.append(finding.fix)
        return tuple(found)
