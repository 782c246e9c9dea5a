"""Controls the worker processes from their parent process: starts, instructs, stops, kills and replaces them.

Each worker has a numbered place. If a worker is killed, its replacement at the same place has another name, so that a
history shows which of the two workers acted.
"""

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from popgate.domain.lock_operations import KILLED
from popgate.prover.errors import BrokerMissing, ProverFailed
from popgate.prover.fork_server import Child, ForkServer
from popgate.prover.record import Record
from popgate.prover.worker import WAIT_SECONDS_MAX, WorkerSettings, settings_line

READY_SECONDS = 60.0
REST_SECONDS = WAIT_SECONDS_MAX + 20.0
"""Maximum seconds that a worker may take to stop using the lock after ``rest``. After that, it is killed. In the
history, its last operation has no answer."""
END_SECONDS = 5.0
STOPPED, CUT = "stopped", "connection cut"
STDERR_LINES = 15
SEED_BITS = 32

T = TypeVar("T")


class Worker:
    """One worker process, as its parent sees it."""

    def __init__(self, settings: WorkerSettings, record: Record, fork_server: ForkServer) -> None:
        self.name = settings.client
        self.is_stopped = False
        self._settings = settings
        self._record = record
        self._said: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._fork_server = fork_server
        self._process: Child | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises: ProverFailed."""
        self._process = await self._fork_server.fork(self._stderr.fileno())
        self._listening = asyncio.create_task(self._listen(self._process), name=f"hear {self.name}")
        self._write(settings_line(self._settings))
        await self.hear("ready", READY_SECONDS)

    def tell(self, do: str, **fields: Any) -> None:
        self._write({"do": do, **fields})

    async def hear(self, what: str, seconds: float) -> dict[str, Any]:
        """Wait until the worker prints a line of kind ``what``, and return the line. Raises: ProverFailed,
        TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                line = await self._said.get()
                if line is None:
                    raise ProverFailed(f"{self.name} ended unexpectedly:\n{self._last_words()}")
                if line["what"] == "unconnected":
                    raise BrokerMissing(line["error"])
                if line["what"] == "failed":
                    raise ProverFailed(line["error"])
                if line["what"] == what:
                    return line

    def stop(self) -> None:
        self.is_stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_stopped = False

    async def kill(self) -> None:
        """Kill the process. Return when the process is dead and all of its output has been read."""
        if self._process is not None:
            await self._process.kill()
        if self._listening is not None:
            await self._listening
        self._stderr.close()

    async def end(self) -> None:
        """Close the process's input, so that it ends. Kill the process if it does not end in time."""
        if self._process is not None and self._listening is not None:
            self._process.end_input()
            await asyncio.wait([self._listening], timeout=END_SECONDS)
        await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.signal(number)

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process is not None, "it was started"
        self._process.tell(json.dumps(line).encode() + b"\n")

    async def _listen(self, process: Child) -> None:
        async for line in process.said:
            with contextlib.suppress(json.JSONDecodeError):  # the lock implementation printed a line
                self._hear(json.loads(line))
        self._said.put_nowait(None)

    def _hear(self, line: dict[str, Any]) -> None:
        match line["what"]:
            case "begin":
                self._record.begun(self.name, line)
                if line["action"] == "write":
                    self.tell("answer", id=line["id"], admitted=self._record.admit(line))
            case "end":
                self._record.ended(self.name, line)
            case "disturbed":
                self._record.disturb(line["client"], line["how"], line["at"], line["until"])
            case _:
                self._said.put_nowait(line)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return "\n".join(self._stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:])


class Crew:
    """All workers of a proof, and an additional worker process, the administrator, which changes and counts slots."""

    def __init__(
        self,
        *,
        size: int,
        made: Callable[[str, int, int], WorkerSettings],
        record: Record,
        fork_server: ForkServer,
        chance: random.Random,
    ) -> None:
        """Create a crew of ``size`` workers. ``made`` returns the settings of a worker. Its arguments are the worker's
        name, place (from 0) and seed."""
        self.record = record
        self._made = made
        self._fork_server = fork_server
        self._chance = chance
        self._names = [0] * size
        self._requests = 0
        self.workers: list[Worker] = [self._worker(place) for place in range(size)]
        self.administrator = Worker(made("admin", size, 0), record, fork_server)
        self.busy: set[int] = set()
        """The places of the workers into which a fault is currently being injected."""

    async def start(self) -> None:
        """Start all worker processes. Raises: ProverFailed."""
        await _all([worker.start() for worker in (*self.workers, self.administrator)])

    def work(self) -> None:
        for worker in self.workers:
            worker.tell("work")

    async def rest(self) -> None:
        """Let all workers release the lock and stop using it. Return when all of them have done so. A worker that hangs
        is killed and replaced, and its last operation stays unanswered.

        Raises: ProverFailed.
        """
        for worker in self.workers:
            worker.tell("rest")
        await _all([self._rested(place) for place in range(len(self.workers))])

    async def administer(self, do: str, seconds: float, **fields: Any) -> dict[str, Any]:
        """Send an instruction to the administrator and return its answer. Raises: ProverFailed, TimeoutError."""
        self._requests += 1
        self.administrator.tell(do, request=self._requests, **fields)
        async with asyncio.timeout(seconds):
            while (done := await self.administrator.hear("done", seconds))["request"] != self._requests:
                pass  # a late answer to an earlier request, which timed out
        return done

    async def end(self) -> None:
        """End every worker process. Idempotent."""
        for worker in self.workers:
            worker.go_on()
        await _all([worker.end() for worker in (*self.workers, self.administrator)])

    async def replace(self, place: int, *, is_fault: bool = True) -> None:
        """Kill the worker at ``place``, and start a replacement. ``is_fault``: record the kill as an injected fault."""
        killed, at = self.workers[place], time.monotonic()
        await killed.kill()
        if is_fault:
            self.record.disturb(killed.name, KILLED, at)
        self.workers[place] = worker = self._worker(place)
        await worker.start()

    async def stop(self, place: int, seconds: float) -> None:
        """Pause the process of the worker at ``place`` for ``seconds`` (SIGSTOP, SIGCONT)."""
        worker, at = self.workers[place], time.monotonic()
        worker.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            worker.go_on()
            self.record.disturb(worker.name, STOPPED, at)

    def cut(self, place: int) -> None:
        """Tell the worker at ``place`` to abort its connection. The worker itself reports the time of the abort."""
        self.workers[place].tell("cut")

    def _worker(self, place: int) -> Worker:
        self._names[place] += 1
        name = f"w{place + 1}" if self._names[place] == 1 else f"w{place + 1}.{self._names[place]}"
        settings = self._made(name, place, self._chance.getrandbits(SEED_BITS))
        return Worker(replace(settings, is_replacement=self._names[place] > 1), self.record, self._fork_server)

    async def _rested(self, place: int) -> None:
        try:
            await self.workers[place].hear("resting", REST_SECONDS)
        except TimeoutError:
            await self.replace(place, is_fault=False)


async def _all(work: Sequence[Awaitable[T]]) -> None:
    """Wait until all of ``work`` has ended. After that, raise the first exception of a part that failed."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
