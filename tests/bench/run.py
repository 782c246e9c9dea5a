"""The benchmarks: prints a table, writes a JSON file, and checks each target. `make bench` runs this.

Every ratio compares two figures of this run, on this machine, measured in direct succession; over several rounds the
median counts. The servers are started and ended here.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import psutil

from bench import (
    access,
    batches,
    failover,
    filtered,
    filtered_edge,
    hanging,
    journal_audit,
    journal_cost,
    load,
    locks,
    modes,
    moves,
    plot,
    publishes,
    scaling,
    scaling_cluster,
    spark,
    state_cost,
)
from bench.report import Rates, Report, Row
from support.processes import PortBlock
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitCluster, RabbitNode, RabbitSettings
from support.rabbitmq_releases import SERIES, find_release

QUEUES = 4
BODY_BYTES = 1024
DRAINED = {1: 4_000, 8: 12_000, 32: 30_000, 256: 40_000}
"""Number of messages of one drain, by batch size."""
ROUNDS = 3
PUBLISHED = 40_000
"""Number of messages of one publishing round."""
NOOP, PLAIN, WITHOUT_HTTP = "no-op", "plain", "without HTTP"
DEDUP_TARGET = 0.8
TARGETS = {("rabbitmq", 1): 0.35, ("embedded", 1): 0.35, ("rabbitmq", 32): 1.5, ("embedded", 32): 3.0}
ORDERING_KEYS = (1_000, 20_000)
ORDERED_TARGET = 0.8
LATENCY_RATE = 500
BESIDE = f"rabbitmq {SERIES[-1]}"
"""The broker whose pops and publishes are compared with those of the newest release, if it is installed."""
PARTS = (
    *("rabbitmq", "embedded", "locks", "cluster", "journal", "batches", "modes", "spark", "journal-audit", "filters"),
    *("access", "publish", "scale"),
)
BASELINES = Path(__file__).with_name("baselines.py")
ALONE = Path(__file__).with_name("alone.py")


def note_drains(rates: Rates, port: int, broker: str, scale: float) -> None:
    """Pop and ack with 8 clients in batches of every size."""
    for batch, count in DRAINED.items():
        total = int(scale * count)
        asyncio.run(load.fill(port, total=total, body_bytes=BODY_BYTES))
        rates.note(f"{broker} {batch}", asyncio.run(load.drain(port, total=total, batch=batch)).rate)


def note_alone(rates: Rates, scale: float) -> None:
    """Pop and ack single messages without HTTP."""
    command = [sys.executable, str(ALONE), "1", str(int(scale * DRAINED[1]))]
    rates.note(WITHOUT_HTTP, float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def alone_row(report: Report, rates: Rates) -> None:
    """Add the row on single pops without the cost of HTTP."""
    report.add(
        Row(
            name="embedded: pop + ack without HTTP, batch 1, 8 workers",
            value=rates.median(WITHOUT_HTTP),
            unit="msg/s",
            against="two no-op requests",
            ratio=2 * rates.ratio(WITHOUT_HTTP, NOOP),
        )
    )


def note_ordered(rates: Rates, port: int, broker: str, scale: float) -> None:
    """Pop and ack, in batches of 32, messages with ordering keys: many and few messages a key."""
    total = int(scale * DRAINED[32])
    for keys in ORDERING_KEYS:
        asyncio.run(load.fill(port, total=total, body_bytes=BODY_BYTES, keys=keys))
        rates.note(f"{broker} {keys} keys", asyncio.run(load.drain(port, total=total, batch=32)).rate)


def ordered_rows(report: Report, rates: Rates, broker: str) -> None:
    """Add pops with ordering keys against pops without."""
    for keys in ORDERING_KEYS:
        ratio = rates.ratio(f"{broker} {keys} keys", f"{broker} 32")
        report.add(
            Row(
                name=f"{broker}: pop + ack, batch 32, {keys:,} ordering keys",
                value=rates.median(f"{broker} {keys} keys"),
                unit="msg/s",
                against="without keys",
                ratio=ratio,
                target=f">= {ORDERED_TARGET}x",
                reached=ratio >= ORDERED_TARGET,
            )
        )


def beside_rows(report: Report, rates: Rates) -> None:
    """Add the drains and publishes on the oldest RabbitMQ against the same on the newest."""
    for what, name in (
        *((f"{batch}", f"pop + ack, batch {batch}, 8 clients") for batch in DRAINED),
        ("publish", "publish, batch 256, 4 clients"),
        ("publish once", "publish with dedup_id, batch 256, 4 clients"),
    ):
        measured = f"{BESIDE} {what}"
        report.add(
            Row(
                name=f"{BESIDE}: {name}",
                value=rates.median(measured),
                unit="msg/s",
                against=f"RabbitMQ {find_release()}",
                ratio=rates.ratio(measured, f"rabbitmq {what}"),
            )
        )


def drain_rows(report: Report, rates: Rates, broker: str) -> None:
    """Add the drains of every batch size against the two baselines."""
    for batch in DRAINED:
        measured, wanted = f"{broker} {batch}", TARGETS.get((broker, batch))
        if batch == 1:  # a pop and an ack are two requests
            against, ratio = "two no-op requests", 2 * rates.ratio(measured, NOOP)
        else:
            against, ratio = "plain aio-pika consumer", rates.ratio(measured, PLAIN)
        report.add(
            Row(
                name=f"{broker}: pop + ack, batch {batch}, 8 clients",
                value=rates.median(measured),
                unit="msg/s",
                against=against,
                ratio=ratio,
                target=f">= {wanted}x" if wanted else "",
                reached=None if wanted is None else ratio >= wanted,
            )
        )


def note_publishes(rates: Rates, port: int, broker: str, scale: float) -> None:
    """Publish in batches of 256 without and with a dedup_id."""
    total = int(scale * PUBLISHED)
    for name, dedup in ((f"{broker} publish", False), (f"{broker} publish once", True)):
        rates.note(name, asyncio.run(load.fill(port, total=total, body_bytes=BODY_BYTES, dedup=dedup)))
        asyncio.run(load.drain(port, total=total, batch=256))


def publish_rows(report: Report, rates: Rates, broker: str) -> None:
    """Add publishing with a dedup_id against publishing without one."""
    without, once = f"{broker} publish", f"{broker} publish once"
    ratio = rates.ratio(once, without)
    report.add(Row(name=f"{broker}: publish, batch 256, 4 clients", value=rates.median(without), unit="msg/s"))
    report.add(
        Row(
            name=f"{broker}: publish with dedup_id, batch 256, 4 clients",
            value=rates.median(once),
            unit="msg/s",
            against="without dedup_id",
            ratio=ratio,
            target=f">= {DEDUP_TARGET}x",
            reached=ratio >= DEDUP_TARGET,
        )
    )


async def _latencies(port: int, seconds: float) -> list[float]:
    """Return milliseconds from before the publish request to the pop's answer, at a steady rate over parked pops."""
    publisher = await load.connect(port)
    poppers = [await load.connect(port) for _ in range(8)]
    sent: dict[str, float] = {}
    latencies: list[float] = []
    total = int(LATENCY_RATE * seconds)

    async def publish() -> None:
        started = time.perf_counter()
        for number in range(total):
            await asyncio.sleep(max(0.0, started + number / LATENCY_RATE - time.perf_counter()))
            message_id = f"m{number}"
            sent[message_id] = time.perf_counter()
            await publisher.post(
                "/v1/topics/bench/messages", {"messages": [{"body": "x" * 256, "message_id": message_id}]}
            )

    async def pop(connection: load.Connection) -> None:
        while len(latencies) < total:
            answer = await connection.post(f"{load.SUBSCRIPTION}/pop", {"max_messages": 32, "wait_seconds": 1})
            now = time.perf_counter()
            messages = answer["messages"]
            latencies.extend((now - sent[message["message_id"]]) * 1000 for message in messages)
            if messages:
                handles = [message["receipt_handle"] for message in messages]
                await connection.post(f"{load.SUBSCRIPTION}/ack", {"receipt_handles": handles})

    await asyncio.gather(publish(), *(pop(connection) for connection in poppers))
    return sorted(latencies)


def latency_rows(report: Report, port: int, broker: str, scale: float) -> None:
    latencies = asyncio.run(_latencies(port, seconds=10 * scale))
    for percent in (50, 99):
        value = latencies[min(len(latencies) - 1, len(latencies) * percent // 100)]
        report.add(Row(name=f"{broker}: publish to pop at {LATENCY_RATE}/s, p{percent}", value=value, unit="ms"))


async def _lease(port: int, count: int) -> None:
    connection = await load.connect(port)
    taken = 0
    while taken < count:
        want = min(256, count - taken)
        body = {"max_messages": want, "wait_seconds": 5, "invisibility_seconds": 3600}
        answer = await connection.post(f"{load.SUBSCRIPTION}/pop", body)
        taken += len(answer["messages"])


async def _pop_milliseconds(port: int, rounds: int) -> float:
    """Return the median time of a pop of 32 and its ack."""
    connection = await load.connect(port)
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        answer = await connection.post(
            f"{load.SUBSCRIPTION}/pop", {"max_messages": 32, "wait_seconds": 5, "invisibility_seconds": 3600}
        )
        times.append((time.perf_counter() - started) * 1000)
        handles = [message["receipt_handle"] for message in answer["messages"]]
        if handles:
            await connection.post(f"{load.SUBSCRIPTION}/ack", {"receipt_handles": handles})
    return statistics.median(times)


def in_flight_rows(report: Report, proxy: ProxyProcess, broker: str, scale: float) -> None:
    """Add the time of a pop with few and with many in flight, and the memory of a further lease."""
    few, many, rounds = int(1_000 * scale), int(100_000 * scale), 100
    body_bytes = 64
    process = psutil.Process(proxy.pid)

    def lease_more(count: int) -> int:
        """Lease more messages; return the memory afterwards. All published messages are leased, because prefetched
        ones take memory, too.
        """
        asyncio.run(load.fill(proxy.port, total=count, body_bytes=body_bytes))
        asyncio.run(_lease(proxy.port, count))
        return process.memory_info().rss

    def pop_milliseconds() -> float:
        asyncio.run(load.fill(proxy.port, total=32 * rounds, body_bytes=body_bytes))
        return asyncio.run(_pop_milliseconds(proxy.port, rounds))

    lease_more(few)
    fast = pop_milliseconds()
    before = lease_more(many - few)  # caches are full by now, and freed memory is used again
    slow = pop_milliseconds()
    per_lease = (lease_more(many) - before) / many - body_bytes
    report.add(
        Row(
            name=f"{broker}: memory a further lease takes above the payload, {many:,} in flight",
            value=per_lease,
            unit="B",
            target="<= 1024",
            reached=per_lease <= 1024,
        )
    )
    ratio = slow / fast
    report.add(Row(name=f"{broker}: pop of 32 with {few:,} in flight", value=fast, unit="ms"))
    report.add(
        Row(
            name=f"{broker}: pop of 32 with {many:,} in flight",
            value=slow,
            unit="ms",
            against=f"with {few:,}",
            ratio=ratio,
            target="<= 1.5x",
            reached=ratio <= 1.5,
        )
    )


def delay_rows(report: Report, port: int, noop_port: int, broker: str, scale: float) -> None:
    """Add a delayed publish against a plain one, and pops beside many delayed messages against pops without them.

    Delayed messages stay for the rest of the run, so the two can't take turns: each is compared with no-op requests
    right before it, because machines vary.
    """
    total, standing = int(20_000 * scale), int(100_000 * scale)
    rates = Rates()

    def note_pops(name: str) -> None:
        noop = asyncio.run(load.echo_rate(noop_port, total=int(10_000 * scale)))
        rate = asyncio.run(load.drain(port, total=total, batch=32)).rate
        rates.note(name, rate)
        rates.note(f"{name} against no-op", rate / noop)

    for _ in range(ROUNDS):
        rates.note("plain", asyncio.run(load.fill(port, total=total, body_bytes=BODY_BYTES)))
        note_pops("without")
    for _ in range(ROUNDS):
        count = standing // ROUNDS
        rates.note("delayed", asyncio.run(load.fill(port, total=count, body_bytes=BODY_BYTES, delay_seconds=86_400)))
    for _ in range(ROUNDS):
        asyncio.run(load.fill(port, total=total, body_bytes=BODY_BYTES))
        note_pops("beside")
    report.add(
        Row(
            name=f"{broker}: delayed publish, batches of 256",
            value=rates.median("delayed"),
            unit="msg/s",
            against="plain publish",
            ratio=rates.ratio("delayed", "plain"),
        )
    )
    ratio = rates.ratio("beside against no-op", "without against no-op")
    report.add(
        Row(
            name=f"{broker}: pop + ack, batch 32, {standing:,} delayed",
            value=rates.median("beside"),
            unit="msg/s",
            against="without them",
            ratio=ratio,
            target=">= 0.9x",
            reached=ratio >= 0.9,
        )
    )


@contextmanager
def noop_server() -> Generator[int, None, None]:
    block = PortBlock()
    (port,) = block.ports
    process = subprocess.Popen([sys.executable, str(BASELINES), "noop", str(port)])
    try:
        for _ in range(100):
            try:
                httpx.post(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def plain_rate(proxy: ProxyProcess, amqp_url: str, total: int) -> float:
    """Measure a plain aio-pika consumer that drains the same quorum queues while popgate consumes nothing."""
    asyncio.run(load.fill(proxy.port, total=total, body_bytes=BODY_BYTES))
    queues = [f"popgate:bench:default:{index}" for index in range(QUEUES)]
    command = [sys.executable, str(BASELINES), "consume", amqp_url, str(total), *queues]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def broker_rows(report: Report, brokers: list[str], folder: Path, amqp_url: str, scale: float) -> None:
    """Add all rows on ``brokers``, and pops and publishes on the oldest RabbitMQ beside those on ``amqp_url``."""
    with ExitStack() as stack:
        flags = {"rabbitmq": ["--amqp-url", amqp_url]}
        oldest = find_release(SERIES[-1])
        if "rabbitmq" in brokers and oldest != find_release():
            older = stack.enter_context(RabbitCluster(folder / "oldest", release=oldest, settings=ROOMY))
            flags[BESIDE] = ["--amqp-url", older.nodes[0].amqp_url()]
        flags["embedded"] = []
        proxies: dict[str, ProxyProcess] = {}
        for broker, extra in flags.items():
            proxies[broker] = ProxyProcess(folder / broker, *extra)
            stack.callback(proxies[broker].close)
            proxies[broker].start()
            load.make_topic(proxies[broker], QUEUES)
        noop_port = stack.enter_context(noop_server())
        rates = Rates()
        for number in range(1, ROUNDS + 1):
            print(f"round {number} of {ROUNDS}", flush=True)
            rates.note(NOOP, asyncio.run(load.echo_rate(noop_port, total=int(10_000 * scale))))
            rates.note(PLAIN, plain_rate(proxies["rabbitmq"], amqp_url, int(20_000 * scale)))
            note_alone(rates, scale)
            for broker in (one for one in flags if one in (*brokers, BESIDE)):
                note_drains(rates, proxies[broker].port, broker, scale)
                if broker in brokers:
                    note_ordered(rates, proxies[broker].port, broker, scale)
                note_publishes(rates, proxies[broker].port, broker, scale)
        name = "no-op raw ASGI endpoint under uvicorn, 8 clients"
        report.add(Row(name=name, value=rates.median(NOOP), unit="req/s"))
        name = "plain aio-pika consumer, prefetch 500, ack each"
        report.add(Row(name=name, value=rates.median(PLAIN), unit="msg/s"))
        alone_row(report, rates)
        for broker in brokers:
            drain_rows(report, rates, broker)
            ordered_rows(report, rates, broker)
            publish_rows(report, rates, broker)
            latency_rows(report, proxies[broker].port, broker, scale)
            delay_rows(report, proxies[broker].port, noop_port, broker, scale)
            in_flight_rows(report, proxies[broker], broker, scale)
        if BESIDE in flags:
            beside_rows(report, rates)


def modes_rows(report: Report, folder: Path, node: RabbitNode, scale: float, beside: Path) -> None:
    """Add pop against pull, and the effect of a hung consumer on both; its figures over time are written and drawn."""
    with modes.started(folder, node) as (proxies, amqp_url):
        modes.rows(report, proxies, scale)
        figures = hanging.rows(report, proxies["rabbitmq"], amqp_url, hanging.scaled(scale))
    beside.with_name("hanging.json").write_text(json.dumps(figures) + "\n")
    beside.with_name("hanging.svg").write_text(plot.drawn(figures))


ROOMY = RabbitSettings(configuration={"vm_memory_high_watermark.absolute": "4GB"})
"""The waiting and delayed messages together exceed the memory of a test's node, which would then refuse publishes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts (default 1)")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="file for the figures")
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    arguments = parser.parse_args()
    scale: float = arguments.scale
    report = Report()
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, RabbitMQ {find_release()}"
    print(f"popgate benchmarks on {machine}, scale {scale:g}")
    brokers = [broker for broker in ("rabbitmq", "embedded") if arguments.only in (None, broker)]
    with tempfile.TemporaryDirectory(prefix="popgate-bench-") as name:
        folder = Path(name)
        if arguments.only in (None, "journal-audit"):  # without any server beside it
            journal_audit.rows(report, folder, scale)
        if arguments.only in (None, "access"):
            access.rows(report, folder, scale)
        if arguments.only in (None, "scale"):
            scaling.rows(report, folder, scale)
        if arguments.only == "access":
            return _finish(report, arguments.json)
        if arguments.only in (None, "filters"):
            filtered.rows(report, folder, scale)
        with RabbitCluster(folder / "rabbitmq", settings=ROOMY) as cluster:
            amqp_url = cluster.nodes[0].amqp_url()
            if arguments.only in (None, "locks"):  # first: they measure single operations of an idle node
                locks.rows(report, amqp_url)
            if arguments.only in (None, "cluster"):
                state_cost.rows(report, folder, cluster.nodes[0], scale)
                failover.rows(report, folder, cluster.nodes[0], scale)
                moves.rows(report, folder)
            if arguments.only in (None, "scale"):
                scaling_cluster.rows(report, folder, cluster.nodes[0], scale)
            if arguments.only in (None, "filters"):
                filtered_edge.rows(report, folder, cluster.nodes[0], scale)
            if arguments.only in (None, "journal"):
                journal_cost.rows(report, folder, cluster.nodes[0], scale)
            if arguments.only in (None, "publish"):
                publishes.rows(report, folder, cluster.nodes[0], scale)
            if arguments.only in (None, "batches"):
                batches.rows(report, folder, cluster.nodes[0], scale)
            if arguments.only in (None, "modes"):
                modes_rows(report, folder, cluster.nodes[0], scale, arguments.json)
            if arguments.only in (None, "spark"):
                spark.rows(report, folder, cluster.nodes[0], scale)
            if brokers:
                broker_rows(report, brokers, folder, amqp_url, scale)
    return _finish(report, arguments.json)


def _finish(report: Report, file: Path) -> int:
    """Write the figures, and return the exit code."""
    file.write_text(json.dumps([asdict(row) for row in report.rows], indent=2) + "\n")
    missed = [row.name for row in report.rows if row.reached is False]
    print(f"figures in {file}; {'missed: ' + '; '.join(missed) if missed else 'every target reached'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
