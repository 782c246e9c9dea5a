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


def plan_policy(facts: Facts, queue: Queue, edits: Collection[Edit], *, is_operator: bool) -> SetPolicy:
    """The policy that makes ``edits`` for ``queue``, and for all of popgate's queues under the same policy by now."""
    policies = (facts.operator_policies if is_operator else facts.policies) or ()
    present = applied(policies, queue)
    definition = dict(present.definition) if present is not None else {}
    for edit in edits:
        for key in edit.unwanted:
            definition.pop(key, None)
    for edit in edits:
        definition.update(edit.wanted)
    if not definition:  # RabbitMQ takes no empty policy
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
    """A definition that changes nothing. ``overflow`` would not do: a policy's counts before the argument's, on which
    at-least-once dead-lettering depends."""
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
    except re.error:  # Erlang's expressions know more than ours
        return False


def _pattern(present: BrokerPolicy | None, queue: Queue) -> str:
    """For an adopted queue alone; else for those names of popgate's that the present policy is about."""
    if queue.owner is Owner.ADOPTED:
        return f"^{escaped(queue.name)}$"
    own = EXCLUSIVE_PATTERN if queue.is_exclusive else OWN_PATTERN
    if present is None or present.pattern in _EVERY_NAME:
        return own
    return f"^(?={own.removeprefix('^')})(?=(?:{present.pattern})|.*(?:{present.pattern}))"


def _lowest_priority(facts: Facts, policies: Sequence[BrokerPolicy]) -> int:
    """Of a policy for queues that have none: it hides none of those that others have."""
    others = [found for queue in facts.queues if (found := applied(policies, queue)) is not None]
    return min([1, *(policy.priority - 1 for policy in others)])


def escaped(name: str) -> str:
    """For Erlang's expressions and ours; ``re.escape`` would escape more than is read well."""
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", name)


def _is_about_these(policy: BrokerPolicy, pattern: str, queue: Queue) -> bool:
    """Whether the policy may be changed itself: it applies to nothing else than such queues."""
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
