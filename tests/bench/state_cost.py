"""What the conditional writes cost: pops and acks with the state on Redis, against the same with them stubbed out."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

from bench import load
from bench.report import Rates, Report, Row
from support.proxy import POPGATE, ProxyProcess, python_program
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

BATCH = 32
MESSAGES = 30_000
ROUNDS = 5
WRITTEN, STUBBED = "written", "stubbed"
PROGRAMS = {WRITTEN: POPGATE, STUBBED: python_program(str(Path(__file__).with_name("stubbed.py")))}
TARGET = 0.85


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """One row: interleaved rounds, the median of their ratios."""
    total, rates = int(MESSAGES * scale), Rates()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis-cost"))
        ports: dict[str, int] = {}
        for name, program in PROGRAMS.items():
            rabbitmq.add_vhost(name)
            proxy = ProxyProcess(
                folder / name,
                *("--amqp-url", rabbitmq.amqp_url(name)),
                *("--redis-url", redis.url()),
                *("--redis-namespace", name),
                program=program,
            )
            stack.callback(proxy.close)
            proxy.start()
            load.make_topic(proxy)
            ports[name] = proxy.port
        for number in range(ROUNDS):
            for name in (WRITTEN, STUBBED) if number % 2 else (STUBBED, WRITTEN):
                asyncio.run(load.fill(ports[name], total=total))
                rates.note(name, asyncio.run(load.drain(ports[name], total=total, batch=BATCH)).rate)
    ratio = rates.ratio(WRITTEN, STUBBED)
    report.add(
        Row(
            name=f"rabbitmq + redis: pop + ack, batch {BATCH}, 8 clients",
            value=rates.median(WRITTEN),
            unit="msg/s",
            against="with the writes stubbed out",
            ratio=ratio,
            target=f">= {TARGET}x",
            reached=ratio >= TARGET,
        )
    )
