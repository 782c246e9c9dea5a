"""Defines the main function of a worker process. Its parent process sends instructions as lines on standard input.

The fork server forks the process. The first line contains the worker's settings. The next lines are ``work`` and later
``rest``, or single instructions such as ``set_slots``. The worker ends when its standard input ends, so it never
outlives its parent.
"""

import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from popgate.domain.errors import StartupError
from popgate.domain.lock_operations import Action, OperationOutcome
from popgate.domain.locks import LockKind
from popgate.prover.clients import Call, Lines, LockClient
from popgate.prover.target import Held, load

WAITS_SECONDS = (0.0, 0.3, 1.0, 3.0)
WAIT_SECONDS_MAX = max(WAITS_SECONDS)
PAUSE_SECONDS_MAX = 0.03
STEP_SECONDS = 0.01, 0.06
LONG_STEP_SECONDS = 0.2, 1.5
STEPS_MAX = 3
LONG_HOLD_SHARE = 0.15
VERIFY_AFTER_SHARE = 0.2
RENEW_SHARE = 0.3
"""Share of renewals among the calls that confirm a held lock. The others are verifies."""
TRY_AFTER_SHARE = 0.3
"""Share of releases after which the client tries immediately to acquire the lock again. The lock is free at this time,
unless another client was faster."""
FREE_WAIT_SECONDS = 3.0
MEASURED, UNMEASURED = 15, 3
MEASURED_MIN, MEASURE_SECONDS = 5, 3.0
"""Minimum number of measurements of each operation. If the broker is slow, no further measurement is made after
``MEASURE_SECONDS``."""
TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker.

    ``stall_seconds``: the worker reports every pause of its process that is longer than this. ``is_replacement``: the
    worker replaces a killed worker, so it retries to connect while the broker or proxy is down. Other workers fail.
    """

    implementation: str
    urls: Sequence[str]
    lock: str
    kind: LockKind
    client: str
    seed: int
    stall_seconds: float
    is_replacement: bool = False


class Worker:
    def __init__(self, settings: WorkerSettings, lines: Lines) -> None:
        self._settings = settings
        self._lines = lines
        self._chance = random.Random(settings.seed)
        self._connect = load(settings.implementation)
        self.client = self._made(settings.client)
        self._counters: list[LockClient] = []
        self._resting = asyncio.Event()
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._doing: asyncio.Task[None] | None = None

    def _made(self, name: str) -> LockClient:
        settings = self._settings
        return LockClient(name, self._connect, settings.urls, settings.lock, settings.kind, self._lines)

    def told(self, line: dict[str, Any]) -> None:
        """Carry out a short instruction of the parent process, or start a task that carries out a long one."""
        match line["do"]:
            case "work":
                self._resting.clear()
                self._start(self._work())
            case "rest":
                self._resting.set()
            case "cut":
                self.client.cut()
            case "answer":
                self._answers.pop(line["id"]).set_result(line["admitted"])
            case "measure":
                self._start(self._measure(line))
            case "set_slots":
                self._start(self._administer(line, lambda: self.client.set_slots(line["number"])))
            case "count_held":
                patience = line["patience_seconds"]
                self._start(self._administer(line, lambda: self.client.count_held(patience_seconds=patience)))
            case "count_free":
                self._start(self._count_free(line))
            case "remove":
                self._start(self._remove(line))
            case unknown:
                raise ValueError(unknown)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._lines.say("failed", error=f"{type(error).__name__}: {error}")
                raise

        self._doing = asyncio.get_running_loop().create_task(guarded(), name="work")

    # -- as a client ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        is_at_once = False
        while not self._resting.is_set():
            await self.client.connect_again()
            call = await self.client.acquire(0.0 if is_at_once else self._chance.choice(WAITS_SECONDS))
            if call.held is not None:
                await self._hold(call.held)
            is_at_once = call.held is not None and self._chance.random() < TRY_AFTER_SHARE
            if not is_at_once:
                await asyncio.sleep(self._chance.uniform(0, PAUSE_SECONDS_MAX))
        self._lines.say("resting")

    async def _hold(self, held: Held) -> None:
        """Verify, renew and write for a while, and release the lock. Stop early when the lock is lost or a call is not
        answered."""
        step = LONG_STEP_SECONDS if self._chance.random() < LONG_HOLD_SHARE else STEP_SECONDS
        for _ in range(self._chance.randint(0, STEPS_MAX)):
            await asyncio.sleep(self._chance.uniform(*step))
            if held.token is not None and self._chance.random() < 0.5:
                if not await self.client.write(held, self._answer):
                    break
            else:
                call = await self.client.confirm(held, renew=self._chance.random() < RENEW_SHARE)
                if call.error:
                    return
                if call.outcome is not OperationOutcome.DONE:
                    break
        call = await self.client.release(held)
        if not call.error and self._chance.random() < VERIFY_AFTER_SHARE:
            await self.client.verify(held)

    async def _answer(self, number: int) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        return await answer

    # -- as an administrator --------------------------------------------------------------------------------------

    async def _administer(self, line: dict[str, Any], work: Callable[[], Coroutine[Any, Any, Call]]) -> None:
        await self.client.connect_again()
        call = await work()
        self._lines.say("done", request=line["request"], error=call.error)

    async def _count_free(self, line: dict[str, Any]) -> None:
        """Count how many new clients can acquire a slot at the same time. The number of clients is the number of slots
        that should exist."""
        number: int = line["number"]
        operation = self._lines.number()
        self._lines.say("begin", id=operation, client=self.client.name, action=Action.COUNT_FREE, at=time.monotonic())
        while len(self._counters) < number:
            self._counters.append(self._made(f"{self.client.name}-{len(self._counters) + 1}"))
        clients = self._counters[:number]
        grants: list[tuple[LockClient, Held]] = []
        error = ""
        for client in clients:
            await client.connect_again()
            call = await client.acquire(FREE_WAIT_SECONDS)
            error = error or call.error
            if call.held is not None:
                grants.append((client, call.held))
        for client, held in grants:
            await client.release(held)
        for client in clients:
            await client.close()
        outcome = OperationOutcome.UNKNOWN if error else OperationOutcome.DONE
        self._lines.say("end", id=operation, at=time.monotonic(), outcome=outcome, number=len(grants))
        self._lines.say("done", request=line["request"], error=error)

    async def _measure(self, line: dict[str, Any]) -> None:
        """Measure the cost of acquire, verify and release on an uncontended lock."""
        costs: dict[str, list[tuple[float, int, int]]] = {"acquire": [], "verify": [], "release": []}
        enough = time.monotonic() + MEASURE_SECONDS
        for round_number in range(UNMEASURED + MEASURED):
            if len(costs["release"]) >= MEASURED_MIN and time.monotonic() > enough:
                break
            acquire = await self.client.acquire(FREE_WAIT_SECONDS)
            calls = [acquire]
            if acquire.held is not None:
                calls += [await self.client.verify(acquire.held), await self.client.release(acquire.held)]
            for action, call in zip(costs, calls, strict=False):
                if call.outcome is not OperationOutcome.DONE:
                    self._lines.say(
                        "failed",
                        error=call.error or f"{action} was refused, although there were no faults and no other clients",
                    )
                    return
                if round_number >= UNMEASURED and call.traffic is not None:
                    costs[action].append((call.seconds, call.traffic.round_trips, call.traffic.channels))
        self._lines.say("done", request=line["request"], costs=costs)

    async def _remove(self, line: dict[str, Any]) -> None:
        await self.client.connect_again()
        with contextlib.suppress(Exception):  # queues that remain on the broker do no harm
            await self.client.remove()
        self._lines.say("done", request=line["request"])
        await self.client.close()


def watch_for_stalls(settings: WorkerSettings, lines: Lines) -> None:
    """Start a thread that reports each pause of the whole process which exceeds ``stall_seconds``, because the broker
    may then have closed the connection."""

    def watch() -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - last > settings.stall_seconds:
                lines.say("disturbed", client=settings.client, how="stood still", at=last, until=now)
            last = now

    threading.Thread(target=watch, name="stalls", daemon=True).start()


async def _run(lines: Lines) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first: dict[str, Any] = json.loads(await reader.readline())
    settings = WorkerSettings(kind=LockKind(first.pop("kind")), **first)
    try:
        worker = Worker(settings, lines)
        await (worker.client.connect_again() if settings.is_replacement else worker.client.connect())
    except StartupError as error:
        lines.say("failed", error=error.detail)
        return
    except Exception as error:
        lines.say("unconnected", error=f"no connection to the broker: {type(error).__name__}: {error}")
        return
    watch_for_stalls(settings, lines)
    lines.say("ready")
    while line := await reader.readline():
        worker.told(json.loads(line))
    await worker.client.close()


def settings_line(settings: WorkerSettings) -> dict[str, Any]:
    """Return the first line that a worker receives, which contains its settings."""
    return asdict(settings)


def main() -> None:
    """Run the worker until standard input ends."""
    asyncio.run(_run(Lines()))
