"""RabbitMQ, as far as it matters: one queue with a single active consumer, and the effect of a member's step on it.

A queue is a production `QueueView`. Priorities are kept as ranks, which keeps the number of states finite: only their
order matters.
"""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from popgate.domain.balance import Handover, QueueView, Step, Verb, Waiting


class Choice(Enum):
    """Which consumer RabbitMQ activates next among those that wait with the same priority, and when."""

    ANYBODY = "anybody"
    """RabbitMQ chooses any waiting consumer, at once; a takeover by priority (`Handover.TAKE`) takes a while."""
    LONGEST = "who waited longest"
    """The one that has waited longest, immediately, as RabbitMQ does."""
    LATE = "who waited longest, late"
    """The same one, after a while in which the queue is seen without a consumer. The former consumer may be waiting
    again.
    """


class After(NamedTuple):
    """The state of a queue after a step."""

    queue: QueueView
    interrupts: bool = False
    """Whether a member that consumed it was interrupted."""


class Broker:
    """The rules of one kind of queue."""

    def __init__(self, handover: Handover, choice: Choice) -> None:
        self._handover = handover
        self._choice = choice

    def apply(self, queue: QueueView, step: Step[str], me: str) -> After:
        """Return the immediate effect of ``me``'s step. RabbitMQ's activation of the next consumer is `own_steps`."""
        active, priority, waiting = queue
        if step.verb in {Verb.SUBSCRIBE, Verb.CLAIM}:
            is_there = active == me or any(one.member == me for one in waiting)
            if active == me or (step.verb is Verb.SUBSCRIBE and is_there):
                return After(queue)
            return After(self._ranked(active, priority, (*without(waiting, me), Waiting(me, step.priority))))
        if active == me:
            return After(self._ranked(None, 0, waiting), interrupts=True)
        return After(self._ranked(active, priority, without(waiting, me)))

    def own_steps(self, queue: QueueView) -> list[After]:
        """Return what RabbitMQ may do next by itself: nothing, or one of several things."""
        active, priority, waiting = queue
        taken = self._handover is Handover.TAKE and active is not None
        if not waiting or (active is not None and not (taken and waiting[0].priority > priority)):
            return []
        highest = waiting[0].priority
        first = [one for one in waiting if one.priority == highest]
        back = () if active is None else (Waiting(active, priority),)
        return [
            After(self._ranked(one.member, one.priority, (*without(waiting, one.member), *back)), interrupts=taken)
            for one in (first if self._choice is Choice.ANYBODY else first[:1])
        ]

    def _ranked(self, active: str | None, priority: int, waiting: Iterable[Waiting]) -> QueueView:
        """The same, in the order of the line, with ranks for priorities; 0 stays 0."""
        if active is None or self._handover is not Handover.TAKE:
            priority = 0  # only where the active one can be displaced does its priority mean anything
        line = sorted(waiting, key=lambda one: (-one.priority, one.member if self._choice is Choice.ANYBODY else ""))
        rank = {value: number for number, value in enumerate(sorted({0, priority, *(one.priority for one in line)}))}
        return QueueView(active, rank[priority], tuple(Waiting(one.member, rank[one.priority]) for one in line))


def without(waiting: Iterable[Waiting], member: str) -> tuple[Waiting, ...]:
    return tuple(one for one in waiting if one.member != member)


def is_on(queue: QueueView, member: str) -> bool:
    """Tell whether the member consumes the queue or waits for it."""
    return queue.active == member or any(one.member == member for one in queue.waiting)
