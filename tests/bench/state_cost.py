"""The cost of the conditional writes: pops and acks with the state on Redis, against the same with them stubbed out."""

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
ROUNDS = 9
CLIENTS, FEW_CLIENTS = 32, 8
"""Number of clients. With a few that wait for each answer, the proxy is idle for a while: this shows Redis' latency.
With many, it always has work: this shows the share of throughput that the writes cost.
"""
WRITTEN, STUBBED = "written", "stubbed"
PROGRAMS = {WRITTEN: POPGATE, STUBBED: python_program(str(Path(__file__).with_name("stubbed.py")))}
TARGET = 0.85


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add interleaved rounds, and the medians of their ratios."""
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
            print(f"the cost of the state in Redis: round {number + 1} of {ROUNDS}", flush=True)
            for name in (WRITTEN, STUBBED) if number % 2 else (STUBBED, WRITTEN):
                for clients in (FEW_CLIENTS, CLIENTS):
                    asyncio.run(load.fill(ports[name], total=total))
                    drained = asyncio.run(load.drain(ports[name], total=total, batch=BATCH, clients=clients))
                    rates.note(f"{name} {clients}", drained.rate)
    for clients, target in ((FEW_CLIENTS, None), (CLIENTS, TARGET)):
        ratio = rates.ratio(f"{WRITTEN} {clients}", f"{STUBBED} {clients}")
        report.add(
            Row(
                name=f"rabbitmq + redis: pop + ack, batch {BATCH}, {clients} clients",
                value=rates.median(f"{WRITTEN} {clients}"),
                unit="msg/s",
                against="with the writes stubbed out",
                ratio=ratio,
                target="" if target is None else f">= {target}x",
                reached=None if target is None else ratio >= target,
            )
        )
