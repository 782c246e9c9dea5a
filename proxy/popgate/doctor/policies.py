"""Determines the policy that applies to a queue, its effect together with the queue's arguments, and how to change it.

RabbitMQ applies only one policy to a queue: the matching policy with the highest priority. It also applies one operator
policy, which it chooses in the same way. So the planned policy must contain all settings that the queue needs. If the
present policy applies only to the queues that need the change, it is changed in place. Otherwise, a changed copy with a
higher priority is written for these queues. If the new policy were not a copy, it would hide the settings of
the present policy.

Sources of the rules: rabbit_policy, rabbit_policies and rabbit_quorum_queue in RabbitMQ 3.10.8, 4.0.5 and 4.3.5.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from popgate.doctor.facts import BrokerPolicy, Facts, Owner, Queue, Version
from popgate.doctor.findings import SetPolicy

OWN_PREFIX = "popgate:"
OWN_PATTERN = f"^{OWN_PREFIX}"
EXCLUSIVE_PATTERN = f"^{OWN_PREFIX}(guard|consumer|presence|unfenced)[:#-]"
DELIVERY_LIMIT = "delivery-limit"
UNREACHABLE_LIMIT = 2_000_000_000
_APPLIES_TO = {
    "quorum": frozenset({"all", "queues", "quorum_queues"}),
    "classic": frozenset({"all", "queues", "classic_queues"}),
    "stream": frozenset({"all", "queues", "streams"}),
}
_EVERY_NAME = frozenset({"", "^", ".*", "^.*", "^.*$", ".*$", ".+", "^.+", "^.+$"})
_NOT_FOR = {
    "quorum": frozenset(
        {"max-priority", "queue-mode", "ha-mode", "ha-params", "ha-sync-mode", "max-age", "initial-cluster-size"}
    ),
    "classic": frozenset(
        {DELIVERY_LIMIT, "max-age", "initial-cluster-size", "dead-letter-strategy", "target-group-size"}
    ),
}
"""By kind of queue, the keys that a policy must not contain. If it contains one of them, RabbitMQ does not apply the
policy to any queue of this kind (``unsupported_policies``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a policy: keys and values that the policy must set, and keys that it must not set."""

    wanted: tuple[tuple[str, object], ...] = ()
    unwanted: frozenset[str] = frozenset()


def applied(policies: Iterable[BrokerPolicy], queue: Queue) -> BrokerPolicy | None:
    """Return the policy that RabbitMQ applies to ``queue``."""
    matching = [policy for policy in policies if _applies(policy, queue)]
    return max(matching, key=lambda policy: policy.priority, default=None)


def defined(policy: BrokerPolicy | None, key: str) -> object | None:
    return None if policy is None else policy.definition.get(key)


def number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def combined_limit(version: Version, *limits: int | None) -> int | None:
    """Return the delivery limit that results from the limits of several sources, or None if no source sets a limit.

    The sources are the queue's argument, its policy and its operator policy.
    """
    found = [limit for limit in limits if limit is not None]
    if not found:
        return None
    # From 4.0 on, a negative limit means that there is no limit. If one of two limits is negative, the larger one
    # applies.
    return max(found) if version >= (4,) and min(found) < 0 else min(found)


def smallest(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def plan_policy(facts: Facts, queue: Queue, edits: Collection[Edit], *, is_operator: bool) -> SetPolicy:
    """Plan the policy that applies ``edits`` to ``queue``.

    If ``queue`` is popgate's own, the planned policy also applies to popgate's other queues under the same policy.
    """
    policies = (facts.operator_policies if is_operator else facts.policies) or ()
    present = applied(policies, queue)
    definition = dict(present.definition) if present is not None else {}
    for edit in edits:
        for key in edit.unwanted:
            definition.pop(key, None)
    for edit in edits:
        definition.update(edit.wanted)
    if not definition:  # RabbitMQ rejects an empty policy
        definition = _saying_nothing(queue, is_operator=is_operator)
    pattern = _pattern(present, queue)
    if present is not None and _is_about_these(present, pattern, queue):
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
        name=_unused_name(present, queue, {policy.name for policy in policies}),
        pattern=pattern,
        definition=definition,
        priority=_lowest_priority(facts, policies) if present is None else present.priority + 1,
        is_operator=is_operator,
    )


def _saying_nothing(queue: Queue, *, is_operator: bool) -> dict[str, object]:
    """Return a policy definition with one key that does not change how the queue behaves.

    The key ``overflow`` is not suitable: in a policy, it takes precedence over the queue's argument ``x-overflow``, on
    which at-least-once dead-lettering depends.
    """
    if queue.kind != "classic":
        return {DELIVERY_LIMIT: UNREACHABLE_LIMIT}
    return {"max-length": UNREACHABLE_LIMIT} if is_operator else {"queue-mode": "default"}


def _applies(policy: BrokerPolicy, queue: Queue) -> bool:
    if policy.apply_to not in _APPLIES_TO.get(queue.kind, frozenset({"all", "queues"})):
        return False
    if not _NOT_FOR.get(queue.kind, frozenset()).isdisjoint(policy.definition):
        return False
    try:
        return re.search(policy.pattern, queue.name) is not None
    except re.error:  # Erlang's regular expressions have features that Python's lack
        return False


def _pattern(present: BrokerPolicy | None, queue: Queue) -> str:
    """Return the name pattern of the planned policy.

    For an adopted queue, the pattern matches only this queue. For a queue of popgate's own, it matches the names of
    popgate's queues to which the present policy applies.
    """
    if queue.owner is Owner.ADOPTED:
        return f"^{escaped(queue.name)}$"
    own = EXCLUSIVE_PATTERN if queue.is_exclusive else OWN_PATTERN
    if present is None or present.pattern in _EVERY_NAME:
        return own
    return f"^(?={own.removeprefix('^')})(?=(?:{present.pattern})|.*(?:{present.pattern}))"


def _lowest_priority(facts: Facts, policies: Sequence[BrokerPolicy]) -> int:
    """Return the priority of a new policy for queues that have no policy yet.

    It is lower than the priorities of the policies that apply to other queues, so the new policy hides none of them.
    """
    others = [found for queue in facts.queues if (found := applied(policies, queue)) is not None]
    return min([1, *(policy.priority - 1 for policy in others)])


def escaped(name: str) -> str:
    """Escape a name for regular expressions in Erlang and Python. ``re.escape`` would escape more characters, and its
    result would be harder to read."""
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", name)


def _is_about_these(policy: BrokerPolicy, pattern: str, queue: Queue) -> bool:
    """Return whether the policy may be changed in place, because it applies only to queues that ``pattern`` matches."""
    if policy.pattern == pattern:
        return True
    is_own = queue.owner is Owner.POPGATE and not queue.is_exclusive
    return is_own and policy.pattern.startswith(OWN_PATTERN) and "|" not in policy.pattern


def _unused_name(present: BrokerPolicy | None, queue: Queue, used: Collection[str]) -> str:
    if queue.owner is Owner.ADOPTED:
        wanted = f"popgate-{queue.name}"
    else:
        wanted = "popgate-exclusive" if queue.is_exclusive else "popgate"
        if present is not None and present.pattern not in _EVERY_NAME:
            wanted = f"{wanted}-{present.name}"
    names = (wanted if count == 1 else f"{wanted}-{count}" for count in range(1, len(used) + 2))
    return next(name for name in names if name not in used)
