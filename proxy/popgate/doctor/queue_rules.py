"""Rules about single queues, and the policy that fixes each group of queues.

Each rule reports a fault of one queue, and the change of its policy that fixes it. After that, the queues of one owner
under one policy are grouped, so that one new policy fixes all of their faults.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from popgate.doctor.complaints import Complaint, Ruled
from popgate.doctor.facts import Facts, Owner, Queue
from popgate.doctor.findings import Finding, Severity
from popgate.doctor.limit_rules import limit_complaints
from popgate.doctor.policies import applied, plan_policy
from popgate.doctor.policy_rules import policy_complaints

_Scope: TypeAlias = tuple[bool, str | bool, str | None]


def queue_findings(facts: Facts) -> list[Finding]:
    ruled: list[Ruled] = []
    for queue in facts.queues:
        one = Ruled(
            queue=queue,
            policy=applied(facts.policies or (), queue),
            operator=applied(facts.operator_policies or (), queue),
        )
        one.complaints.extend(_complaints(facts, one))
        ruled.append(one)
    return list(_findings(facts, ruled))


def _complaints(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    queue = one.queue
    if not queue.exists:
        yield Complaint(
            code="queue-missing",
            severity=Severity.WARNING,
            found="the queue does not exist in this virtual host",
            why="popgate can't consume an adopted queue that does not exist; its pops are answered 503",
            command="declare the queue, or delete the topic that has adopted it: popgate topics delete TOPIC",
        )
        return
    if queue.kind == "stream":
        yield Complaint(
            code="queue-is-stream",
            severity=Severity.ERROR,
            found="the queue is a stream",
            why="messages of a stream can't be settled one by one, so popgate can't adopt it",
            command="route the messages to a quorum queue as well, and adopt that one",
        )
        return
    yield from limit_complaints(facts, one)
    yield from policy_complaints(one)


def _findings(facts: Facts, ruled: Sequence[Ruled]) -> Iterator[Finding]:
    alike: defaultdict[tuple[Complaint, _Scope], list[Queue]] = defaultdict(list)
    for one in ruled:
        for complaint in one.complaints:
            alike[complaint, _scope(one, complaint.of_operator)].append(one.queue)
    for (complaint, scope), queues in alike.items():
        command, fix = complaint.command, None
        if complaint.edit is not None:
            edits = [other.edit for other, its_scope in alike if its_scope == scope and other.edit is not None]
            planned = plan_policy(facts, queues[0], edits, is_operator=complaint.of_operator)
            command = planned.command
            if facts.policies is None:
                command += "  # if a policy applies already, add this to it: only one applies"
            elif not complaint.of_operator:  # the operator has to change operator policies
                fix = planned
        yield Finding(
            code=complaint.code,
            severity=complaint.severity,
            found=complaint.found,
            why=complaint.why,
            command=command,
            queues=tuple(queue.name for queue in queues if not queue.is_expected),
            fix=fix,
        )


def _scope(one: Ruled, of_operator: bool) -> _Scope:
    """Return a key for the queues that one policy can fix together. These are popgate's queues under one policy, or one
    adopted queue."""
    policy = one.operator if of_operator else one.policy
    owner = one.queue.name if one.queue.owner is Owner.ADOPTED else one.queue.is_exclusive
    return of_operator, owner, None if policy is None else policy.name
