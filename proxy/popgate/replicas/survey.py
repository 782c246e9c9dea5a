"""Observes the broker, and plans the changes of replicas that follow from the observation."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace

from popgate.domain.replica_plan import Ages, ReplicaPlan, queues_led_astray, replica_plan, short_queues
from popgate.domain.replica_wanted import as_groups_ask
from popgate.domain.replicas import Change, Observation, Placement, QueueRef
from popgate.ports.clock import Clock
from popgate.ports.replicas import ReplicaBroker, ReplicaCapabilities, ReplicaGroups
from popgate.replicas.ages import AgeBook
from popgate.replicas.options import KeeperOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """An observation of the broker, and the plan that was made from it. ``at`` is in Unix seconds."""

    at: float
    seen: Observation
    plan: ReplicaPlan


class Surveyor:
    """Observes the broker, tracks how long each problem has lasted, and makes plans.

    If ``patient`` is False, the plans contain repairs without the usual waiting time.
    """

    def __init__(
        self,
        broker: ReplicaBroker,
        groups: ReplicaGroups,
        options: KeeperOptions,
        place: Placement,
        clock: Clock,
        *,
        patient: bool = True,
    ) -> None:
        self._broker = broker
        self._groups = groups
        self._options = options
        self._place = place
        self._clock = clock
        limits = options.limits
        self._limits = limits if patient else replace(limits, recovery_interval_seconds=0.0)
        gap = max(2 * options.check_interval_seconds, limits.recovery_interval_seconds)
        self._short: AgeBook[QueueRef] = AgeBook(gap)
        self._astray: AgeBook[tuple[QueueRef, str]] = AgeBook(gap)
        self._absent: AgeBook[str] = AgeBook(gap)

    async def look(self) -> Observation:
        """Observe the broker once.

        Raises: BrokerUnavailable, PeerUnavailable (if the settings of groups are unknown).
        """
        groups = await self._groups.asking()
        return as_groups_ask(await self._broker.observe(), groups)

    async def plan(
        self,
        seen: Observation,
        capabilities: ReplicaCapabilities,
        *,
        busy: Collection[Change] = (),
        only: Collection[QueueRef] | None = None,
    ) -> Survey:
        """Return ``seen`` with a plan of changes.

        The plan is made in a thread, because a placement plug-in may be slow.

        ``busy`` contains the changes in progress. If ``only`` is given, the plan may change only these queues.
        """
        now = self._clock.monotonic()
        ages = Ages(
            short=self._short.note(now, short_queues(seen, self._options.policies)),
            astray={queue: age for (queue, _), age in self._astray.note(now, queues_led_astray(seen)).items()},
            absent=self._absent.note(now, seen.absent_nodes()),
        )

        def planned() -> ReplicaPlan:
            return replica_plan(
                seen,
                self._options.policies,
                self._limits,
                ages=ages,
                busy=tuple(busy),
                only=only,
                place=self._place,
                voters_join_late=capabilities.voters_join_late,
                forgets_absent_streams=capabilities.forgets_absent_streams,
                moves_leaders=capabilities.moves_leaders_by is not None,
            )

        return Survey(at=self._clock.wall(), seen=seen, plan=await asyncio.to_thread(planned))
