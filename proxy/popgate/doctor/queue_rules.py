"""What is wrong with single queues, and the one policy that mends it.

Each rule says of one queue what is wrong and how its policy would have to change. Then queues of one owner under one
policy are taken together: one new policy mends all that is wrong with them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from popgate.doctor.complaints import Complaint, Ruled
from popgate.doctor.facts import Facts, Owner, Queue
from popgate.doctor.findings import Finding, Fix, Severity
from popgate.doctor.limit_rules import limit_complaints
from popgate.doctor.policies import applied, plan_policy
from popgate.doctor.policy_rules import policy_complaints


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
    return [finding for together in _under_one_policy(ruled) for finding in _findings(facts, together)]


def _complaints(facts: Facts, one: Ruled) -> Iterator[Complaint]:
    queue = one.queue
    if not queue.exists:
        yield Complaint(
            code="queue-missing",
            severity=Severity.WARNING,
            found="the queue does not exist in this virtual host",
            why="popgate can't consume an adopted queue that is not there; its pops are answered 503",
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


def _under_one_policy(ruled: Sequence[Ruled]) -> list[list[Ruled]]:
    """Queues of popgate's under the same policies; an adopted queue stands alone."""
    groups: defaultdict[tuple[object, ...], list[Ruled]] = defaultdict(list)
    for one in ruled:
        names = (one.policy and one.policy.name, one.operator and one.operator.name)
        groups[(one.queue.name,) if one.queue.owner is Owner.ADOPTED else names].append(one)
    return list(groups.values())


def _findings(facts: Facts, together: Sequence[Ruled]) -> Iterator[Finding]:
    alike: defaultdict[Complaint, list[Queue]] = defaultdict(list)
    for one in together:
        for complaint in one.complaints:
            alike[complaint].append(one.queue)
    for complaint, queues in alike.items():
        command, fix = _mended_by(facts, together, complaint)
        yield Finding(
            code=complaint.code,
            severity=complaint.severity,
            found=complaint.found,
            why=complaint.why,
            command=command,
            queues=tuple(queue.name for queue in queues if not queue.is_expected),
            fix=fix,
        )


def _mended_by(facts: Facts, together: Sequence[Ruled], complaint: Complaint) -> tuple[str, Fix | None]:
    """The command, and the fix where the doctor may carry it out: operator policies are the operator's to change."""
    if complaint.edit is None:
        return complaint.command, None

    def is_mended_with_it(other: Complaint) -> bool:
        return other.edit is not None and other.of_operator is complaint.of_operator

    edits = [other.edit for one in together for other in one.complaints if other.edit and is_mended_with_it(other)]
    queues = [one.queue for one in together if any(map(is_mended_with_it, one.complaints))]
    planned = plan_policy(facts, queues, edits, is_operator=complaint.of_operator)
    if facts.policies is None:
        return f"{planned.command}  # where a policy applies already, add this to it: only one applies", None
    return planned.command, None if complaint.of_operator else planned
