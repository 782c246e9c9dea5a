"""The cases to explore: those that run with every change (``SHORT``), and those for `make explore` only."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from explorer.algorithms import with_presence
from explorer.broker import Choice
from explorer.group import Case, Start, Views
from popgate.domain.balance import Handover

ANYBODY = [(handover, Choice.ANYBODY) for handover in Handover]
LONGEST = [(Handover.CLAIM, Choice.LONGEST), (Handover.SOLE, Choice.LONGEST)]
LATE = [(Handover.CLAIM, Choice.LATE), (Handover.SOLE, Choice.LATE)]


def size(queues: int, members: int) -> Case:
    return Case(queues=queues, members=members, handover=Handover.SOLE)


def each(case: Case, kinds: Iterable[tuple[Handover, Choice]] = (*ANYBODY, *LATE)) -> Iterator[Case]:
    for handover, choice in kinds:
        yield replace(case, handover=handover, choice=choice)


def current(case: Case) -> Case:
    """Return a case that starts from every possible state, with current views."""
    return replace(case, start=Start.ANY)


def empty(case: Case) -> Case:
    """Return a case that starts without a member on any queue."""
    return replace(case, start=Start.EMPTY)


def presence(case: Case) -> Case:
    """Return a case in which members announce their presence."""
    return replace(case, algorithm=with_presence)


def stale(case: Case) -> Case:
    return replace(case, views=Views.STALE)


def torn(case: Case) -> Case:
    return replace(case, views=Views.TORN)


SHORT = [
    *each(current(size(3, 2))),
    *each(current(size(2, 3))),
    *each(current(size(3, 3)), ANYBODY[1:]),
    *each(current(size(2, 4)), ANYBODY),
    *each(stale(size(3, 3)), [*ANYBODY, LATE[0]]),
    *each(stale(size(4, 3)), ANYBODY),
    *each(torn(size(4, 3)), ANYBODY),
    *each(replace(stale(size(3, 2)), deaths=1)),
    *each(replace(stale(size(2, 3)), deaths=1), ANYBODY),
    *each(replace(torn(size(3, 2)), deaths=1), LONGEST),
    *each(replace(stale(size(2, 3)), stops=1)),
    *each(replace(stale(size(3, 2)), deaths=1, stops=1), ANYBODY[1:]),
    *each(replace(stale(size(2, 3)), joiners=1)),
    *each(replace(empty(size(2, 3)), joiners=2)),
    *each(replace(stale(size(2, 3)), hangs=1)),
    *each(replace(empty(stale(size(2, 2))), hangs=1)),
    *each(replace(stale(size(2, 2)), hangs=1, deaths=1)),
    *each(presence(replace(stale(size(2, 3)), stops=1)), ANYBODY),
    *each(presence(replace(stale(size(3, 2)), deaths=1)), ANYBODY[1:]),
    *each(presence(replace(empty(size(2, 3)), joiners=2))),
]
LONG = [
    *each(current(size(3, 3)), [ANYBODY[0], *LATE]),
    *each(current(size(2, 4)), LATE),
    *each(current(size(5, 2))),
    *each(stale(size(3, 3)), LATE[1:]),
    *each(stale(size(4, 3)), LATE[:1]),
    *each(stale(size(5, 3)), ANYBODY),
    *each(stale(size(4, 4)), ANYBODY[:2]),
    *each(torn(size(5, 3)), ANYBODY),
    *each(torn(size(3, 4)), ANYBODY[:2]),
    *each(replace(stale(size(2, 3)), deaths=1), LATE[:1]),
    *each(replace(torn(size(3, 2)), deaths=1), ANYBODY[1:]),
    *each(replace(stale(size(3, 3)), stops=1), [ANYBODY[0], *LONGEST]),
    *each(replace(stale(size(3, 2)), deaths=1, stops=1), LATE),
    *each(replace(stale(size(3, 3)), joiners=1), [ANYBODY[0], *LONGEST]),
    *each(replace(stale(size(2, 3)), joiners=2), [ANYBODY[0], *LONGEST]),
    *each(replace(stale(size(3, 3)), hangs=1), ANYBODY),
    *each(replace(stale(size(3, 2)), hangs=1, deaths=1), [*ANYBODY[1:], *LATE]),
    *each(presence(current(size(3, 3))), ANYBODY[1:]),
    *each(presence(replace(stale(size(2, 3)), deaths=1)), ANYBODY),
    *each(presence(replace(stale(size(3, 3)), joiners=1)), [ANYBODY[0], *LONGEST]),
]
