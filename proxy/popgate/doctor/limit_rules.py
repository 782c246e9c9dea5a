"""Rules about the delivery limits and timeouts of a queue.

RabbitMQ derives these limits and timeouts from the queue's arguments, its policy and its operator policy.
"""

from collections.abc import Iterator

from popgate.doctor.complaints import Complaint, Ruled
from popgate.doctor.facts import Facts
from popgate.doctor.findings import Severity
from popgate.doctor.policies import DELIVERY_LIMIT, UNREACHABLE_LIMIT, Edit, combined_limit, defined, number, smallest

LOW_LIMIT = 1_000_000
"""Lowest acceptable delivery limit. With a lower limit, RabbitMQ could drop a message that popgate returns many
times."""
DEFAULT_LIMIT = 20
LOST_NODE, LOST_NODE_MS, LOST_NODE_DEFAULT_MS = "consumer-disconnected-timeout", 500, 60_000
CONSUMER_TIMEOUT = "consumer-timeout"
_RAISE_LIMIT = Edit(wanted=((DELIVERY_LIMIT, UNREACHABLE_LIMIT),))
_ANEW = "delete the queue when it is empty, and declare it again without this argument"


def limit_complaints(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    if one.queue.kind == "quorum" and one.queue.is_consumed:
        yield from _limit(facts, one)
        yield from _lost_node(facts, one)
    yield from _timeout(facts, one)


def _limit(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    argument = number(one.queue.arguments.get("x-delivery-limit"))
    operator = number(defined(one.operator, DELIVERY_LIMIT))
    policy = number(defined(one.policy, DELIVERY_LIMIT))
    limit = combined_limit(facts.version, argument, combined_limit(facts.version, policy, operator))
    trouble = _trouble_with(facts, limit)
    if trouble is None:
        return
    code, found, why = trouble
    severity = Severity.ERROR if code == "delivery-limit-low" and limit is not None else Severity.WARNING
    raised = combined_limit(facts.version, argument, combined_limit(facts.version, UNREACHABLE_LIMIT, operator))
    if _trouble_with(facts, raised) is None:
        yield Complaint(code=code, severity=severity, found=found, why=why, edit=_RAISE_LIMIT)
    elif (
        operator is not None
        and _trouble_with(facts, combined_limit(facts.version, argument, UNREACHABLE_LIMIT)) is None
    ):
        yield Complaint(code=code, severity=severity, found=found, why=why, edit=_RAISE_LIMIT, of_operator=True)
    else:
        found = f"{found} (its argument x-delivery-limit is {argument}, which no policy can raise)"
        yield Complaint(code=code, severity=severity, found=found, why=why, command=_ANEW)


def _trouble_with(facts: Facts, limit: int | None) -> tuple[str, str, str] | None:
    """Return ``code``, ``found`` and ``why`` of a complaint about a delivery limit, or None if it is acceptable."""
    lost = "RabbitMQ drops or dead-letters the message, though a client may never have seen it"
    back = "a released or expired message is delivered after newer ones, so order per key is lost"
    if limit is None and facts.version >= (4,):
        event = "a consumer lost it" if facts.version >= (4, 3) else "it came back"
        return (
            "delivery-limit-low",
            f"RabbitMQ gives up a message after {event} {DEFAULT_LIMIT} times, RabbitMQ's default",
            lost,
        )
    if limit is None:
        return (
            "delivery-limit-missing",
            "there is no delivery limit: RabbitMQ puts returned messages at the end of the queue",
            back,
        )
    if limit < 0 and facts.version < (4,):
        return "delivery-limit-low", f"the delivery limit is {limit}, which RabbitMQ 3 treats as 0", lost
    if limit < 0 and facts.version < (4, 3):
        return (
            "delivery-limit-missing",
            f"the delivery limit is {limit}: RabbitMQ puts returned messages at the end of the queue",
            back,
        )
    if 0 <= limit < LOW_LIMIT:
        return "delivery-limit-low", f"RabbitMQ gives up a message after it came back {limit} times", lost
    return None


def _lost_node(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    if facts.version < (4, 3):
        return
    argument = number(one.queue.arguments.get(f"x-{LOST_NODE}"))
    milliseconds = smallest(argument, number(defined(one.policy, LOST_NODE)))
    if (LOST_NODE_DEFAULT_MS if milliseconds is None else milliseconds) <= LOST_NODE_MS:
        return
    shown = (LOST_NODE_DEFAULT_MS if milliseconds is None else milliseconds) / 1000
    yield Complaint(
        code="lost-node-timeout",
        severity=Severity.WARNING,
        found=f"after the loss of a node RabbitMQ waits {shown:g} s before it removes that node's consumers",
        why="the queue delivers nothing meanwhile; popgate's leases already exclude the lost consumer",
        edit=Edit(wanted=((LOST_NODE, LOST_NODE_MS),)),
    )


def _timeout(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    """Yield a complaint if the queue's consumer timeout is shorter than popgate expects.

    From RabbitMQ 4.3 on, quorum queues are not checked, because popgate's consumers of these queues choose the timeout
    themselves.
    """
    if facts.version < (3, 12) or (facts.version >= (4, 3) and one.queue.kind == "quorum"):
        return
    argument = number(one.queue.arguments.get(f"x-{CONSUMER_TIMEOUT}"))
    policy = number(defined(one.policy, CONSUMER_TIMEOUT))
    shortest = smallest(argument, policy)
    if shortest is None or shortest >= facts.consumer_timeout_seconds * 1000:
        return
    found = (
        f"its consumer timeout is {shortest / 1000:g} s, shorter than popgate's own setting "
        f"(--consumer-timeout-seconds {facts.consumer_timeout_seconds:g})"
    )
    why = "RabbitMQ closes the channel while popgate still holds messages, and redelivers all of them"
    if argument == shortest:
        command = f"popgate serve --consumer-timeout-seconds {shortest / 1000:g}"
        yield Complaint(code="queue-consumer-timeout", severity=Severity.WARNING, found=found, why=why, command=command)
    else:
        edit = Edit(unwanted=frozenset({CONSUMER_TIMEOUT}))
        yield Complaint(code="queue-consumer-timeout", severity=Severity.WARNING, found=found, why=why, edit=edit)
