"""Applies the rules about single queues, and plans the policies that fix the faults that they find.

Each rule reports a fault of one queue, and the policy change that fixes this fault. Then the queues are grouped: each
adopted queue is a separate group, and popgate's queues are grouped by their present policy. For each group, one policy
is planned that fixes all faults of the group.
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
            elif not complaint.of_operator:  # popgate does not change operator policies itself
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
    """Return the key of a queue's group. One policy can fix all queues of a group.

    Each adopted queue is a group. Two queues of popgate are in the same group if they have the same policy, and either
    both or none of them are exclusive.
    """
    policy = one.operator if of_operator else one.policy
    owner = one.queue.name if one.queue.owner is Owner.ADOPTED else one.queue.is_exclusive
    return of_operator, owner, None if policy is None else policy.name
