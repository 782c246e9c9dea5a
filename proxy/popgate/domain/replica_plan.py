"""Plans the changes to queue replicas, as a pure function of one observation of the broker.

Theory of operation. Each queue gets one row: the number of wanted replicas, the setting that demands it, the number of
online replicas, and the next change. A row has at most one change, and none while another change of that queue is under
way. The rules, in this order:

- A queue can't be changed unless a majority of its members is online. The plan only reports such a queue.
- A member on a node that was removed from the cluster is forgotten. A member on a node that is down is kept for
  ``forget_after_seconds`` (for ever if that is not set). After that time, it is forgotten when another member has
  replaced it, or if it prevents the addition of another member.
- If fewer members are online than wanted, one member is added on the first node of the placement's ranking, as soon as
  the limits permit a change on this node. The plan does not choose a node of lower rank because it is free sooner. A
  member is added only after the queue has had too few online members for ``recovery_interval_seconds``.
- A new member counts toward the majority before it has caught up. If the majority requires its vote, publishing stops
  until it has caught up. This is so if a queue grows from 1 to 2 members, or from 3 to 4 while one of the 3 is down. A
  queue with a large backlog therefore grows in this way only with ``allow_stall``. The rule does not apply to brokers
  on which a new member gets its vote when it has caught up.
- Members beyond the wanted number are not removed.

The rows of the most endangered queues come first. No change lowers the number of online members. So no change takes a
queue below its wanted number of replicas or below its majority. Source: RabbitMQ's design of continuously maintained
minimum replica counts (rabbitmq-server issue 7209).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from popgate.domain.replica_placement import spread
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import (
    Asked,
    Change,
    ChangeKind,
    Observation,
    Placement,
    QueueKind,
    QueueRef,
    ReplicaNode,
    ReplicaQueue,
    majority,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """Limits on how many changes run at a time and how soon they begin.

    ``forget_after_seconds`` None: members that are down are kept. ``move_leaders``: move a queue's leader to the node
    to which the queue's active consumer is connected.
    """

    changes_max: int = 4
    changes_per_node_max: int = 2
    recovery_interval_seconds: float = 60.0
    forget_after_seconds: float | None = None
    stall_messages_max: int = 10_000
    """Maximum backlog, in messages, that counts as small: a new member copies it in well under a second."""
    allow_stall: bool = False
    move_leaders: bool = False


class Verdict(StrEnum):
    ENOUGH = "enough"
    ADD = "add"
    FORGET = "forget"
    LEAD = "lead"
    BUSY = "busy"
    """Another change of the queue is under way."""
    WAITING = "waiting"
    """The queue has too few replicas, or its leader is not on its owner's node. The change waits until this has lasted
    long enough, or until the next check that may change the queue."""
    LIMITED = "limited"
    """The change waits until other changes are done, because of the limits."""
    STALL = "stall"
    """The change would stop publishing for too long; an operator may allow it."""
    NO_NODE = "no_node"
    NO_MAJORITY = "no_majority"
    UNSEEN = "unseen"
    """The broker did not report the queue's members this time."""


UNSEEN_REASONS = {
    QueueKind.QUORUM: "the broker does not report its members at the moment",
    QueueKind.STREAM: (
        "the broker does not report its members at the moment: only its command line tools report the members of a "
        "stream (--replica-commands)"
    ),
}
SHORT = frozenset({Verdict.ADD, Verdict.BUSY, Verdict.WAITING, Verdict.LIMITED, Verdict.STALL, Verdict.NO_NODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """How long problems have lasted, in seconds; a problem without an entry is new.

    ``short``: queues that have too few replicas. ``astray``: queues whose leader is not on their owner's node, counted
    while this node stays the same. ``absent``: nodes that are down or were removed from the cluster.
    """

    short: Mapping[QueueRef, float] = field(default_factory=dict[QueueRef, float])
    astray: Mapping[QueueRef, float] = field(default_factory=dict[QueueRef, float])
    absent: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """The row of one queue in the plan.

    ``wanted`` is ``asked.replicas``, but at most the number of nodes. ``online``: the members of the queue that are
    online.
    """

    ref: QueueRef
    members: frozenset[str]
    online: frozenset[str]
    asked: Asked
    wanted: int
    verdict: Verdict
    reason: str
    change: Change | None = None

    @property
    def is_short(self) -> bool:
        return len(self.online) < self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    rows: tuple[QueuePlan, ...]

    @property
    def changes(self) -> list[Change]:
        """The changes, in the order in which to make them."""
        return [row.change for row in self.rows if row.change is not None]

    def with_reasons(self, reasons: Mapping[QueueRef, str]) -> "ReplicaPlan":
        """Return the plan with its reasons replaced by ``reasons``, except in rows of verdict ENOUGH."""
        return ReplicaPlan(
            rows=tuple(
                row
                if row.verdict is Verdict.ENOUGH or row.ref not in reasons
                else replace(row, reason=reasons[row.ref])
                for row in self.rows
            )
        )


def replica_plan(
    seen: Observation,
    policies: ReplicaPolicies,
    limits: ReplicaLimits,
    *,
    ages: Ages,
    busy: Collection[Change] = (),
    only: Collection[QueueRef] | None = None,
    place: Placement = spread,
    voters_join_late: bool = False,
    forgets_absent_streams: bool = True,
    moves_leaders: bool = True,
) -> ReplicaPlan:
    """Return the plan, which has one row for each queue, the most endangered queue first.

    ``only``: the queues that this plan may change (None: all queues). The other queues are observed and counted, too.
    ``busy``: changes that are under way. The last three arguments describe what the broker can do (``ports.replicas``).
    """
    limits = limits if moves_leaders else replace(limits, move_leaders=False)
    planner = _Planner(seen, limits, ages, busy, place, voters_join_late, forgets_absent_streams)
    rows = [
        planner.row(queue, policies.asked(queue), may_change=only is None or queue.ref in only)
        for queue in sorted(seen.queues, key=lambda queue: planner.danger(queue, policies.asked(queue)))
    ]
    none: frozenset[str] = frozenset()
    rows += [
        QueuePlan(
            ref=ref,
            members=none,
            online=none,
            asked=Asked(0, "unknown"),
            wanted=0,
            verdict=Verdict.UNSEEN,
            reason=UNSEEN_REASONS[ref.kind],
        )
        for ref in seen.unseen
    ]
    return ReplicaPlan(rows=tuple(rows))


def queues_led_astray(seen: Observation) -> set[tuple[QueueRef, str]]:
    """Return the quorum queues whose leader could be on their owner's node but is not, each with the owner's node.

    Streams are not included, because RabbitMQ restarts a stream to move its leader.
    """
    fit = {node.name for node in seen.nodes if node.unfit_reason is None}
    return {
        (queue.ref, queue.owner_node)
        for queue in seen.queues
        if queue.ref.kind is QueueKind.QUORUM
        and queue.owner_node is not None
        and queue.owner_node != queue.leader
        and queue.owner_node in seen.online(queue) & fit
    }


def short_queues(seen: Observation, policies: ReplicaPolicies) -> set[QueueRef]:
    """Return the queues that have fewer online members than wanted."""
    return {
        queue.ref
        for queue in seen.queues
        if len(seen.online(queue)) < min(policies.asked(queue).replicas, len(seen.nodes))
    }


class _Planner:
    """Decides the rows of a plan one by one. Changes under way and changes planned so far count against the limits."""

    def __init__(
        self,
        seen: Observation,
        limits: ReplicaLimits,
        ages: Ages,
        busy: Collection[Change],
        place: Placement,
        voters_join_late: bool,
        forgets_absent_streams: bool,
    ) -> None:
        self._seen = seen
        self._nodes = {node.name: node for node in seen.nodes}
        self._limits = limits
        self._ages = ages
        self._astray = dict(queues_led_astray(seen)) if limits.move_leaders else {}
        self._place = place
        self._voters_join_late = voters_join_late
        self._forgets_absent_streams = forgets_absent_streams
        self._busy = {change.queue: change for change in busy}
        self._count = len(busy)
        self._on_node = Counter(change.node for change in busy)
        self._replicas = Counter(member for queue in seen.queues for member in queue.members)
        members = {queue.ref: queue.members for queue in seen.queues}
        self._replicas.update(
            change.node
            for change in busy
            if change.kind is ChangeKind.ADD and change.node not in members.get(change.queue, ())
        )

    def danger(self, queue: ReplicaQueue, asked: Asked) -> tuple[int, int, QueueRef]:
        """Return the key that sorts queues by danger, the greatest danger first.

        The key compares how many members a queue can lose without losing its majority, then how many members are
        missing.
        """
        online = len(self._seen.online(queue))
        return online - queue.majority, online - asked.replicas, queue.ref

    def row(self, queue: ReplicaQueue, asked: Asked, *, may_change: bool) -> QueuePlan:
        wanted = min(asked.replicas, len(self._nodes))
        verdict, reason, change = self._decide(queue, wanted)
        if change is not None and not may_change:
            verdict, reason, change = Verdict.WAITING, f"{change.kind} on {change.node} at its next check", None
        if change is not None:
            self._count += 1
            self._on_node[change.node] += 1
            self._replicas[change.node] += {ChangeKind.ADD: 1, ChangeKind.FORGET: -1, ChangeKind.LEAD: 0}[change.kind]
        if wanted < asked.replicas:
            there = "is only 1 node" if wanted == 1 else f"are only {wanted} nodes"
            reason += f"; {asked.replicas} are requested, but there {there}"
        return QueuePlan(
            ref=queue.ref,
            members=queue.members,
            online=self._seen.online(queue),
            asked=asked,
            wanted=wanted,
            verdict=verdict,
            reason=reason,
            change=change,
        )

    def _decide(self, queue: ReplicaQueue, wanted: int) -> tuple[Verdict, str, Change | None]:
        online = self._seen.online(queue)
        under_way = self._busy.get(queue.ref)
        if under_way is not None:
            return Verdict.BUSY, f"{under_way.kind} on {under_way.node} is under way", None
        if len(online) < queue.majority:
            reason = (
                f"{len(online)} of {len(queue.members)} members are online: it can't be changed until more are back"
            )
            cut_off = [name for name in sorted(queue.online) if name in self._nodes and self._nodes[name].is_cut_off]
            if cut_off:
                reason += f"; RabbitMQ was partitioned and has not recovered; nodes cut off: {', '.join(cut_off)}"
            return Verdict.NO_MAJORITY, reason, None
        is_short, stalls = len(online) < wanted, self._stalls(queue, len(online))
        forget = self._to_forget(queue, is_short=is_short, stalls=stalls)
        if forget is not None:
            if self._is_full(forget.node):
                return Verdict.LIMITED, f"{forget.reason}; waits for other changes", None
            return Verdict.FORGET, forget.reason, forget
        if not is_short:
            if queue.ref in self._astray:
                return self._to_lead(queue, self._astray[queue.ref])
            extra = len(queue.members) - wanted
            return Verdict.ENOUGH, f"{extra} more than wanted are left alone" if extra > 0 else "as wanted", None
        patience = self._limits.recovery_interval_seconds
        if self._ages.short.get(queue.ref, 0.0) < patience:
            return (
                Verdict.WAITING,
                f"{len(online)} of {wanted} are online; waits until this has lasted {patience:g} s",
                None,
            )
        return self._to_add(queue, online, wanted, stalls=stalls)

    def _to_forget(self, queue: ReplicaQueue, *, is_short: bool, stalls: bool) -> Change | None:
        if queue.ref.kind is QueueKind.STREAM and not self._forgets_absent_streams:
            return None
        for name in sorted(queue.members - queue.online):
            absent = self._ages.absent.get(name, 0.0)
            if name not in self._nodes and absent >= self._limits.recovery_interval_seconds:
                return self._change(ChangeKind.FORGET, queue, name, f"{name} was removed from the cluster")
        after = self._limits.forget_after_seconds
        # A member prevents its replacement only if some node could get the new member.
        if after is None or (is_short and not (stalls and self._fit(queue))):
            return None
        for name in sorted(queue.members - queue.online):
            node = self._nodes.get(name)
            if node is not None and not node.is_running and self._ages.absent.get(name, 0.0) >= after:
                return self._change(ChangeKind.FORGET, queue, name, f"{name} has been down for {after:g} s")
        return None

    def _to_lead(self, queue: ReplicaQueue, owner_node: str) -> tuple[Verdict, str, Change | None]:
        why = f"its consumer is on {owner_node}, but its leader is not"
        patience = self._limits.recovery_interval_seconds
        if self._ages.astray.get(queue.ref, 0.0) < patience:
            return Verdict.WAITING, f"{why}; waits until this has lasted {patience:g} s", None
        if self._is_full(owner_node):
            return Verdict.LIMITED, f"{why}; waits for other changes", None
        return Verdict.LEAD, why, self._change(ChangeKind.LEAD, queue, owner_node, why)

    def _to_add(
        self, queue: ReplicaQueue, online: frozenset[str], wanted: int, *, stalls: bool
    ) -> tuple[Verdict, str, Change | None]:
        others = [node for node in self._nodes.values() if node.name not in queue.members]
        fit = self._fit(queue)
        short = f"{len(online)} of {wanted} are online"
        if not fit:
            why = ", ".join(f"{node.name} is {node.unfit_reason}" for node in others) or "all nodes have one already"
            return Verdict.NO_NODE, f"{short}, and no node can take another one: {why}", None
        if stalls and not self._limits.allow_stall:
            backlog = "a backlog of unknown size" if queue.messages is None else f"{queue.messages} messages"
            reason = (
                f"{short}; its new member would have to copy {backlog} before anything can be published: allow it "
                "with --allow-stall, or let the backlog shrink"
            )
            return Verdict.STALL, reason, None
        # An external placement may be slow, so don't call it if the limits permit no change.
        if self._count >= self._limits.changes_max or self._is_full(name := self._best(queue, fit)):
            return Verdict.LIMITED, f"{short}; waits for other changes", None
        return Verdict.ADD, short, self._change(ChangeKind.ADD, queue, name, short)

    def _fit(self, queue: ReplicaQueue) -> list[ReplicaNode]:
        """Return the nodes that may get a new member."""
        return [
            self._counted(node)
            for node in self._nodes.values()
            if node.name not in queue.members and node.unfit_reason is None
        ]

    def _stalls(self, queue: ReplicaQueue, online: int) -> bool:
        """Return whether a new member would noticeably delay publishing until it has caught up."""
        is_small = queue.messages is not None and queue.messages <= self._limits.stall_messages_max
        if self._voters_join_late or is_small:
            return False
        return online < majority(len(queue.members) + 1)

    def _best(self, queue: ReplicaQueue, fit: list[ReplicaNode]) -> str:
        """Return the node of ``fit`` that comes first in the placement's ranking.

        If this ranking contains no node of ``fit``, use the built-in ranking.
        """
        members = [self._counted(node) for name, node in self._nodes.items() if name in queue.members]
        names = {node.name for node in fit}
        ranked = [*self._place(queue, members, fit), *spread(queue, members, fit)]
        return next(name for name in ranked if name in names)

    def _counted(self, node: ReplicaNode) -> ReplicaNode:
        return replace(node, replicas=self._replicas[node.name])

    def _is_full(self, node: str) -> bool:
        return self._count >= self._limits.changes_max or self._on_node[node] >= self._limits.changes_per_node_max

    def _change(self, kind: ChangeKind, queue: ReplicaQueue, node: str, reason: str) -> Change:
        online = self._seen.online(queue)
        return Change(kind=kind, queue=queue.ref, node=node, reason=reason, members=queue.members, online=online)
