"""Policies that move, drop or delay the messages of a queue."""

from collections.abc import Iterable, Iterator

from popgate.doctor.complaints import Complaint, Ruled
from popgate.doctor.facts import BrokerPolicy, Owner
from popgate.doctor.findings import Severity
from popgate.doctor.policies import Edit, defined

RETRY_TYPE = "delayed-retry-type"
RETRY_KEYS = frozenset({RETRY_TYPE, "delayed-retry-min", "delayed-retry-max"})
DROPPING_KEYS = ("max-length", "max-length-bytes", "message-ttl", "expires")
DEAD_LETTER_KEYS = frozenset({"dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy"})


def policy_complaints(one: Ruled) -> Iterator[Complaint]:
    yield from _delayed_retry(one)
    yield from (_own_policies(one) if one.queue.owner is Owner.POPGATE else _adopted_policies(one))


def _own_policies(one: Ruled) -> Iterator[Complaint]:
    for policy, of_operator in ((one.policy, False), (one.operator, True)):
        keys = [key for key in DROPPING_KEYS if defined(policy, key) is not None]
        if keys:
            yield Complaint(
                code="policy-drops-messages",
                severity=Severity.ERROR,
                found=f"{_named(policy, of_operator)} sets {_values(policy, keys)}",
                why="RabbitMQ drops messages, refuses publishes or deletes the queue, and popgate learns nothing of it",
                edit=Edit(unwanted=frozenset({*DROPPING_KEYS, "overflow"})),
                of_operator=of_operator,
            )
        if defined(policy, "dead-letter-exchange") is not None and not one.queue.is_passage:
            yield Complaint(
                code="policy-dead-letters",
                severity=Severity.WARNING,
                found=f"{_named(policy, of_operator)} sets {_values(policy, ['dead-letter-exchange'])}",
                why="RabbitMQ may move messages that popgate returns to where popgate does not know them",
                edit=Edit(unwanted=DEAD_LETTER_KEYS),
                of_operator=of_operator,
            )


def _adopted_policies(one: Ruled) -> Iterator[Complaint]:
    for policy, of_operator in ((one.policy, False), (one.operator, True)):
        if defined(policy, "expires") is not None:
            yield Complaint(
                code="policy-expires",
                severity=Severity.WARNING,
                found=f"{_named(policy, of_operator)} sets {_values(policy, ['expires'])}",
                why="popgate does not consume while nobody pops: RabbitMQ then deletes the queue, with its messages",
                edit=Edit(unwanted=frozenset({"expires"})),
                of_operator=of_operator,
            )
        keys = [key for key in DROPPING_KEYS if key != "expires" and defined(policy, key) is not None]
        if keys:
            yield Complaint(
                code="policy-limits-adopted",
                severity=Severity.INFO,
                found=f"{_named(policy, of_operator)} sets {_values(policy, keys)}",
                why="messages may go without popgate's knowledge; the owner of the queue may want that",
                command=f"rabbitmqctl {'list_operator_policies' if of_operator else 'list_policies'}",
            )


def _delayed_retry(one: Ruled) -> Iterator[Complaint]:
    """The policy's type counts before the argument's, and the operator's before both."""
    why = "RabbitMQ delays what popgate returns, on top of popgate's own delays, and order per key is lost"
    in_operator, in_policy = defined(one.operator, RETRY_TYPE), defined(one.policy, RETRY_TYPE)
    argument = one.queue.arguments.get(f"x-{RETRY_TYPE}")
    kind = in_operator or in_policy or argument
    if kind is None or kind == "disabled":
        return
    edit = Edit(unwanted=RETRY_KEYS)
    if in_operator is not None:
        found = f"{_named(one.operator, True)} sets {RETRY_TYPE} {kind}"
    elif in_policy is not None:
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


def _named(policy: BrokerPolicy | None, of_operator: bool) -> str:
    assert policy is not None, "it says something"
    return f"the {'operator policy' if of_operator else 'policy'} {policy.name!r}"


def _values(policy: BrokerPolicy | None, keys: Iterable[str]) -> str:
    return " and ".join(f"{key} {defined(policy, key)}" for key in keys)
