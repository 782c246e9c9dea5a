"""Publishing on RabbitMQ: through popgate, against `asyncio.gather` over aio-pika's confirmed publishes.

Both publish to the same quorum queues with the same number of messages in flight, and take turns. After each figure the
queues are purged, so that no figure pays for the messages of an earlier one.
"""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench import load
from bench.report import Rates, Report, Row
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

MESSAGES = 20_000
ROUNDS = 7
QUEUES = 4
SINGLES_SHARE = 0.2
"""Share of ``MESSAGES`` that is published one by one."""
DELAY_SECONDS = 86_400
DELAY_QUEUE = "popgate:delay:16"
"""The queue in which messages with this delay wait first."""
NOT_FOUND = 404
GATHERED = "asyncio.gather over aio-pika"
GATHERED_TARGET, DELAYED_TARGET = 3.0, 0.8
VHOST = "publishes"
BASELINES = Path(__file__).with_name("baselines.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to publish through popgate, and the ratio to another way that it must reach, if any."""

    name: str
    batch: int = 256
    clients: int = 4
    dedup: bool = False
    delay_seconds: float = 0.0
    against: str = ""
    target: float | None = None


PLAIN = Kind(name="publish, batch 256, 4 clients", against=GATHERED, target=GATHERED_TARGET)
KINDS = (
    PLAIN,
    Kind(
        name="publish with a delay, batch 256", delay_seconds=DELAY_SECONDS, against=PLAIN.name, target=DELAYED_TARGET
    ),
    Kind(name="publish with dedup_id, batch 256", dedup=True, against=PLAIN.name),
    Kind(name="publish one by one, 8 clients", batch=1, clients=8, against=PLAIN.name),
)


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add the rate and the processor time of each kind: interleaved rounds, and the medians of their ratios."""
    rabbitmq.add_vhost(VHOST)
    amqp_url = rabbitmq.amqp_url(VHOST)
    rates, costs = Rates(), Rates()
    proxy = ProxyProcess(folder / "publishes", "--amqp-url", amqp_url)
    try:
        proxy.start()
        load.make_topic(proxy, QUEUES)
        for number in range(ROUNDS + 1):  # the first round declares queues and warms up
            total = int(MESSAGES * scale)
            noted = (rates, costs) if number else (Rates(), Rates())
            for kind in KINDS if number % 2 else KINDS[::-1]:
                _note_publishes(*noted, proxy, kind, int(total * SINGLES_SHARE) if kind.batch == 1 else total)
                _purge(rabbitmq)
            _note_gathered(*noted, amqp_url, total)
            _purge(rabbitmq)
    finally:
        proxy.close()
        rabbitmq.delete_vhost(VHOST)
    _add_rows(report, rates, costs)


def _note_publishes(rates: Rates, costs: Rates, proxy: ProxyProcess, kind: Kind, total: int) -> None:
    before = _processor_seconds(proxy)
    rate = asyncio.run(
        load.fill(
            proxy.port,
            total=total,
            batch=kind.batch,
            clients=kind.clients,
            dedup=kind.dedup,
            delay_seconds=kind.delay_seconds,
        )
    )
    rates.note(kind.name, rate)
    costs.note(kind.name, (_processor_seconds(proxy) - before) / total * 1e6)


def _note_gathered(rates: Rates, costs: Rates, amqp_url: str, total: int) -> None:
    keys = map(str, range(QUEUES))
    command = [sys.executable, str(BASELINES), "publish", amqp_url, str(total), "popgate:bench", *keys]
    rate, microseconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    rates.note(GATHERED, float(rate))
    costs.note(GATHERED, float(microseconds))


def _add_rows(report: Report, rates: Rates, costs: Rates) -> None:
    report.add(Row(name=f"rabbitmq: {GATHERED}, 4 x 256", value=rates.median(GATHERED), unit="msg/s"))
    for kind in KINDS:
        ratio = rates.ratio(kind.name, kind.against)
        report.add(
            Row(
                name=f"rabbitmq: {kind.name}",
                value=rates.median(kind.name),
                unit="msg/s",
                against=kind.against,
                ratio=ratio,
                target="" if kind.target is None else f">= {kind.target}x",
                reached=None if kind.target is None else ratio >= kind.target,
            )
        )
    report.add(Row(name=f"rabbitmq: processor time of {GATHERED}", value=costs.median(GATHERED), unit="us/msg"))
    for kind in KINDS:
        report.add(
            Row(
                name=f"rabbitmq: processor time of the proxy, {kind.name}",
                value=costs.median(kind.name),
                unit="us/msg",
                against=GATHERED,
                ratio=costs.ratio(kind.name, GATHERED),
            )
        )


def _purge(rabbitmq: RabbitNode) -> None:
    for queue in _queues():
        try:
            rabbitmq.api("DELETE", "queues", VHOST, queue, "contents")
        except httpx.HTTPStatusError as error:
            if error.response.status_code != NOT_FOUND:  # the first publish with a delay declares the queue
                raise


def _queues() -> Sequence[str]:
    return [*(f"popgate:bench:default:{index}" for index in range(QUEUES)), DELAY_QUEUE]


def _processor_seconds(proxy: ProxyProcess) -> float:
    times = psutil.Process(proxy.pid).cpu_times()
    return times.user + times.system
