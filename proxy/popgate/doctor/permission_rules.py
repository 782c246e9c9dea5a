"""The rule about the RabbitMQ permissions of popgate's user (docs/rabbitmq.md lists the required permissions)."""

import re
from collections.abc import Iterator, Sequence

from popgate.doctor.facts import Facts, Owner, Permissions
from popgate.doctor.findings import Finding, SetPermissions, Severity
from popgate.doctor.policies import escaped

OWN_EXAMPLE, DEFAULT_EXCHANGE = "popgate:topic:group:0", "amq.default"
KINDS = ("configure", "write", "read")


def permission_findings(facts: Facts) -> Iterator[Finding]:
    adopted = sorted(queue.name for queue in facts.queues if queue.owner is Owner.ADOPTED)
    names = {
        "configure": [OWN_EXAMPLE, *adopted],
        "write": [OWN_EXAMPLE, DEFAULT_EXCHANGE],
        "read": [OWN_EXAMPLE, *adopted],
    }
    missing = {kind: [refusal.name for refusal in facts.refusals if refusal.kind == kind] for kind in KINDS}
    if facts.permissions is not None:
        for kind in KINDS:
            pattern = getattr(facts.permissions, kind)
            missing[kind] += [name for name in names[kind] if not _permits(pattern, name) and name not in missing[kind]]
    if not any(missing.values()):
        return
    unknown, present = facts.permissions is None, facts.permissions or Permissions(configure="", write="", read="")
    patterns = {
        kind: _with(getattr(present, kind), names[kind], is_short=unknown or bool(missing[kind])) for kind in KINDS
    }
    wanted = Permissions(**patterns)
    fix = SetPermissions(vhost=facts.vhost, user=facts.user, permissions=wanted)
    # A program that writes to the catalog must not get permissions on a queue of its choice.
    is_named = facts.named.issuperset(name for kind in KINDS for name in missing[kind] if name in adopted)
    shown = "; ".join(f"{kind} on {_readable(missing[kind])}" for kind in KINDS if missing[kind])
    yield Finding(
        code="permissions",
        severity=Severity.ERROR,
        found=f"the user {facts.user!r} may not {shown}",
        why="RabbitMQ refuses what popgate declares, publishes or consumes",
        command=f"{fix.command}  # this replaces what the user has now" if unknown else fix.command,
        fix=None if unknown or not is_named else fix,
    )


def _permits(pattern: str, name: str) -> bool:
    """Return whether ``pattern``, a permission of RabbitMQ, permits ``name``. An empty pattern permits nothing."""
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:  # Python can't read all of Erlang's patterns; refusals over AMQP are reported separately
        return True


def _with(present: str, names: Sequence[str], *, is_short: bool) -> str:
    """Return a pattern that permits all names that ``present`` permits and, if ``is_short``, also ``names``."""
    if not is_short:
        return present
    needed = "|".join("popgate:.*" if name == OWN_EXAMPLE else escaped(name) for name in names)
    return f"^({needed})$" if present in ("", "^$") else f"{present}|^({needed})$"


def _readable(names: Sequence[str]) -> str:
    """Return ``names`` as one text. Each name appears once, and ``popgate:...`` replaces all of popgate's own names."""
    return ", ".join(dict.fromkeys("popgate:..." if name.startswith("popgate:") else name for name in names))
