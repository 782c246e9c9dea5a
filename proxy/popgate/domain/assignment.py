"""Which client of a subscription may read which queue in pull mode (design: section 3, "Pull fallback").

Theory of operation. A client has a *session* while it is heard of, and each queue is held by one session at most. Who
gets what is ``balance.plan``'s word: sticky, and as even as can be. Every change has a *generation*, a number that only
grows, and is told to those whom it concerns: a session has the generation of the latest change of what it has, and a
queue the one in which its client was given it.

                  the plan                         its client shows the new generation, or ends
    (nobody has it) ------> held ----> to be let go ---------------------------------------------> held by the other
          ^                  |              |
          +------------------+              +--> held, where the other one has gone meanwhile
              its client ends

A queue is not torn from a client that lives. It is told to let go of it: the queue is not in its list any more, it
pulls no more from it, and settles what it has done of it. With its next heartbeat it shows the generation of that list,
and so that it has let go; only then the other one is given the queue. So nothing is done twice because a client came.
A client that begins anew (it shows no generation, or one of an earlier session) has let go of all it had.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from popgate.domain.balance import QueueView, Waiting, plan
from popgate.domain.names import ClientId
from popgate.domain.topics import ConsumeMode

SESSIONS_MAX = 1_000
"""Of one subscription."""


class Session(NamedTuple):
    """One client that is heard of. ``began`` is its first generation, ``generation`` the latest that it has to know."""

    supports: tuple[ConsumeMode, ...]
    began: int
    generation: int


class Holding(NamedTuple):
    """Who has a queue, and since which generation. ``to``: who is to have it next; ``until``: the generation in which
    the holder was told to let go of it."""

    client_id: ClientId
    since: int
    to: ClientId | None = None
    until: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All sessions of a subscription, and which queues they hold, by number, while leases of this generation of the
    consume mode are good."""

    generation: int = 0
    lease_generation: int = 0
    sessions: Mapping[ClientId, Session] = field(default_factory=dict[ClientId, Session])
    holdings: Mapping[int, Holding] = field(default_factory=dict[int, Holding])


class Terms(NamedTuple):
    """What an assignment is made for. ``is_pulled``: leases of pull clients are good."""

    is_pulled: bool
    lease_generation: int
    queue_count: int


class Share(NamedTuple):
    """What one client is told. ``is_changing``: queues are on their way from it or to it, so it should ask soon."""

    generation: int
    queues: list[int]
    is_changing: bool


def heard(
    before: Assignment,
    terms: Terms,
    client_id: ClientId,
    supports: Collection[ConsumeMode],
    shown: int | None,
    generation: int,
) -> Assignment:
    """A client registers, or shows with ``shown`` that it lives and which generation it knows.

    ``generation`` is that of the changes which follow, if any: higher than every one before.
    """
    session = before.sessions.get(client_id)
    wanted = tuple(sorted(supports))
    is_known = session is not None and shown is not None and session.began <= shown <= session.generation
    if session is None or shown is None or not is_known:
        holdings = {number: _anew(one, client_id, generation) for number, one in before.holdings.items()}
        session = Session(wanted, generation, generation)
    else:
        has_let_go = [n for n, one in before.holdings.items() if one.client_id == client_id and 0 < one.until <= shown]
        is_arranged = before.lease_generation == terms.lease_generation
        if not has_let_go and session.supports == wanted and is_arranged:
            return before  # nearly all heartbeats: what was arranged would be arranged the same
        holdings = _passed_on(before, has_let_go, generation)
        session = session._replace(supports=wanted)
    sessions = {**before.sessions, client_id: session}
    return _arranged(before, replace(before, sessions=sessions, holdings=holdings), terms, generation)


def ended(before: Assignment, terms: Terms, clients: Collection[ClientId], generation: int) -> Assignment:
    """These have left, or were not heard of for too long."""
    sessions = {client_id: one for client_id, one in before.sessions.items() if client_id not in clients}
    return _arranged(before, replace(before, sessions=sessions), terms, generation)


def taken(before: Assignment, terms: Terms, queues: Collection[int], generation: int) -> Assignment:
    """The clients of these queues were told to let go of them, and have not in time: they lose them."""
    leaving = [number for number in queues if (one := before.holdings.get(number)) is not None and one.until]
    return _arranged(before, replace(before, holdings=_passed_on(before, leaving, generation)), terms, generation)


def share_of(assignment: Assignment, client_id: ClientId) -> Share:
    """What ``client_id``, which has a session, is told."""
    holdings = assignment.holdings
    has = [number for number, one in sorted(holdings.items()) if one.client_id == client_id and one.to is None]
    on_its_way = any(one.to is not None and client_id in (one.client_id, one.to) for one in holdings.values())
    return Share(assignment.sessions[client_id].generation, has, on_its_way)


def held_by(assignment: Assignment, number: int, client_id: ClientId, shown: int) -> Holding | None:
    """The holding under which a client that knows generation ``shown`` may settle messages of a queue; None: its
    generation is overtaken. While ``to`` is set it is given no more of them."""
    one, session = assignment.holdings.get(number), assignment.sessions.get(client_id)
    if one is None or session is None or one.client_id != client_id:
        return None
    return one if one.since <= shown <= session.generation else None


def _anew(one: Holding, client_id: ClientId, generation: int) -> Holding:
    """What becomes of a holding when ``client_id`` begins a new session."""
    return one if one.client_id != client_id else Holding(one.to or client_id, generation)


def _passed_on(before: Assignment, queues: Collection[int], generation: int) -> dict[int, Holding]:
    """The holdings, once these queues, which their clients were told to let go of, are given to who is next."""
    holdings = dict(before.holdings)
    for number in queues:
        to = holdings[number].to
        assert to is not None, "only what somebody else is to have is let go of"
        holdings[number] = Holding(to, generation)
    return holdings


def _arranged(before: Assignment, now: Assignment, terms: Terms, generation: int) -> Assignment:
    """``now``, with its queues spread over its sessions; ``before`` itself where nothing is different."""
    members = sorted(client for client, one in now.sessions.items() if ConsumeMode.PULL in one.supports)
    if not terms.is_pulled:
        members = []
    holdings: dict[int, Holding] = {}
    if now.lease_generation == terms.lease_generation:
        for number, one in now.holdings.items():
            if one.to is not None and one.to not in members:
                one = Holding(one.client_id, one.since)
            if one.client_id in members:
                holdings[number] = one
            elif one.to is not None:
                holdings[number] = Holding(one.to, generation)
    if members:
        views = {f"{number:03}": _view(holdings.get(number)) for number in range(terms.queue_count)}
        for name, to in plan(members, views).items():
            number, to = int(name), ClientId(to)
            has = holdings.get(number)
            holdings[number] = Holding(to, generation) if has is None else has._replace(to=to, until=generation)
    concerned: set[ClientId] = set()
    for number in {*before.holdings, *holdings}:
        was, is_now = before.holdings.get(number), holdings.get(number)
        if was != is_now:
            concerned |= {one.client_id for one in (was, is_now) if one is not None}
    sessions = {
        client_id: one._replace(generation=generation) if client_id in concerned else one
        for client_id, one in now.sessions.items()
    }
    after = replace(now, lease_generation=terms.lease_generation, sessions=sessions, holdings=holdings)
    return before if after == before else replace(after, generation=generation)


def _view(one: Holding | None) -> QueueView:
    if one is None:
        return QueueView()
    return QueueView(one.client_id) if one.to is None else QueueView(waiting=(Waiting(one.to),))
