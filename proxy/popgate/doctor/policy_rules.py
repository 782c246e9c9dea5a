"""Rules about policies that move, drop or delay the messages of a queue."""

from collections.abc import Iterable, Iterator

from popgate.doctor.complaints import Complaint, Ruled
from popgate.doctor.facts import BrokerPolicy, Owner, Queue
from popgate.doctor.findings import Severity
from popgate.doctor.policies import Edit, defined

RETRY_TYPE = "delayed-retry-type"
RETRY_KEYS = frozenset({RETRY_TYPE, "delayed-retry-min", "delayed-retry-max"})
EXPIRES, OVERFLOW, KEEPS_MESSAGES = "expires", "overflow", "reject-publish"
DROPPING_KEYS = ("max-length", "max-length-bytes", "message-ttl", EXPIRES)
DEAD_LETTER_KEYS = frozenset({"dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy"})


def policy_complaints(one: Ruled) -> Iterator[Complaint]:
    of_queue = _exclusive_policies
    if one.queue.owner is Owner.ADOPTED:
        of_queue = _adopted_policies
    elif not one.queue.is_exclusive:
        of_queue = _own_policies
    if one.queue.kind == "quorum":
        yield from _delayed_retry(one)
    for policy, of_operator in ((one.policy, False), (one.operator, True)):
        if policy is not None:
            yield from of_queue(one.queue, policy, of_operator)


def _own_policies(queue: Queue, policy: BrokerPolicy, of_operator: bool) -> Iterator[Complaint]:
    keys = [key for key in DROPPING_KEYS if key in policy.definition]
    if keys:
        yield Complaint(
            code="policy-drops-messages",
            severity=Severity.ERROR,
            found=f"{_named(policy, of_operator)} sets {_values(policy, keys)}",
            why="RabbitMQ drops messages, refuses publishes or deletes the queue without popgate's knowledge",
            edit=Edit(unwanted=frozenset({*DROPPING_KEYS, OVERFLOW})),
            of_operator=of_operator,
        )
    if "dead-letter-exchange" in policy.definition and not queue.is_passage:
        yield Complaint(
            code="policy-dead-letters",
            severity=Severity.WARNING,
            found=f"{_named(policy, of_operator)} sets {_values(policy, ['dead-letter-exchange'])}",
            why="RabbitMQ may move messages that popgate returns to a queue that popgate does not know",
            edit=Edit(unwanted=DEAD_LETTER_KEYS),
            of_operator=of_operator,
        )
    if queue.is_passage and policy.definition.get(OVERFLOW, KEEPS_MESSAGES) != KEEPS_MESSAGES:
        yield Complaint(
            code="policy-overflow",
            severity=Severity.ERROR,
            found=f"{_named(policy, of_operator)} sets {_values(policy, [OVERFLOW])}",
            why="RabbitMQ then dead-letters at most once: a delayed message can be lost on its way",
            edit=Edit(unwanted=frozenset({OVERFLOW})),
            of_operator=of_operator,
        )


def _exclusive_policies(queue: Queue, policy: BrokerPolicy, of_operator: bool) -> Iterator[Complaint]:
    why = (
        "RabbitMQ deletes the queues that mark popgate's guard and the queues it consumes: two proxies that share no "
        "state may then run side by side"
    )
    yield from _expires(policy, of_operator, why)


def _adopted_policies(queue: Queue, policy: BrokerPolicy, of_operator: bool) -> Iterator[Complaint]:
    why = "popgate does not consume while no client pops, so RabbitMQ deletes the queue with its messages"
    yield from _expires(policy, of_operator, why)
    keys = [key for key in DROPPING_KEYS if key != EXPIRES and key in policy.definition]
    if keys:
        yield Complaint(
            code="policy-limits-adopted",
            severity=Severity.INFO,
            found=f"{_named(policy, of_operator)} sets {_values(policy, keys)}",
            why="messages may disappear without popgate's knowledge, which the owner of the queue may want",
            command=f"rabbitmqctl {'list_operator_policies' if of_operator else 'list_policies'}",
        )


def _expires(policy: BrokerPolicy, of_operator: bool, why: str) -> Iterator[Complaint]:
    if EXPIRES in policy.definition:
        yield Complaint(
            code="policy-expires",
            severity=Severity.WARNING,
            found=f"{_named(policy, of_operator)} sets {_values(policy, [EXPIRES])}",
            why=why,
            edit=Edit(unwanted=frozenset({EXPIRES})),
            of_operator=of_operator,
        )


def _delayed_retry(one: Ruled) -> Iterator[Complaint]:
    """Yield a complaint if RabbitMQ delays the messages that are returned to the queue.

    The operator policy takes precedence over the policy, and the policy over the queue's argument.
    """
    why = (
        "RabbitMQ delays the messages that popgate returns, in addition to popgate's own delays, and order per key "
        "is lost"
    )
    in_operator, in_policy = defined(one.operator, RETRY_TYPE), defined(one.policy, RETRY_TYPE)
    argument = one.queue.arguments.get(f"x-{RETRY_TYPE}")
    kind = in_operator or in_policy or argument
    if kind is None or kind == "disabled":
        return
    edit = Edit(unwanted=RETRY_KEYS)
    if one.operator is not None and in_operator is not None:
        found = f"{_named(one.operator, True)} sets {RETRY_TYPE} {kind}"
    elif one.policy is not None and in_policy is not None:
        found = f"{_named(one.policy, False)} sets {RETRY_TYPE} {kind}"
    else:
        found = f"its argument x-{RETRY_TYPE} is {kind}"
    if argument not in (None, "disabled"):
        edit = Edit(unwanted=RETRY_KEYS, wanted=((RETRY_TYPE, "disabled"),))
    yield Complaint(
        code="policy-delayed-retry",
        severity=Severity.WARNING,
        found=found,
        why=why,
        edit=edit,
        of_operator=in_operator is not None,
    )


def _named(policy: BrokerPolicy, of_operator: bool) -> str:
    return f"the {'operator policy' if of_operator else 'policy'} {policy.name!r}"


def _values(policy: BrokerPolicy, keys: Iterable[str]) -> str:
    return " and ".join(f"{key} {policy.definition[key]}" for key in keys)
