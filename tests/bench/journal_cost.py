"""The cost of the journal: pops and acks of a proxy that writes one, compared with a proxy that does not.

Files are small enough that each drain includes their writing. The rate is the median of the rounds' ratios: many short
rounds, because a single one is off by several times the cost of the journal.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench import load
from bench.report import Rates, Report, Row
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitNode

BATCH = 32
MESSAGES = 20_000
ROUNDS = 61
SPARE = 512
"""Number of extra messages beyond those popped; otherwise the last pops would wait in vain."""
EVENTS_OF_A_FILE = 20_000
ON, OFF = "with a journal", "without"
TARGET = 0.95


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add each broker's rate, and the processor time a message: interleaved rounds."""
    for broker in ("rabbitmq", "embedded"):
        _rows(report, folder / f"journal-{broker}", rabbitmq if broker == "rabbitmq" else None, broker, scale)


def _rows(report: Report, folder: Path, rabbitmq: RabbitNode | None, broker: str, scale: float) -> None:
    total, rates, costs = int(MESSAGES * scale), Rates(), Rates()
    with ExitStack() as stack:
        proxies: dict[str, ProxyProcess] = {}
        for number, name in enumerate((ON, OFF)):
            flags: list[str] = []
            if name == ON:
                rotation = ("--journal-rotate-events", str(EVENTS_OF_A_FILE))
                flags += ["--journal", str(folder / "journal"), *rotation]
            if rabbitmq is not None:
                vhost = f"journal-{number}"
                rabbitmq.add_vhost(vhost)
                flags += ["--amqp-url", rabbitmq.amqp_url(vhost)]
            proxy = proxies[name] = ProxyProcess(folder / f"proxy-{number}", *flags)
            stack.callback(proxy.close)
            proxy.start()
            load.make_topic(proxy)
            asyncio.run(load.fill(proxy.port, total=SPARE))
        missing = dict.fromkeys(proxies, total)
        for number in range(ROUNDS):
            for name in (ON, OFF) if number % 2 else (OFF, ON):
                proxy = proxies[name]
                asyncio.run(load.fill(proxy.port, total=missing[name]))
                before = _processor_seconds(proxy)
                drained = asyncio.run(load.drain(proxy.port, total=total, batch=BATCH))
                costs.note(name, (_processor_seconds(proxy) - before) / drained.messages * 1e6)
                rates.note(name, drained.rate)
                missing[name] = drained.messages
    ratio = rates.ratio(ON, OFF)
    report.add(
        Row(
            name=f"{broker}: pop + ack, batch {BATCH}, with a journal",
            value=rates.median(ON),
            unit="msg/s",
            against=OFF,
            ratio=ratio,
            ratio_error=rates.ratio_error(ON, OFF),
            target=f">= {TARGET}x",
            reached=ratio >= TARGET,
        )
    )
    report.add(
        Row(
            name=f"{broker}: the same, processor a message",
            value=costs.median(ON),
            unit="us",
            against=OFF,
            ratio=costs.ratio(ON, OFF),
        )
    )


def _processor_seconds(proxy: ProxyProcess) -> float:
    times = psutil.Process(proxy.pid).cpu_times()
    return times.user + times.system
