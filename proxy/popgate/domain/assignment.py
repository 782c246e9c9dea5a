"""Decides which client of a subscription may read which queue in pull mode (decision 11).

Theory of operation. A client has a *session* while it sends heartbeats. Each queue is held by at most one session.
``balance.plan`` assigns the queues as evenly as possible, and moves as few queues as possible. Every change of the
assignment has a *generation*, a number that only grows. A session records the latest generation in which the client's
queues changed. For each queue, the assignment records the generation in which the present client received the queue.

              the plan                       its client shows the new generation, or ends
    (no holder) ------> held ----> releasing ---------------------------------------------> held by the next client
        ^                |             |
        +----------------+             +--> held, if the next client ends meanwhile
          its client ends

In the diagram, a client *shows* the generation that its heartbeat contains, and it *ends* when its session ends.

Before a queue moves, the live client that holds the queue must release it. The queue disappears from the client's list
of queues. The client then stops pulling from the queue, and settles the messages that it has processed. The client's
next heartbeat contains the generation of the shorter list, which proves the release. Only then does the next client
receive the queue. So no message is processed twice because a client joined. A heartbeat without a generation, or with a
generation of an earlier session, means that the client has restarted. A restarted client has released all its queues.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from popgate.domain.balance import QueueView, Waiting, plan
from popgate.domain.names import ClientId
from popgate.domain.topics import ConsumeMode

SESSIONS_MAX = 1_000
"""Maximum number of sessions of one subscription."""


class Session(NamedTuple):
    """The session of one client, from its registration until it leaves or its heartbeats time out.

    ``supports``: the consume modes that the client supports. ``began``: the first generation of the session.
    ``generation``: the latest generation in which the client's queues changed.
    """

    supports: tuple[ConsumeMode, ...]
    began: int
    generation: int


class Holding(NamedTuple):
    """The client that holds one queue, and the generation ``since`` in which the client received the queue.

    ``to``: the next client, if ``client_id`` must release the queue. ``until``: the generation in which ``client_id``
    was asked to release it, or 0.
    """

    client_id: ClientId
    since: int
    to: ClientId | None = None
    until: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All client sessions of a subscription, and the holdings of its queues by queue number.

    The holdings become void when ``lease_generation``, a generation of the group's consume mode, is no longer the one
    in which the valid leases began.
    """

    generation: int = 0
    lease_generation: int = 0
    sessions: Mapping[ClientId, Session] = field(default_factory=dict[ClientId, Session])
    holdings: Mapping[int, Holding] = field(default_factory=dict[int, Holding])


class Terms(NamedTuple):
    """The properties of a group on which an assignment depends.

    ``is_pulled``: whether leases of pull clients are valid. ``lease_generation``: the generation of the consume mode in
    which the valid leases began.
    """

    is_pulled: bool
    lease_generation: int
    queue_count: int


class Share(NamedTuple):
    """The queues from which one client may pull, by number.

    ``is_changing``: whether a queue is moving from or to the client, so that the client should ask again soon.
    """

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
    """Return the assignment after a registration or a heartbeat of a client.

    ``shown``: the generation in the heartbeat; None if the client knows no generation. ``generation``: the generation
    of the resulting changes, which must be higher than every earlier one. If nothing changes, ``before`` is returned.
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
            return before  # most heartbeats end here, because the plan would not change
        holdings = _forwarded(before, has_let_go, generation)
        session = session._replace(supports=wanted)
    sessions = {**before.sessions, client_id: session}
    return _arranged(before, replace(before, sessions=sessions, holdings=holdings), terms, generation)


def ended(before: Assignment, terms: Terms, clients: Collection[ClientId], generation: int) -> Assignment:
    """Return the assignment after the sessions of ``clients`` have ended: they left, or their heartbeats timed out."""
    sessions = {client_id: one for client_id, one in before.sessions.items() if client_id not in clients}
    return _arranged(before, replace(before, sessions=sessions), terms, generation)


def taken(before: Assignment, terms: Terms, queues: Collection[int], generation: int) -> Assignment:
    """Return the assignment after ``queues`` were taken from clients that did not release them in time.

    Queues that no client has been asked to release stay unchanged.
    """
    leaving = [number for number in queues if (one := before.holdings.get(number)) is not None and one.until]
    return _arranged(before, replace(before, holdings=_forwarded(before, leaving, generation)), terms, generation)


def share_of(assignment: Assignment, client_id: ClientId) -> Share:
    """Return the queues of ``client_id``, which must have a session."""
    holdings = assignment.holdings
    has = [number for number, one in sorted(holdings.items()) if one.client_id == client_id and one.to is None]
    on_its_way = any(one.to is not None and client_id in (one.client_id, one.to) for one in holdings.values())
    return Share(assignment.sessions[client_id].generation, has, on_its_way)


def held_by(assignment: Assignment, number: int, client_id: ClientId, shown: int) -> Holding | None:
    """Return the holding of queue ``number`` if the client, which knows generation ``shown``, may settle messages of
    it.

    Return None if the client does not hold the queue, or if ``shown`` is outdated. If ``to`` of the holding is set, the
    client receives no more messages of the queue.
    """
    one, session = assignment.holdings.get(number), assignment.sessions.get(client_id)
    if one is None or session is None or one.client_id != client_id:
        return None
    return one if one.since <= shown <= session.generation else None


def _anew(one: Holding, client_id: ClientId, generation: int) -> Holding:
    """Return a holding after ``client_id`` has begun a new session.

    If ``client_id`` had to release the queue, the next client has it.
    """
    return one if one.client_id != client_id else Holding(one.to or client_id, generation)


def _forwarded(before: Assignment, queues: Collection[int], generation: int) -> dict[int, Holding]:
    """Return the holdings after ``queues``, which are being released, have passed to their next clients."""
    holdings = dict(before.holdings)
    for number in queues:
        to = holdings[number].to
        assert to is not None, "a queue is released only for a next client"
        holdings[number] = Holding(to, generation)
    return holdings


def _arranged(before: Assignment, now: Assignment, terms: Terms, generation: int) -> Assignment:
    """Return ``now`` after its queues are spread over its sessions, or ``before`` itself if nothing changes."""
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
