"""Reserves and deletes jobs of beanstalkd with greenstalk, one connection a thread."""

import socket
import threading
from importlib import import_module
from typing import Any

from bench.systems.clients.client import BODY, BODY_BYTES, LEASE_SECONDS, Client, in_threads
from bench.systems.metering import Job, Meter

PIPELINED = 200
PRIORITY = 1_000


def _connected(job: Job) -> Any:
    return import_module("greenstalk").Client(("127.0.0.1", job.port), encoding=None)


async def _fill(job: Job) -> None:
    """Put the jobs with many commands in one write, because each command is synced."""
    command = f"put {PRIORITY} 0 {LEASE_SECONDS} {BODY_BYTES}\r\n".encode() + BODY + b"\r\n"
    with socket.create_connection(("127.0.0.1", job.port)) as connection, connection.makefile("rb") as answers:
        for first in range(0, job.total, PIPELINED):
            count = min(PIPELINED, job.total - first)
            connection.sendall(command * count)
            for _ in range(count):
                if not (answer := answers.readline()).startswith(b"INSERTED"):
                    raise RuntimeError(f"put: {answer!r}")


async def _drain(job: Job, meter: Meter) -> None:
    timed_out = import_module("greenstalk").TimedOutError
    all_connected = threading.Barrier(job.clients, action=meter.start)

    def work(_: int) -> None:
        with _connected(job) as client:
            all_connected.wait()
            while not meter.is_done:
                try:
                    taken = client.reserve(timeout=1)
                except timed_out:
                    continue
                client.delete(taken)
                meter.settled(1)

    await in_threads(job.clients, work)


RESERVE = Client(fill=_fill, drain=_drain)
