"""Waits for the keeper lock, and maintains the replicas while it holds this lock.

The docstring of the package describes the theory of operation.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from popgate.domain.errors import BrokerUnavailable, LockHeld, LockNotFound, PeerUnavailable, PopgateError
from popgate.domain.replica_plan import ReplicaPlan, Verdict
from popgate.domain.replicas import Change, Placement, QueueRef
from popgate.locks.grants import Grant
from popgate.ports.clock import Clock
from popgate.ports.replicas import ReplicaBroker, ReplicaCapabilities, ReplicaGroups
from popgate.replicas.changing import ChangeOutcome, Ending
from popgate.replicas.events import KeeperEvent, KeeperRecord, RecordedEvent
from popgate.replicas.group_memory import RememberedGroups
from popgate.replicas.keeper_lock import KeeperAtWork, KeeperLock
from popgate.replicas.options import KeeperOptions
from popgate.replicas.schedule import CheckSchedule
from popgate.replicas.survey import Survey, Surveyor
from popgate.replicas.term import Term

_log = logging.getLogger(__name__)

CAPABILITIES_SECONDS = 60.0
"""Seconds until the capabilities of the broker are read again. For example, a command-line tool of the broker that
failed may work by then."""
LINE_SECONDS = 60.0
"""Maximum seconds that one attempt to acquire the lock waits."""
PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 10.0
DROPS_MAX = 5
"""Number of dropped changes of one queue after which ``apply`` gives up. The survey on which a change is based may be
older than the change before it, because RabbitMQ's management API reports with a delay."""
TICK_SHARE = 0.1
"""Usual minimum pause between two rounds of checks, as a share of the check interval. All queues that become due during
the pause are checked together."""
TICK_SECONDS_MAX = 3.0
IN_TIME = frozenset({Verdict.WAITING, Verdict.LIMITED})
"""Verdicts on changes that will be made later. Both are recorded as WAITING."""
_ENDED = {Ending.DROPPED: "been dropped", Ending.FAILED: "failed"}


class ReplicaKeeper:
    """Maintains the replicas of quorum queues and streams.

    ``run`` maintains them continuously. ``apply`` makes only the changes that are needed now. ``survey`` changes
    nothing.

    ``record`` contains the events of this keeper. ``latest`` is its latest survey while it is active, or None if it is
    not active or the broker does not answer. ``groups`` provides the numbers of replicas that popgate's groups require.
    If ``groups`` is None, the keeper ignores groups.
    """

    def __init__(
        self,
        broker: ReplicaBroker,
        lock: KeeperLock,
        options: KeeperOptions,
        *,
        place: Placement,
        clock: Clock,
        chance: random.Random,
        groups: ReplicaGroups | None = None,
    ) -> None:
        self.record = KeeperRecord()
        self.latest: Survey | None = None
        self._broker = broker
        self._lock = lock
        self._options = options
        self._place = place
        self._clock = clock
        self._chance = chance
        self._groups = RememberedGroups(groups)
        self._term: Term | None = None
        self._verdicts: dict[QueueRef, Verdict] = {}
        self._capabilities: ReplicaCapabilities | None = None
        self._capabilities_at = 0.0
        self._told_of_leaders = False

    @property
    def options(self) -> KeeperOptions:
        return self._options

    @property
    def fencing_token(self) -> int | None:
        """The fencing token of the lock while the keeper is active, otherwise None."""
        return None if self._term is None else self._term.fencing_token

    @property
    def is_at_work(self) -> bool:
        return self._term is not None

    @property
    def under_way(self) -> list[Change]:
        return [] if self._term is None else self._term.changes

    async def capabilities(self) -> ReplicaCapabilities:
        """Return the capabilities of the broker, which are cached for ``CAPABILITIES_SECONDS``.

        Raises: BrokerUnavailable.
        """
        now = self._clock.monotonic()
        if self._capabilities is None or now - self._capabilities_at >= CAPABILITIES_SECONDS:
            self._capabilities, self._capabilities_at = await self._broker.start(), now
            if self._options.limits.move_leaders and self._capabilities.moves_leaders_by is None:
                if not self._told_of_leaders:
                    _log.warning("this RabbitMQ can't move leaders", extra={"version": self._capabilities.version})
                self._told_of_leaders = True
        return self._capabilities

    async def at_work(self) -> KeeperAtWork | None:
        """Return the keeper that holds the lock, or None. It may be this keeper or another one.

        Raises: BrokerUnavailable, LockUnavailable.
        """
        try:
            return await self._lock.holder()
        except LockNotFound:
            return None

    async def survey(self) -> Survey:
        """Observe the broker and make a plan, but change nothing.

        The plan ignores the time that the keeper would wait before it repairs a queue.

        Raises: BrokerUnavailable, PeerUnavailable.
        """
        surveyor = self._surveyor(patient=False)
        capabilities = await self.capabilities()
        return await surveyor.plan(await surveyor.look(), capabilities, busy=self.under_way)

    async def apply(self) -> Survey:
        """Make all changes that are needed now, until no further change is possible. Return the last survey.

        If a change of a queue fails, or ``DROPS_MAX`` changes of it are dropped, this call does not change the queue
        again. The row of the queue in the returned plan contains the reason.

        Raises: BrokerUnavailable, PeerUnavailable, LockUnavailable, LockLost, LockHeld (if another keeper is active).
        """
        grant = await self._lock.acquire(0.0)
        if grant is None:
            raise LockHeld("another replica keeper is at work; 'popgate replicas status' shows it")
        surveyor = self._surveyor(patient=False)
        given_up: dict[QueueRef, str] = {}
        drops: Counter[QueueRef] = Counter()

        def ended(change: Change, outcome: ChangeOutcome) -> None:
            drops[change.queue] += outcome.ending is Ending.DROPPED
            if outcome.ending is Ending.FAILED or drops[change.queue] >= DROPS_MAX:
                given_up[change.queue] = (
                    f"{change.kind} on {change.node} has {_ENDED[outcome.ending]}: {outcome.reason}"
                )

        async with self._at_work(grant, ended) as term:
            capabilities = await self.capabilities()
            while not grant.lost.is_set():
                seen = await surveyor.look()
                refs = {queue.ref for queue in seen.queues} - given_up.keys()
                self.latest = await surveyor.plan(seen, capabilities, busy=term.changes, only=refs)
                self._note_verdicts(self.latest.plan)
                for change in self.latest.plan.changes:
                    term.begin(change)
                if not term.changes:
                    return replace(self.latest, plan=self.latest.plan.with_reasons(given_up))
                before = drops.total()
                await term.wait(TICK_SECONDS_MAX)
                if drops.total() > before:
                    await asyncio.sleep(PAUSE_SECONDS_MIN)
            await grant.verify()
        raise AssertionError("a lost lock does not verify")

    async def run(self) -> None:
        """Maintain the replicas until this call is cancelled. After an error, record it and continue after a pause."""
        pause = PAUSE_SECONDS_MIN
        while True:
            try:
                grant = await self._lock.acquire(LINE_SECONDS)
                if grant is not None:
                    pause = PAUSE_SECONDS_MIN
                    await self._serve(grant)
            except PopgateError as error:
                self._note(KeeperEvent.BLIND, error.detail)
            except Exception as error:  # a keeper beside a proxy must not stop the proxy
                _log.exception("the replica keeper has failed, and starts again")
                self._note(KeeperEvent.BLIND, repr(error))
            else:
                continue
            await asyncio.sleep(pause * self._chance.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    # -- at work -------------------------------------------------------------------------------------------------------

    async def _serve(self, grant: Grant) -> None:
        """Maintain the replicas until the lock is lost."""
        schedule = CheckSchedule(self._options.check_interval_seconds, self._chance)
        surveyor = self._surveyor(patient=True)
        is_over = asyncio.create_task(grant.lost.wait(), name="popgate replica keeper's lock")
        try:
            async with self._at_work(
                grant, lambda change, _: schedule.soon(self._clock.monotonic(), change.queue)
            ) as term:
                working = asyncio.create_task(
                    self._work(term, schedule, surveyor), name="popgate replica keeper at work"
                )
                try:
                    await asyncio.wait({working, is_over}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    working.cancel()
                    await asyncio.wait({working})
                if not working.cancelled():
                    working.result()
        finally:
            is_over.cancel()

    async def _work(self, term: Term, schedule: CheckSchedule, surveyor: Surveyor) -> None:
        tick = min(TICK_SECONDS_MAX, self._options.check_interval_seconds * TICK_SHARE)
        is_blind = False
        while True:
            try:
                capabilities = await self.capabilities()
                seen = await surveyor.look()
            except (BrokerUnavailable, PeerUnavailable) as error:
                if not is_blind:
                    self._note(KeeperEvent.BLIND, error.detail)
                is_blind, self._capabilities, self.latest = True, None, None
                await term.wait(tick * self._chance.uniform(1.0, 2.0))
                continue
            is_blind = False
            now = self._clock.monotonic()
            schedule.know(now, {*(queue.ref for queue in seen.queues), *seen.unseen})
            self.latest = await surveyor.plan(seen, capabilities, busy=term.changes, only=schedule.due(now))
            self._note_verdicts(self.latest.plan)
            for row in self.latest.plan.rows:
                if row.verdict is Verdict.LIMITED:
                    schedule.soon(now, row.ref)
            for change in self.latest.plan.changes:
                term.begin(change)
            left = max(tick, schedule.seconds_to_next(self._clock.monotonic()))
            await term.wait(left * self._chance.uniform(0.8, 1.2))

    @contextlib.asynccontextmanager
    async def _at_work(self, grant: Grant, ended: Callable[[Change, ChangeOutcome], None]) -> AsyncGenerator[Term]:
        term = Term(grant, self._broker, self._options, self._clock, self.record, ended)
        self._term = term
        self._verdicts = {}
        self._note(KeeperEvent.TERM_BEGAN)
        try:
            yield term
        finally:
            await term.close()
            self._note(KeeperEvent.TERM_ENDED, grant.reason)
            self._term = self.latest = None
            await grant.release()

    def _surveyor(self, *, patient: bool) -> Surveyor:
        return Surveyor(self._broker, self._groups, self._options, self._place, self._clock, patient=patient)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _note(self, event: KeeperEvent, reason: str = "") -> None:
        self.record.note(
            RecordedEvent(at=self._clock.wall(), event=event, reason=reason, fencing_token=self.fencing_token)
        )

    def _note_verdicts(self, plan: ReplicaPlan) -> None:
        """Record the verdict on each queue whose verdict differs from the one in the previous plan."""
        before: Mapping[QueueRef, Verdict] = self._verdicts
        self._verdicts = {row.ref: Verdict.WAITING if row.verdict in IN_TIME else row.verdict for row in plan.rows}
        for row in plan.rows:
            now = self._verdicts[row.ref]
            is_news = now is not before.get(row.ref, Verdict.ENOUGH)
            if not is_news or now is Verdict.BUSY:  # the start of the change was already recorded
                continue
            self.record.note(
                RecordedEvent(
                    at=self._clock.wall(),
                    event=KeeperEvent.DECIDED,
                    what=now,
                    queue=row.ref,
                    node="" if row.change is None else row.change.node,
                    reason=row.reason,
                    fencing_token=self.fencing_token,
                )
            )
