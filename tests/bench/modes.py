"""Pop against pull: the same proxy, queues, bodies and batches, as many clients as queues, in turns.

Both settle everything they take: a pop client by an ack of the batch, a pull client by one commit. RIP-19 allows pop to
be 10 % slower; here it must reach the same rate, and its latency may exceed pull's by 10 %.
"""

import asyncio
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from bench import load
from bench.report import Rates, Report, Row
from bench.taking import Taker, pop_takers, pull_takers
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

QUEUES = (4, 8)
LATENCY_QUEUES = 4
ROUNDS = 9
BATCH = 32
BODY_BYTES = 1024
WAIT_SECONDS = 0.25
DRAINED = 24_000
WARMED_UP = 1_000
RATE = 300
"""Messages a second, published one by one, while the latency is measured."""
LATENCY_SECONDS = 4.0
PERCENTS = (50, 99)
RATE_TARGET, LATENCY_TARGET = 1.0, 1.1
MODES = {"pop": pop_takers, "pull": pull_takers}
SWITCH_SECONDS_MAX = 30.0
VHOST = "modes"


def rows(report: Report, proxies: Mapping[str, ProxyProcess], scale: float) -> None:
    """Add throughput and latency of both modes, on each of ``proxies``, which are named by their broker."""
    rates = Rates()
    for queues in QUEUES:
        for proxy in proxies.values():
            load.make_topic(proxy, queues)
        for number in range(ROUNDS):
            print(f"pop against pull, {queues} queues: round {number + 1} of {ROUNDS}", flush=True)
            for broker, proxy in proxies.items():
                for mode in sorted(MODES, reverse=number % 2 == 1):  # each is the first one in turn
                    note(rates, f"{broker} {queues}", proxy, mode, queues, scale)
        for proxy in proxies.values():
            proxy.client.delete("/v1/admin/topics/bench").raise_for_status()
    for broker in proxies:
        _rows(report, rates, broker)


@contextmanager
def started(folder: Path, node: RabbitNode) -> Generator[tuple[dict[str, ProxyProcess], str]]:
    """Start a proxy on each broker; yield them by the broker's name, and the URL of RabbitMQ."""
    node.add_vhost(VHOST)
    amqp_url = node.amqp_url(VHOST)
    with ExitStack() as stack:
        proxies = {
            "rabbitmq": stack.enter_context(ProxyProcess(folder / "modes-rabbitmq", "--amqp-url", amqp_url)),
            "embedded": stack.enter_context(ProxyProcess(folder / "modes-embedded")),
        }
        yield proxies, amqp_url


def note(rates: Rates, name: str, proxy: ProxyProcess, mode: str, queues: int, scale: float) -> None:
    """Measure one round of one mode."""
    switch(proxy, mode)
    rates.note(f"{name} {mode}", asyncio.run(_drain_rate(proxy.port, mode, queues, int(DRAINED * scale))))
    if queues == LATENCY_QUEUES:
        latencies = asyncio.run(_latencies(proxy.port, mode, queues, int(RATE * LATENCY_SECONDS * scale)))
        for percent in PERCENTS:
            value = latencies[min(len(latencies) - 1, len(latencies) * percent // 100)]
            rates.note(f"{name} {mode} p{percent}", value)


def switch(proxy: ProxyProcess, mode: str, topic: str = "bench") -> None:
    """Switch the mode; return once the proxy serves it."""
    path = f"/v1/admin/topics/{topic}/groups/default/consume-mode"
    proxy.client.put(path, json={"mode": mode}).raise_for_status()

    def is_served() -> bool:
        served = proxy.client.get(path).raise_for_status().json()
        return bool(served["converged"]) and served["mode"] == mode

    wait_until(is_served, timeout_seconds=SWITCH_SECONDS_MAX, what=f"the mode {mode}")


async def _drain_rate(port: int, mode: str, queues: int, total: int) -> float:
    """Return messages a second, taken and settled in batches, with all messages stored beforehand."""
    async with MODES[mode](port, queues) as takers:
        await load.fill(port, total=WARMED_UP, body_bytes=BODY_BYTES)
        await _drain(takers, WARMED_UP)
        await load.fill(port, total=total, body_bytes=BODY_BYTES)
        return total / await _drain(takers, total)


async def _drain(takers: Sequence[Taker], total: int) -> float:
    """Return the seconds of one drain."""
    left, ended = total, 0.0

    async def work(taker: Taker) -> None:
        nonlocal left, ended
        while left > 0:
            messages = await taker.take(BATCH, WAIT_SECONDS)
            if messages:
                assert await taker.settle(messages)
                left -= len(messages)
                ended = time.perf_counter()

    started = time.perf_counter()
    await asyncio.gather(*(work(taker) for taker in takers))
    return ended - started


async def _latencies(port: int, mode: str, queues: int, total: int) -> list[float]:
    """Return milliseconds from before the publish request to the message's arrival at a client, sorted."""
    latencies: list[float] = []

    async def work(taker: Taker) -> None:
        while len(latencies) < total:
            messages = await taker.take(BATCH, WAIT_SECONDS)
            now = time.perf_counter()
            latencies.extend((now - float(message["body"].split()[0])) * 1000 for message in messages)
            if messages:
                assert await taker.settle(messages)

    async with MODES[mode](port, queues) as takers:
        working = asyncio.gather(*(work(taker) for taker in takers))
        with closing(await load.connect(port)) as publisher:
            started = time.perf_counter()
            for number in range(total):
                await asyncio.sleep(max(0.0, started + number / RATE - time.perf_counter()))
                body = f"{time.perf_counter()!r} {'x' * 230}"
                await publisher.post("/v1/topics/bench/messages", {"messages": [{"body": body}]})
        await working
    return sorted(latencies)


def _rows(report: Report, rates: Rates, broker: str) -> None:
    for queues in QUEUES:
        pop, pull = (f"{broker} {queues} {mode}" for mode in MODES)
        what = f"batch {BATCH}, {queues} queues and clients"
        report.add(Row(name=f"{broker}: pull + commit, {what}", value=rates.median(pull), unit="msg/s"))
        ratio = rates.ratio(pop, pull)
        report.add(
            Row(
                name=f"{broker}: pop + ack, {what}",
                value=rates.median(pop),
                unit="msg/s",
                against="pull",
                ratio=ratio,
                target=f">= {RATE_TARGET}x",
                reached=ratio >= RATE_TARGET,
            )
        )
    for percent in PERCENTS:
        pop, pull = (f"{broker} {LATENCY_QUEUES} {mode} p{percent}" for mode in MODES)
        report.add(Row(name=f"{broker}: publish to pull at {RATE}/s, p{percent}", value=rates.median(pull), unit="ms"))
        ratio = rates.ratio(pop, pull)
        report.add(
            Row(
                name=f"{broker}: publish to pop at {RATE}/s, p{percent}",
                value=rates.median(pop),
                unit="ms",
                against="pull",
                ratio=ratio,
                target=f"<= {LATENCY_TARGET}x",
                reached=ratio <= LATENCY_TARGET,
            )
        )
