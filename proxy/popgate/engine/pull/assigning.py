"""Manages the sessions of pull clients, and assigns queues to the clients (decision 11).

Theory of operation. The owner of a subscription's first queue assigns all queues of the subscription
(``domain.assignment``). It receives the clients' heartbeats, and writes each change of the assignment to the store,
where the owners of the other queues read it. Only the assigning proxy knows the time of a client's last heartbeat. When
another proxy becomes the owner of the first queue, it restarts the timeout of each session. So a session survives the
death of the assigning proxy, and a heartbeat that changes nothing needs no write.

If the assigning proxy was suspended, or was too busy to receive heartbeats, it does not end sessions. Instead, it
restarts the timeouts of all sessions. While the store is unavailable, the assignment can't change, so no session ends.
If the store has lost its data, the assigning proxy writes the assignment back. Until then, the owners of the other
queues use the last assignment that they have read.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from popgate.domain.assignment import (
    SESSIONS_MAX,
    Assignment,
    Terms,
    ended,
    heard,
    share_of,
    taken,
)
from popgate.domain.errors import PeerUnavailable, RetryLater, StateUnavailable
from popgate.domain.modes import leased_by
from popgate.domain.names import ClientId, Subscription
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.assignments import StoredAssignment
from popgate.runtime.deadlines import NEVER

HEARTBEATS = 3
"""Number of heartbeats that a client is asked to send within the timeout of its session."""
SOON_SECONDS = 1.0
"""Maximum seconds until the next heartbeat of a client whose queues are changing."""
LATE_SECONDS = 0.5
"""If a timer is called this many seconds too late, the proxy may have missed heartbeats."""
AGAIN_SECONDS = 1.0
CHANGES_MAX = 5
"""Maximum number of attempts to write an assignment while other proxies write assignments of the same queues."""


class HeartbeatAnswer(NamedTuple):
    """The answer to a client's heartbeat. In every mode except pull mode, ``queues`` is empty.

    ``heartbeat_seconds``: the seconds after which the client should send the next heartbeat.
    """

    mode: ConsumeMode
    generation: int
    queues: list[int]
    heartbeat_seconds: float


class _Sessions:
    """The sessions and the assignment of one subscription, with their timers.

    ``epoch``: the epoch of this proxy's claim of the first queue when the assignment was read.
    """

    def __init__(self, served: ServedSubscription, seconds: float, overdue: Callable[[], None]) -> None:
        self.timer = NEVER
        self.served = served
        self.epoch = 0
        self.stored: StoredAssignment | None = None
        self.lock = asyncio.Lock()
        self.until: dict[ClientId, float] = {}
        """For each client, the time at which its session ends if no heartbeat arrives (monotonic)."""
        self.leaving: dict[int, tuple[int, float]] = {}
        """For each queue that its client must release: the generation in which the client was asked to release it, and
        the deadline (monotonic)."""
        self._seconds = seconds
        self._overdue = overdue
        self._expected = NEVER

    def is_current(self, served: ServedSubscription) -> bool:
        return self.served is served and self.epoch == served.hosts[0].epoch

    def note(self, now: float) -> None:
        """Set the end times of new sessions and the deadlines of new releases, because ``stored`` has changed."""
        assert self.stored is not None, "sessions that are noted have been read"
        assignment = self.stored.assignment
        whole = now + self._seconds
        self.until = {client: self.until.get(client, whole) for client in assignment.sessions}
        told = {number: one.until for number, one in assignment.holdings.items() if one.until}
        known = self.leaving
        self.leaving = {
            number: known[number] if number in known and known[number][0] == until else (until, whole)
            for number, until in told.items()
        }

    def next_end(self) -> float:
        """Return the earliest end of a session, or the earliest deadline for a release of a queue."""
        ends = [*self.until.values(), *(at for _, at in self.leaving.values())]
        self._expected = min(ends, default=NEVER)
        return self._expected

    def due(self, now: float) -> float | None:
        if now - self._expected > LATE_SECONDS:
            whole = now + self._seconds
            self.until = dict.fromkeys(self.until, whole)
            self.leaving = {number: (told, whole) for number, (told, _) in self.leaving.items()}
        if self.next_end() <= now:
            self._overdue()
            self._expected = now + AGAIN_SECONDS
        return None if self._expected == NEVER else self._expected


class Assigning:
    """Assigns the queues of each subscription whose first queue this proxy owns."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._seconds = context.options.pull_session_seconds
        self._sessions: dict[Subscription, _Sessions] = {}

    async def heard(
        self, served: ServedSubscription, client_id: ClientId, supports: Collection[ConsumeMode], shown: int | None
    ) -> HeartbeatAnswer:
        """Register a client, or record its heartbeat. ``shown``: the generation that the client knows, or None.

        Raises: PeerUnavailable if another proxy assigns the queues; StateUnavailable; RetryLater if there are too many
        clients.
        """

        def decide(before: Assignment, terms: Terms, generation: int) -> Assignment:
            if client_id not in before.sessions and len(before.sessions) >= SESSIONS_MAX:
                raise RetryLater(f"{SESSIONS_MAX} pull clients already have sessions of this group")
            return heard(before, terms, client_id, supports, shown, generation)

        sessions = self._sessions_of(served)
        assignment = await self._change(served, sessions, decide)
        while assignment.lease_generation != served.spec.lease_generation:  # the mode changed during the write
            assignment = await self._change(served, sessions, decide)
        sessions.until[client_id] = self._context.clock.monotonic() + self._seconds
        self._watch(sessions)
        share = share_of(assignment, client_id)
        heartbeat_seconds = self._seconds / HEARTBEATS
        if share.is_changing:
            heartbeat_seconds = min(heartbeat_seconds, SOON_SECONDS)
        mode = served.spec.mode
        return HeartbeatAnswer(
            mode, share.generation, share.queues if mode is ConsumeMode.PULL else [], heartbeat_seconds
        )

    async def left(self, served: ServedSubscription, client_id: ClientId) -> None:
        """End the session of a client at once. Idempotent. Raises the errors of ``heard``."""
        await self._arrange(served, self._sessions_of(served), leave=[client_id])

    async def known(self, served: ServedSubscription, *, is_news: bool = False) -> Assignment:
        """Return the latest assignment that this proxy knows.

        If ``is_news`` is True, first read the assignment from the store, unless this proxy itself assigns the queues.
        Raises: StateUnavailable.
        """
        sessions = self._sessions.get(served.name)
        if sessions is not None and sessions.stored is not None and sessions.is_current(served):
            return sessions.stored.assignment  # this proxy assigns the queues
        if is_news or served.group.assigned is None:
            stored = await self._context.assignments.read(served.name)
            if served.group.assigned is None or stored.version not in (0, served.group.assigned.version):
                served.assign(stored)
        assert served.group.assigned is not None, "it was read just now"
        return served.group.assigned.assignment

    async def tend(self, served: ServedSubscription) -> None:
        """Start to assign queues even if no client sends a request. Raises the errors of ``heard``.

        Otherwise, sessions that an earlier assigning proxy has left would never end.
        """
        sessions = self._sessions_of(served)
        if sessions.stored is None or not sessions.is_current(served):
            await self._arrange(served, sessions, leave=[])

    # -- assigning ------------------------------------------------------------------------------------------------

    async def _arrange(self, served: ServedSubscription, sessions: _Sessions, *, leave: Collection[ClientId]) -> None:
        def decide(before: Assignment, terms: Terms, generation: int) -> Assignment:
            return ended(before, terms, leave, generation)

        await self._change(served, sessions, decide)

    def _sessions_of(self, served: ServedSubscription) -> _Sessions:
        sessions = self._sessions.get(served.name)
        if sessions is None or sessions.served is not served:
            sessions = self._sessions[served.name] = _Sessions(served, self._seconds, lambda: self._end_soon(served))
        return sessions

    async def _change(
        self, served: ServedSubscription, sessions: _Sessions, decide: Callable[[Assignment, Terms, int], Assignment]
    ) -> Assignment:
        """Write the assignment that ``decide`` returns, and return it.

        Changes run one at a time, so that no change overwrites another.
        """
        async with sessions.lock:
            for _ in range(CHANGES_MAX):
                stored = await self._begun(served, sessions)
                before, spec = stored.assignment, served.spec
                is_pulled = leased_by(spec) is ConsumeMode.PULL
                generation = max(
                    before.generation + 1, int(self._context.clock.wall() * 1000)
                )  # it must also rise after a loss of data
                after = decide(before, Terms(is_pulled, spec.lease_generation, len(served.hosts)), generation)
                is_lost = bool(before.sessions) and not stored.version
                if after is before and not is_lost:
                    return after
                version = await self._context.assignments.write(served.name, after, stored.version)
                if version is None:
                    sessions.epoch = 0
                    continue
                sessions.stored = StoredAssignment(version, after)
                sessions.note(self._context.clock.monotonic())
                served.assign(sessions.stored)
                self._watch(sessions)
                return after
        raise StateUnavailable("other proxies keep assigning the same queues; try again")

    async def _begun(self, served: ServedSubscription, sessions: _Sessions) -> StoredAssignment:
        """Return the present assignment. Read it from the store if this proxy has just begun to assign.

        Also read it after another proxy has changed the stored assignment. Raises: PeerUnavailable if another proxy
        assigns the queues.
        """
        first = served.hosts[0]
        if first.is_owned:
            await first.take()
        if not first.is_owned:
            self._forget(sessions)
            raise PeerUnavailable(f"another proxy assigns the queues of group {served.name.group!r}")
        if sessions.stored is None or not sessions.is_current(served):
            if sessions.epoch != first.epoch:
                sessions.until, sessions.leaving = {}, {}  # another proxy may have received heartbeats
            epoch, stored = first.epoch, await self._context.assignments.read(served.name)
            if sessions.stored is not None and not stored.version:  # the store has lost its data: they are written back
                stored = sessions.stored._replace(version=0)
            sessions.stored, sessions.epoch = stored, epoch
            sessions.note(self._context.clock.monotonic())
            served.assign(sessions.stored)
            self._watch(sessions)
        return sessions.stored

    def _watch(self, sessions: _Sessions) -> None:
        if sessions.timer == NEVER and (at := sessions.next_end()) < NEVER:
            self._context.deadlines.schedule(at, sessions)

    def _forget(self, sessions: _Sessions) -> None:
        self._context.deadlines.cancel(sessions)
        if self._sessions.get(sessions.served.name) is sessions:
            del self._sessions[sessions.served.name]

    def _end_soon(self, served: ServedSubscription) -> None:
        self._context.background.spawn(self._end(served), name=f"end sessions of {served.name}")

    async def _end(self, served: ServedSubscription) -> None:
        """End the sessions without heartbeats, and reassign queues that their clients did not release in time."""
        sessions = self._sessions_of(served)
        if served.is_closed:
            self._forget(sessions)
            return

        def decide(before: Assignment, terms: Terms, generation: int) -> Assignment:
            now = self._context.clock.monotonic()
            silent = [client for client, at in sessions.until.items() if at <= now]
            slow = [number for number, (_, at) in sessions.leaving.items() if at <= now]
            after = ended(before, terms, silent, generation)
            return taken(after, terms, slow, generation)

        with contextlib.suppress(RetryLater):  # the store is unavailable, or another proxy assigns: no session ends
            await self._change(served, sessions, decide)
