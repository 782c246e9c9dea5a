"""The effect of collecting: pops that wait some milliseconds for more messages, compared in turns with pops that don't.

Two things are measured with pollers that are parked most of the time: at a low rate, at which collecting can gain
nothing, the time from publish to answer; at higher rates, the number of messages an answer. Publishers are separate
processes; on RabbitMQ they publish by AMQP, bypassing the proxy.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import load
from bench.publishing import SECRET
from bench.report import Rates, Report, Row
from bench.taking import Taker, pop_takers
from popgate.engine.subscription import collecting
from support.collecting_proxy import collecting_program
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

POLLERS, BATCH = 8, 32
QUEUES = 4
WAIT_SECONDS = 1.0
ROUNDS = 9
LOW_RATE, MIDDLE_RATE, HIGH_RATE = 500, 2_000, 5_000
"""Messages a second. The highest rate keeps two cores busy: messages that arrive while pollers are answered fill
their next pops without any collecting.
"""
SECONDS = 4.0
"""Seconds of one round at one rate."""
PATIENCE_SECONDS = 60.0
ON, OFF = "collecting", "without collecting"
COLLECTED_SECONDS = {ON: collecting.COLLECT_SECONDS, OFF: 0.0}
LATENCY_TARGET, BATCH_TARGET = 1.05, 2.0
PUBLISHING = Path(__file__).with_name("publishing.py")


@dataclass(frozen=True, slots=True)
class Server:
    """A proxy, and how messages are published to it."""

    proxy: ProxyProcess
    amqp_url: str | None

    def publishing(self, rate: int, total: int) -> list[str]:
        """Return the publisher's arguments."""
        if self.amqp_url is None:
            return ["http", str(self.proxy.port), str(rate), str(total)]
        return ["amqp", self.amqp_url, str(rate), str(total), str(QUEUES)]


@dataclass(slots=True)
class Taken:
    """Everything that the pollers of a round got."""

    answers: int
    milliseconds: list[float]
    """Milliseconds from the publish of each message to its answer."""


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add each broker's latency and messages an answer: interleaved rounds, and the medians of their ratios."""
    for broker in ("rabbitmq", "embedded"):
        rates = Rates()
        with _started(folder / f"batches-{broker}", rabbitmq if broker == "rabbitmq" else None) as servers:
            for number in range(ROUNDS):
                print(f"batches of parked pops on {broker}: round {number + 1} of {ROUNDS}", flush=True)
                for name in (ON, OFF) if number % 2 else (OFF, ON):
                    _note(rates, name, servers[name], SECONDS * scale)
        _rows(report, rates, broker)


@contextmanager
def _started(folder: Path, rabbitmq: RabbitNode | None) -> Generator[dict[str, Server]]:
    """Start a proxy that collects, and one that does not."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for number, (name, seconds) in enumerate(COLLECTED_SECONDS.items()):
            flags: list[str] = []
            amqp_url: str | None = None
            if rabbitmq is not None:
                vhost = f"batches-{number}"
                rabbitmq.add_vhost(vhost)
                amqp_url = rabbitmq.amqp_url(vhost)
                flags += ["--amqp-url", amqp_url]
            proxy = ProxyProcess(
                folder / str(number),
                *flags,
                environment={"POPGATE_SECRET": SECRET},
                program=collecting_program(seconds),
            )
            stack.enter_context(proxy)
            load.make_topic(proxy, QUEUES)
            servers[name] = Server(proxy, amqp_url)
        yield servers


def _note(rates: Rates, name: str, server: Server, seconds: float) -> None:
    """Measure one round at each rate."""
    for rate in (LOW_RATE, MIDDLE_RATE, HIGH_RATE):
        taken = asyncio.run(_taken(server, rate, seconds))
        rates.note(f"{name}: latency at {rate}", statistics.median(taken.milliseconds))
        rates.note(f"{name}: batch at {rate}", len(taken.milliseconds) / taken.answers)


async def _taken(server: Server, rate: int, seconds: float) -> Taken:
    total, taken = int(rate * seconds), Taken(0, [])

    async def work(taker: Taker) -> None:
        while len(taken.milliseconds) < total:
            messages = await taker.take(BATCH, WAIT_SECONDS)
            now = time.monotonic()
            if messages:
                taken.answers += 1
                taken.milliseconds += [(now - float(message["body"].split()[0])) * 1000 for message in messages]
                assert await taker.settle(messages)

    async with asyncio.timeout(seconds + PATIENCE_SECONDS), pop_takers(server.proxy.port, POLLERS) as takers:
        working = asyncio.gather(*(work(taker) for taker in takers))
        publisher = await asyncio.create_subprocess_exec(
            sys.executable, str(PUBLISHING), *server.publishing(rate, total)
        )
        if await publisher.wait():
            raise RuntimeError("the publisher has failed")
        await working
    return taken


def _rows(report: Report, rates: Rates, broker: str) -> None:
    def add(of: str, name: str, unit: str, target: str = "", reached: Callable[[float], bool] | None = None) -> None:
        on, off = f"{ON}: {of}", f"{OFF}: {of}"
        ratio = rates.ratio(on, off)
        report.add(
            Row(
                name=f"{broker}: {name}",
                value=rates.median(on),
                unit=unit,
                against=f"{OFF} ({rates.median(off):.1f})",
                ratio=ratio,
                ratio_error=rates.ratio_error(on, off),
                target=target,
                reached=None if reached is None else reached(ratio),
            )
        )

    latency = f"publish to pop at {LOW_RATE}/s, {POLLERS} pollers, p50"
    add(f"latency at {LOW_RATE}", latency, "ms", f"<= {LATENCY_TARGET}x", lambda ratio: ratio <= LATENCY_TARGET)
    add(f"batch at {MIDDLE_RATE}", f"messages an answer at {MIDDLE_RATE:,}/s", "messages")
    batch = f"messages an answer at {HIGH_RATE:,}/s, {POLLERS} pollers of {BATCH}"
    add(f"batch at {HIGH_RATE}", batch, "messages", f">= {BATCH_TARGET}x", lambda ratio: ratio >= BATCH_TARGET)
    for rate in (MIDDLE_RATE, HIGH_RATE):
        add(f"latency at {rate}", f"publish to pop at {rate:,}/s, p50", "ms")
