"""The cost, for other pops, of parked pops whose filters match nothing: publish-to-pop beside 10,000 of them, and
without.

Two proxies on embedded stores, one with the parked pops and one without, get single messages in turns. The parked pops
start again in each round; a round ends when all of them have ended, and the messages published meanwhile show how much
these endings delay the others.
"""

import asyncio
import re
import resource
import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import load
from bench.report import Rates, Report, Row
from support.proxy import ProxyProcess

PARKED = 10_000
MESSAGES = 300
"""Number of messages for each proxy in one round."""
ROUNDS = 5
WAIT_SECONDS = 25
"""Wait time of a parked pop in seconds; it includes the time to park all of them and to measure a round's messages."""
PARKED_AT_ONCE = 500
PATIENCE_SECONDS = 60.0
TARGET = 1.5
BESIDE, WITHOUT = "beside", "without"
_GAUGE = re.compile(r'popgate_parked_pops\{[^}]*group="default"[^}]*\} (\d+)')


@contextmanager
def many_files() -> Generator[None]:
    """Raise the limit of open files to the maximum that the machine allows a process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Pair:
    """A publisher and a pop client of one proxy."""

    def __init__(self, publisher: load.Connection, popper: load.Connection) -> None:
        self._publisher = publisher
        self._popper = popper

    @classmethod
    async def connect(cls, port: int) -> "Pair":
        return cls(await load.connect(port), await load.connect(port))

    async def milliseconds(self) -> float:
        """Return the time from before a publish to the answer of the pop that was parked for it."""
        popping = asyncio.ensure_future(self._popper.post(f"{load.SUBSCRIPTION}/pop", {"wait_seconds": 10}))
        await asyncio.sleep(0.002)
        started = time.perf_counter()
        message = {"body": "x" * 256, "headers": {"kind": "order", "id": "none of these"}}
        publishing = asyncio.ensure_future(self._publisher.post("/v1/topics/bench/messages", {"messages": [message]}))
        answer = await popping
        elapsed = (time.perf_counter() - started) * 1_000
        await publishing
        handles = [one["receipt_handle"] for one in answer["messages"]]
        await self._popper.post(f"{load.SUBSCRIPTION}/ack", {"receipt_handles": handles})
        return elapsed


async def parked_count(connection: load.Connection) -> int:
    _, text = await connection.request("GET", "/metrics")
    found = _GAUGE.search(text.decode())
    return int(found[1]) if found else 0


async def _measure(ports: dict[str, int], rates: Rates, parked: int, messages: int) -> list[float]:
    """Record the rounds' medians; return the times of single messages while parked pops ended."""
    pairs = {name: await Pair.connect(port) for name, port in ports.items()}
    looking = await load.connect(ports[BESIDE])
    waiting = [await load.connect(ports[BESIDE]) for _ in range(parked)]
    while_ending: list[float] = []
    for number in range(1, ROUNDS + 1):
        print(f"filters: round {number} of {ROUNDS}", flush=True)
        pops: list[asyncio.Future[Any]] = []
        for place, connection in enumerate(waiting):
            wanted = {"kind": "order", "id": [place]}
            body = {"wait_seconds": WAIT_SECONDS, "filter": wanted}
            pops.append(asyncio.ensure_future(connection.post(f"{load.SUBSCRIPTION}/pop", body)))
            if place % PARKED_AT_ONCE == 0:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                await asyncio.sleep(0.1)
                if await parked_count(looking) >= parked:
                    break
        times: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(messages):
            for name, pair in pairs.items():
                times[name].append(await pair.milliseconds())
        if any(pop.done() for pop in pops):
            raise RuntimeError("parked pops have ended before all was measured; scale it down")
        for name in ports:
            rates.note(name, statistics.median(times[name]))
        while not all(pop.done() for pop in pops):
            while_ending.append(await pairs[BESIDE].milliseconds())
        if any(await asyncio.gather(*(_messages(pop) for pop in pops))):
            raise RuntimeError("a filter that matches nothing got a message")
    return sorted(while_ending)


async def _messages(pop: "asyncio.Future[Any]") -> Any:
    return (await pop)["messages"]


def rows(report: Report, folder: Path, scale: float) -> None:
    parked = int(PARKED * scale)
    rates = Rates()
    with many_files(), ExitStack() as stack:
        ports: dict[str, int] = {}
        for name in (WITHOUT, BESIDE):
            proxy = ProxyProcess(folder / f"filters-{name}")
            stack.callback(proxy.close)
            proxy.start()
            load.make_topic(proxy, 1)
            ports[name] = proxy.port
        while_ending = asyncio.run(_measure(ports, rates, parked, max(30, int(MESSAGES * scale))))
    ratio = rates.ratio(BESIDE, WITHOUT)
    report.add(Row(name="embedded: publish to pop, single messages, p50", value=rates.median(WITHOUT), unit="ms"))
    report.add(
        Row(
            name=f"embedded: the same beside {parked:,} parked filters, p50",
            value=rates.median(BESIDE),
            unit="ms",
            against="without them",
            ratio=ratio,
            target=f"<= {TARGET}x",
            reached=ratio <= TARGET,
        )
    )
    name = f"embedded: the longest while {parked:,} parked pops end"
    report.add(Row(name=name, value=while_ending[-1], unit="ms"))
