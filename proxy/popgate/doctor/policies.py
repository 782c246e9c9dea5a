"""Which policy applies to a queue, what it comes to together with the queue's arguments, and how to change it.

RabbitMQ applies one policy to a queue, the one with the highest priority that matches, and beside it one operator
policy. So a policy is changed by writing its whole definition anew: into itself where it is about these queues only,
else into a new one of higher priority that has a copy of it. A second policy beside it would hide the first.
Rules read in RabbitMQ's source: rabbit_policy, rabbit_policies and rabbit_quorum_queue of 3.10.8, 4.0.5 and 4.3.5.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from popgate.doctor.facts import BrokerPolicy, Facts, Owner, Queue, Version
from popgate.doctor.findings import SetPolicy

OWN_PREFIX = "popgate:"
OWN_PATTERN = f"^{OWN_PREFIX}"
DELIVERY_LIMIT = "delivery-limit"
UNREACHABLE_LIMIT = 2_000_000_000
_APPLIES_TO = {
    "quorum": frozenset({"all", "queues", "quorum_queues"}),
    "classic": frozenset({"all", "queues", "classic_queues"}),
    "stream": frozenset({"all", "queues", "streams"}),
}
_NOT_FOR = {
    "quorum": frozenset(
        {"max-priority", "queue-mode", "ha-mode", "ha-params", "ha-sync-mode", "max-age", "initial-cluster-size"}
    ),
    "classic": frozenset({DELIVERY_LIMIT, "max-age", "initial-cluster-size", "dead-letter-strategy"}),
}
"""A policy with one of these keys does not apply to queues of that kind at all (``unsupported_policies``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What a policy has to say, and what it must not say."""

    wanted: tuple[tuple[str, object], ...] = ()
    unwanted: frozenset[str] = frozenset()


def applied(policies: Iterable[BrokerPolicy], queue: Queue) -> BrokerPolicy | None:
    """The one of them that RabbitMQ applies to ``queue``."""
    matching = [policy for policy in policies if _applies(policy, queue)]
    return max(matching, key=lambda policy: policy.priority, default=None)


def defined(policy: BrokerPolicy | None, key: str) -> object | None:
    return None if policy is None else policy.definition.get(key)


def number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def combined_limit(version: Version, *limits: int | None) -> int | None:
    """The delivery limit that several sources come to; None where none of them says one."""
    found = [limit for limit in limits if limit is not None]
    if not found:
        return None
    # From 4.0 on a negative limit is none, and the larger one counts where one of two is negative.
    return max(found) if version >= (4,) and min(found) < 0 else min(found)


def smallest(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def plan_policy(facts: Facts, queues: Sequence[Queue], edits: Collection[Edit], *, is_operator: bool) -> SetPolicy:
    """The policy that makes ``edits`` for ``queues``, which have one owner and the same policy by now."""
    policies = (facts.operator_policies if is_operator else facts.policies) or ()
    present = applied(policies, queues[0])
    pattern = _pattern(facts, policies, queues)
    definition = dict(present.definition) if present is not None else {}
    for edit in edits:
        for key in edit.unwanted:
            definition.pop(key, None)
    for edit in edits:
        definition.update(edit.wanted)
    if not definition:  # RabbitMQ takes no empty policy: say what is so anyway
        definition = {"overflow": "drop-head"} if queues[0].kind == "classic" else {DELIVERY_LIMIT: UNREACHABLE_LIMIT}
    if present is not None and _is_about_these(present, pattern, queues[0].owner):
        return SetPolicy(
            vhost=facts.vhost,
            name=present.name,
            pattern=present.pattern,
            definition=definition,
            priority=present.priority,
            apply_to=present.apply_to,
            is_operator=is_operator,
        )
    return SetPolicy(
        vhost=facts.vhost,
        name=_unused_name(queues[0], {policy.name for policy in policies}),
        pattern=pattern,
        definition=definition,
        priority=1 + (0 if present is None else present.priority),
        is_operator=is_operator,
    )


def _applies(policy: BrokerPolicy, queue: Queue) -> bool:
    if policy.apply_to not in _APPLIES_TO.get(queue.kind, frozenset({"all", "queues"})):
        return False
    if not _NOT_FOR.get(queue.kind, frozenset()).isdisjoint(policy.definition):
        return False
    try:
        return re.search(policy.pattern, queue.name) is not None
    except re.error:  # Erlang's expressions know more than ours
        return False


def _pattern(facts: Facts, policies: Sequence[BrokerPolicy], queues: Sequence[Queue]) -> str:
    """For all queues of popgate's where the same policy applies to them; else for these queues by name."""
    if queues[0].owner is Owner.POPGATE:
        present = applied(policies, queues[0])
        own = [queue for queue in facts.queues if queue.owner is Owner.POPGATE]
        if all(applied(policies, queue) == present for queue in own):
            return OWN_PATTERN
    names = "|".join(escaped(queue.name) for queue in queues)
    return f"^({names})$" if len(queues) > 1 else f"^{names}$"


def escaped(name: str) -> str:
    """For Erlang's expressions and ours; ``re.escape`` would escape more than is read well."""
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", name)


def _is_about_these(policy: BrokerPolicy, pattern: str, owner: Owner) -> bool:
    if policy.pattern == pattern:
        return True
    return owner is Owner.POPGATE and policy.pattern.startswith(OWN_PATTERN) and "|" not in policy.pattern


def _unused_name(queue: Queue, used: Collection[str]) -> str:
    wanted = "popgate" if queue.owner is Owner.POPGATE else f"popgate-{queue.name}"
    names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(used) + 2))
    return next(name for name in names if name not in used)
