"""The scale of one proxy on the embedded broker: leases in flight, recovery, parked polls, and idle subscriptions.

Memory is the resident memory of the proxy's process, and the processor share is the processor time of this process
against the time that passes, so that other load on the machine hardly matters. The recovery is the only time that
passes here, from the start of the process until it is ready. The process is killed before, and so starts as after a
crash.
"""

import asyncio
import resource
import time
from contextlib import closing
from itertools import chain
from pathlib import Path

import orjson
import psutil

from bench import load
from bench.report import Report, Row
from support.proxy import ProxyProcess

LEASES = 1_000_000
LEASE_BODY_BYTES = 64
LEASE_STEPS = 10
FILLED_STEPS = 2
"""Number of steps after which the memory for buffered messages is full, so that only leases take more memory."""
"""Messages are published and leased in this many parts, so that never many of them are ready."""
LEASE_SECONDS = 43_200
LEASES_TARGET_BYTES = 600_000_000
RECOVERY_TARGET_SECONDS = 5.0
PARKED = 10_000
PARKED_TARGET_BYTES = 200_000_000
PARKED_SECONDS = 20.0
CONNECTIONS_PER_PARKED = 1.4
"""A proxy accepts fewer parked pops than connections."""
TOPICS, GROUPS = 100, 100
IDLE_SECONDS = 60.0
"""A proxy looks after the records of all subscriptions once in this time."""
RETURNED_SECONDS = 60.0
"""The proxy closes the channels of unused subscriptions once, within this time."""
IDLE_TARGET = 0.02
BATCH = 256
CLIENTS = 8


class _Patient(ProxyProcess):
    """A proxy with much to load at the start, and much to write at the end."""

    ready_timeout_seconds = 120
    stop_timeout_seconds = 60

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the proxy."""
        return self.process.memory_info().rss

    @property
    def processor_seconds(self) -> float:
        """The processor time that the proxy has used since its start."""
        times = self.process.cpu_times()
        return times.user + times.system


def rows(report: Report, folder: Path, scale: float) -> None:
    """Add all rows of this module. Targets are for the full counts, and are left out if ``scale`` is below 1."""
    is_full = scale >= 1
    _lease_rows(report, folder / "scale-leases", int(LEASES * scale), is_full=is_full)
    _parked_row(report, folder / "scale-parked", int(PARKED * scale), is_full=is_full)
    _idle_rows(report, folder / "scale-idle", int(TOPICS * scale) or 1, is_full=is_full)


# -- leases in flight, and recovery ------------------------------------------------------------------------------------


def _lease_rows(report: Report, folder: Path, count: int, *, is_full: bool) -> None:
    """Add the memory of many leases in flight, and the times until a killed proxy with these leases serves again."""
    with closing(_Patient(folder)) as proxy:
        proxy.start()
        load.make_topic(proxy)
        before, after = proxy.memory_bytes, list[int]()
        for _ in range(LEASE_STEPS):
            asyncio.run(load.fill(proxy.port, total=count // LEASE_STEPS, body_bytes=LEASE_BODY_BYTES))
            asyncio.run(_lease(proxy.port, count // LEASE_STEPS))
            after.append(proxy.memory_bytes)
        grown = after[-1] - before
        leases = (after[-1] - after[FILLED_STEPS - 1]) * LEASE_STEPS / (LEASE_STEPS - FILLED_STEPS)
        proxy.kill()
        started = time.perf_counter()
        proxy.start()
        ready_seconds = time.perf_counter() - started
        spent, kept = proxy.processor_seconds, proxy.memory_bytes - before
        asyncio.run(load.fill(proxy.port, total=1, body_bytes=LEASE_BODY_BYTES))
        started = time.perf_counter()
        asyncio.run(_lease(proxy.port, 1))
        popped_seconds = time.perf_counter() - started
    report.add(
        Row(
            name=f"embedded: memory of {count:,} leases in flight, above their messages",
            value=leases / 1e6,
            unit="MB",
            target=f"<= {LEASES_TARGET_BYTES / 1e6:g} MB" if is_full else "",
            reached=leases <= LEASES_TARGET_BYTES if is_full else None,
        )
    )
    report.add(Row(name="embedded: the same, with the messages that are buffered", value=grown / 1e6, unit="MB"))
    report.add(Row(name=f"embedded: memory of {count:,} leases after a restart", value=kept / 1e6, unit="MB"))
    report.add(
        Row(
            name=f"embedded: killed with {count:,} leases, until ready",
            value=ready_seconds,
            unit="s",
            target=f"<= {RECOVERY_TARGET_SECONDS:g} s" if is_full else "",
            reached=ready_seconds <= RECOVERY_TARGET_SECONDS if is_full else None,
        )
    )
    report.add(Row(name="embedded: processor time of that start", value=spent, unit="s"))
    name = f"embedded: first pop of a new message behind {count:,} leased ones"
    report.add(Row(name=name, value=popped_seconds, unit="s"))


async def _lease(port: int, count: int) -> None:
    """Lease ``count`` messages for long."""
    connection = await load.connect(port)
    left = count
    while left:
        body = {"max_messages": min(BATCH, left), "wait_seconds": 20, "invisibility_seconds": LEASE_SECONDS}
        answer = await connection.post(f"{load.SUBSCRIPTION}/pop", body)
        left -= len(answer["messages"])
    connection.close()


# -- parked polls ------------------------------------------------------------------------------------------------------


def _parked_row(report: Report, folder: Path, count: int, *, is_full: bool) -> None:
    """Add the memory of a proxy with many parked polls, each on its own connection."""
    allow_descriptors()
    with closing(_Patient(folder, "--connections-max", str(int(count * CONNECTIONS_PER_PARKED) + CLIENTS))) as proxy:
        proxy.start()
        load.make_topic(proxy)
        used = asyncio.run(_park(proxy, count))
    report.add(
        Row(
            name=f"embedded: memory of a proxy with {count:,} parked polls",
            value=used / 1e6,
            unit="MB",
            target=f"<= {PARKED_TARGET_BYTES / 1e6:g} MB" if is_full else "",
            reached=used <= PARKED_TARGET_BYTES if is_full else None,
        )
    )


def allow_descriptors() -> None:
    """Let this process, which is the client of all connections, open as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _park(proxy: _Patient, count: int) -> int:
    """Park ``count`` polls, and return the memory of the proxy. Raises: RuntimeError if not all of them wait."""
    body = orjson.dumps({"max_messages": 10, "wait_seconds": PARKED_SECONDS, "client_id": "bench"})
    waiting: list[asyncio.Task[tuple[int, bytes]]] = []
    connections: list[load.Connection] = []
    for start in range(0, count, 100):
        some = await asyncio.gather(*(load.connect(proxy.port) for _ in range(min(100, count - start))))
        connections += some
        waiting += [asyncio.create_task(one.request("POST", f"{load.SUBSCRIPTION}/pop", body)) for one in some]
    await asyncio.sleep(PARKED_SECONDS / 10)
    if any(task.done() for task in waiting):
        raise RuntimeError("the proxy answered polls before all of them waited")
    used = proxy.memory_bytes
    answers = await asyncio.gather(*waiting)
    for connection in connections:
        connection.close()
    if any(status != 200 for status, _ in answers):
        raise RuntimeError("the proxy refused polls")
    return used


# -- idle subscriptions ------------------------------------------------------------------------------------------------


def _idle_rows(report: Report, folder: Path, topics: int, *, is_full: bool) -> None:
    """Add the processor share of a proxy with many subscriptions, before and after each of them was popped once."""
    count = topics * GROUPS
    with closing(_Patient(folder, "--queues-max", str(2 * count))) as proxy:
        proxy.start()
        asyncio.run(_make_groups(proxy.port, topics))
        for what, is_used in (("never used", False), ("popped once", True)):
            if is_used:
                asyncio.run(_on_each(proxy.port, topics, "POST", "/pop", orjson.dumps({"wait_seconds": 0})))
                time.sleep(RETURNED_SECONDS)
            before = proxy.processor_seconds
            time.sleep(IDLE_SECONDS)
            share = (proxy.processor_seconds - before) / IDLE_SECONDS
            report.add(
                Row(
                    name=f"embedded: processor share of {count:,} idle subscriptions, {what}",
                    value=100 * share,
                    unit="%",
                    target=f"< {100 * IDLE_TARGET:g} %" if is_full else "",
                    reached=share < IDLE_TARGET if is_full else None,
                )
            )


async def _make_groups(port: int, topics: int) -> None:
    connection = await load.connect(port)
    for number in range(topics):
        await connection.request("PUT", f"/v1/admin/topics/topic{number}", orjson.dumps({"queues": 1}))
    connection.close()
    await _on_each(port, topics, "PUT", "", b"", of="/v1/admin/topics")


async def _on_each(port: int, topics: int, method: str, verb: str, body: bytes, *, of: str = "/v1/topics") -> None:
    """Send one request for each group. Raises: RuntimeError if one is refused."""
    paths = chain.from_iterable(
        (f"{of}/topic{topic}/groups/group{group}{verb}" for group in range(GROUPS)) for topic in range(topics)
    )

    async def work() -> None:
        connection = await load.connect(port)
        for path in paths:
            status, answer = await connection.request(method, path, body)
            if status >= 300:
                raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        connection.close()

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
