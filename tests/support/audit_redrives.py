"""Dead letters that are redriven to another topic during faults, and consumed there; everything is recorded.

A redriven message is a new message in its target topic: a separate audit judges it there, with every rule about leases.
The audit of its source knows its history and checks what became of its dead letters (`audit_dead`).
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from support.audit import PLAIN, Audit, History
from support.audit_client import POLL_SECONDS, AuditedClient, until
from support.audit_load import Habits, Load

REDRIVEN_TOPIC = "redriven"
PAUSE_SECONDS = 0.3, 5.0
WAIT_SECONDS = 0, 0, 2
RATES = None, None, 20
HABITS = Habits(
    publishers=0,
    consumers=1,
    lease_seconds=6.0,
    lease_seconds_min=2.0,
    wait_seconds=3.0,
    hold_share=0.0,
    mixed_share=0.1,
    expire_share=0.05,
    late_share=0.0,
    extend_share=0.05,
    attempt_share=0.2,
)


class RedrivenAudit(Audit):
    """Audits the topic to which dead letters of ``source`` are redriven. No other publisher writes to it."""

    def __init__(self, source: Audit) -> None:
        super().__init__()
        self.marks = source.marks
        self.are_hand_outs_hidden = source.are_hand_outs_hidden
        source.redriven = self.histories
        self._source = source

    def _history(self, message_id: str) -> History:
        history = super()._history(message_id)
        known = self._source.histories.get(message_id)
        if history.publish is None and known is not None and known.publish is not None:
            history.publish = replace(known.publish, traits=PLAIN, status="", answered=float("inf"))
        return history


class Redrives:
    """Redrives the dead letters of ``client``'s group to ``target``'s topic, where consumers run, from `async with`
    to `end`.
    """

    def __init__(self, client: AuditedClient, target: AuditedClient, seed: str) -> None:
        self._client = client
        self._target = target
        self._chance = random.Random(f"{seed} redrives")
        self._load = Load(target, seed, HABITS, name="redriven ")
        self._ending = asyncio.Event()
        self._stack = AsyncExitStack()
        self._redriving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        await self._stack.enter_async_context(self._load)
        self._redriving = tasks.create_task(self._redrive(), name="redrive")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        await self._stack.__aexit__(kind, error, trace)

    async def end(self, *, timeout_seconds: float, poll_seconds: float = POLL_SECONDS) -> None:
        """Return when every redrive has ended and every redriven message is consumed; call it once all parts work
        again.

        Raises: TimeoutError.
        """
        assert self._redriving is not None, "it was begun"
        self._ending.set()
        await until(
            self._redriving.done,
            timeout_seconds=timeout_seconds,
            what=lambda: f"the redrives to end; the last answer was {self._client.last_redrive}",
        )
        await self._load.drain(timeout_seconds=timeout_seconds, missing_seconds=0.0, poll_seconds=poll_seconds)
        self._target.audit.drained()

    async def _redrive(self) -> None:
        """Redrive repeatedly; the last one, begun after all others have ended, moves what they left."""
        chance, topic = self._chance, self._target.topic
        while not self._ending.is_set():
            await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
            await self._client.redrive(topic, wait_seconds=chance.choice(WAIT_SECONDS), rate=chance.choice(RATES))
        while await self._client.redrive(topic, wait_seconds=3) != "done":  # noqa: ASYNC110  # in other processes
            await asyncio.sleep(PAUSE_SECONDS[0])
