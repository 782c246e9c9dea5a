"""Measures one drain inside the client process: messages settled, seconds, and processor time of client and servers.

The clock stops with the last settlement. Clients may still wait then for messages that don't exist.
"""

import json
import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the client process does: drain ``total`` messages with ``clients`` clients in batches of ``batch``.

    ``pids`` are the servers whose processor time, with that of their child processes, is measured. ``options`` are
    for the client module.
    """

    client: str
    port: int
    total: int
    batch: int
    clients: int
    pids: Sequence[int] = ()
    options: dict[str, str] = field(default_factory=dict[str, str])

    def as_json(self) -> str:
        """Return the text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        """Return the job that ``as_json`` wrote."""
        return Job(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """The figures of one drain."""

    messages: int
    seconds: float
    client_seconds: float
    """Processor seconds of the client process."""
    server_seconds: float
    """Processor seconds of the servers' processes."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as the table wants them: a rate, and microseconds a message."""
        return {
            "rate": self.messages / self.seconds,
            "client_us": 1e6 * self.client_seconds / self.messages,
            "server_us": 1e6 * self.server_seconds / self.messages,
        }


class Meter:
    """Counts settled messages, also from several threads. ``result`` is set when ``total`` messages are settled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._taken = self._settled = 0
        self._began = self._client_began = self._server_began = 0.0
        self.result: Drained | None = None

    def start(self) -> None:
        """Start the clock. All connections are open."""
        self._server_began = server_seconds(self._job.pids)
        self._client_began = client_seconds()
        self._began = time.perf_counter()

    @property
    def is_done(self) -> bool:
        return self.result is not None

    @property
    def has_plenty(self) -> bool:
        """Whether every client still finds a whole batch."""
        return self._job.total - self._taken > self._job.clients * self._job.batch

    def taken(self, count: int) -> None:
        """Note messages that a client has and has not settled. Only clients that ask ``has_plenty`` call this."""
        self._taken += count

    def settled(self, count: int) -> None:
        """Note settled messages. Stops the clock with the last one."""
        with self._lock:
            self._settled += count
            if self._settled < self._job.total or self.result is not None:
                return
            seconds = time.perf_counter() - self._began
            self.result = Drained(
                messages=self._settled,
                seconds=seconds,
                client_seconds=client_seconds() - self._client_began,
                server_seconds=server_seconds(self._job.pids) - self._server_began,
            )


def client_seconds() -> float:
    """Return the processor time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def server_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of these processes and of their children that run now."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total
