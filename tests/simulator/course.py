"""The course of every simulation: load and faults, then rest, draining, and the audit."""

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.domain.topics import Policy
from simulator.client import SimulatedClient
from simulator.face import Face, Served
from simulator.loop import DeadlockError, VirtualLoop
from simulator.network import Network
from simulator.wires import Weather
from support.audit import Audit
from support.audit_load import Habits, Load
from support.audit_redrives import REDRIVEN_TOPIC, RedrivenAudit, Redrives
from support.audit_rest import note_counts
from support.audit_rules import Kind, explain, judge
from support.audit_told import raised

TOPIC, GROUP = "audit", "default"
MAX_DELIVERIES = 3
SECONDS = 45.0
"""Seconds of faults, in virtual time."""
DRAIN_SECONDS_MAX = 90.0
"""Maximum seconds from the end of the faults until the group is drained; nothing is published in that time."""
GIVE_UP_SECONDS, MISSING_SECONDS, POLL_SECONDS = 120.0, 20.0, 1.0
RUN_OUT_SECONDS = 12.0
"""Seconds; longer than any lease of the load."""
LOOKS_MAX, LOOK_SECONDS = 40, 1.0
HABITS = Habits.with_everything(
    publishers=2,
    consumers=2,
    batch_max=24,
    body_bytes_max=200,
    open_max=200,
    rest_seconds_max=8.0,
    lease_seconds_min=2.0,
    lease_seconds=6.0,
    wait_seconds=6.0,
    wait_seconds_max=8.0,
    hold_share=0.0,
    expire_share=0.06,
    extend_share=0.08,
    attempt_share=0.25,
    mixed_share=0.2,
    reject_share=0.1,
)


@dataclass(kw_only=True)
class Outcome:
    """The result of one seed. ``complaint`` is empty if every promise was kept."""

    seed: int
    world: str
    trace: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0
    figures: dict[str, int] = field(default_factory=dict[str, int])
    faults: dict[str, int] = field(default_factory=dict[str, int])
    kinds: set[Kind] = field(default_factory=set[Kind])
    """The rules that were broken."""
    complaint: str = ""

    def __str__(self) -> str:
        again = f"make simulate ARGS='--world {self.world} --first {self.seed} --seeds 1'"
        return f"seed {self.seed} FAILED ({again}):\n{self.complaint}"


Course = Callable[[VirtualLoop, Outcome, ExitStack], Coroutine[Any, Any, None]]


def run_course(world: str, seed: int, course: Course) -> Outcome:
    """Run ``course`` in virtual time. It records its findings in the outcome, and on the stack what must be closed."""
    outcome = Outcome(seed=seed, world=world)
    loop = VirtualLoop()
    with _all_chance_from(seed):
        try:
            with ExitStack() as cleanup:
                loop.run(course(loop, outcome, cleanup))
        except (DeadlockError, TimeoutError) as error:
            outcome.complaint = f"stuck: {error}"
        finally:
            loop.close()
    outcome.trace, outcome.steps, outcome.virtual_seconds = loop.trace, loop.steps, loop.time()
    if loop.errors and not outcome.complaint:
        outcome.complaint = "; ".join(loop.errors[:3])
    return outcome


class Ground:
    """The parts that both simulated worlds have: the network, the audit of the clients, and the failures in processes.

    ``chance`` decides the weather and the choices of the clients.
    """

    def __init__(self, seed: int, chance: random.Random) -> None:
        self.failures: list[str] = []
        self.audit = Audit()
        self.audit.max_deliveries = MAX_DELIVERIES
        self.network = Network(random.Random(f"network {seed}"), Weather(chance), self.failures)
        self._seed = seed
        self._chance = chance

    async def create_topics(
        self, proxy: Served, *, queues: int, redriven_queues: int, in_flight_max: int | None = None
    ) -> None:
        """Create the topic of the load and that of redriven dead letters, in the process of ``proxy``."""
        created = asyncio.get_running_loop().create_future()
        changes = proxy.engine.changes

        async def create() -> None:
            await changes.put_topic(TOPIC, queues=queues, adopt=None)
            await changes.put_group(TOPIC, GROUP, Policy(max_deliveries=MAX_DELIVERIES, max_in_flight=in_flight_max))
            await changes.put_topic(REDRIVEN_TOPIC, queues=redriven_queues, adopt=None)
            await changes.put_group(REDRIVEN_TOPIC, GROUP, Policy(max_deliveries=None))
            created.set_result(None)

        proxy.process.spawn(create(), "create")
        await created

    async def go_through(
        self,
        outcome: Outcome,
        up: Callable[[], Sequence[Served]],
        *,
        proxies: Mapping[InstanceId, Served],
        disturb: Callable[[], Awaitable[None]],
        is_empty: Callable[[], Awaitable[bool]],
    ) -> None:
        """Record in ``outcome`` the result of a load during faults. Its dead letters are redriven to another topic in
        that time.

        ``up``: returns the proxies that listen. ``proxies``: all proxies that were ever started. ``is_empty``: returns
        whether the broker has nothing left but dead letters.
        """
        audit, redriven, seed = self.audit, RedrivenAudit(self.audit), f"{self._seed}"
        network = self.network
        client = SimulatedClient(audit, Face(TOPIC, GROUP, audit, network, proxies), network, up, self._chance)
        face = Face(REDRIVEN_TOPIC, GROUP, redriven, network, proxies)
        taker = SimulatedClient(redriven, face, network, up, random.Random(f"redriven {seed}"))
        stuck = ""
        try:
            async with Load(client, seed, HABITS) as load, Redrives(client, taker, seed) as redrives:
                await disturb()
                audit.heal(DRAIN_SECONDS_MAX)
                await redrives.end(timeout_seconds=GIVE_UP_SECONDS, poll_seconds=POLL_SECONDS)
                await note_counts(load, run_out_seconds=RUN_OUT_SECONDS, looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
                await load.drain(
                    timeout_seconds=GIVE_UP_SECONDS, missing_seconds=MISSING_SECONDS, poll_seconds=POLL_SECONDS
                )
                audit.drained()
                await _until(is_empty)
                await client.note_dead_letters(looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
                await client.pop("who asks last")  # long polls began before: messages expired since may be gone
        except* (TimeoutError, PopgateError) as error:
            stuck = f"stuck: {'; '.join(raised(error))}\n"
        violations = judge(audit, drained=not stuck) + judge(redriven, drained=not stuck)
        outcome.figures = {**audit.figures(), "redriven": len(audit.redriven)}
        outcome.kinds = {violation.kind for violation in violations}
        outcome.complaint = stuck + (explain(violations) if violations else "")

    def blame_processes(self, outcome: Outcome) -> None:
        """Put the failures in processes in front of the complaint."""
        outcome.complaint = "".join(f"{one}\n" for one in self.failures) + outcome.complaint


async def _until(is_empty: Callable[[], Awaitable[bool]]) -> None:
    """Return when the broker is empty, or after a time limit."""
    for _ in range(LOOKS_MAX):
        if await is_empty():
            return
        await asyncio.sleep(LOOK_SECONDS)


@contextmanager
def _all_chance_from(seed: int) -> Generator[None]:
    """Draw all of popgate's random numbers from the seed."""
    chance = random.Random(f"secrets {seed}")
    random.seed(f"popgate {seed}")
    with (
        patch.object(secrets, "token_hex", lambda size=32: chance.randbytes(size).hex()),
        patch.object(secrets, "token_bytes", lambda size=32: chance.randbytes(size)),
    ):
        yield


@contextmanager
def quietly() -> Generator[None]:
    """Silence popgate's log, which reports much of what the simulation does to it."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
