"""The course of every simulation: load and faults, then rest, draining, and the audit."""

import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from popgate.domain.errors import PopgateError
from simulator.loop import DeadlockError, VirtualLoop
from support.audit_client import AuditedClient
from support.audit_load import Habits, Load
from support.audit_redrives import Redrives
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


async def go_through(
    client: AuditedClient,
    redriven: AuditedClient,
    outcome: Outcome,
    *,
    disturb: Callable[[], Awaitable[None]],
    empty: Callable[[], Awaitable[None]],
) -> None:
    """Record in ``outcome`` the result of a load during faults. Its dead letters are redriven to the topic of
    ``redriven`` in that time. ``empty`` returns when the broker has nothing left.
    """
    audit, seed = client.audit, f"{outcome.seed}"
    stuck = ""
    try:
        async with Load(client, seed, HABITS) as load, Redrives(client, redriven, seed) as redrives:
            await disturb()
            audit.heal(DRAIN_SECONDS_MAX)
            await redrives.end(timeout_seconds=GIVE_UP_SECONDS, poll_seconds=POLL_SECONDS)
            await note_counts(load, run_out_seconds=RUN_OUT_SECONDS, looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
            await load.drain(
                timeout_seconds=GIVE_UP_SECONDS, missing_seconds=MISSING_SECONDS, poll_seconds=POLL_SECONDS
            )
            audit.drained()
            await empty()
            await client.note_dead_letters(looks_max=LOOKS_MAX, look_seconds=LOOK_SECONDS)
            await client.pop("who asks last")  # long polls began before: messages expired since may be gone
    except* (TimeoutError, PopgateError) as error:
        stuck = f"stuck: {'; '.join(raised(error))}\n"
    violations = judge(audit, drained=not stuck) + judge(redriven.audit, drained=not stuck)
    outcome.figures = {**audit.figures(), "redriven": len(audit.redriven)}
    outcome.kinds = {violation.kind for violation in violations}
    outcome.complaint = stuck + (explain(violations) if violations else "")


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
