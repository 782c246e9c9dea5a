"""The scale of several proxies on one machine, in processor time: forwarded pops, and two workers.

Proxies, RabbitMQ, Redis and the clients share the cores here, so rates would show what is left to the proxies. The
processor time of the proxies for a message is a figure of the proxies alone. Both kinds of rounds take turns.

Two workers are as fast as the busier of them. So they could serve, on two cores of their own, as many times more
messages than one worker as this one worker needs more processor time than the busier of the two.
"""

import asyncio
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from bench import load
from bench.report import Rates, Report, Row
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

ROUNDS = 7
FORWARDED = {1: 4_000, 32: 30_000}
"""Number of messages of a round, by batch size."""
FORWARDED_TARGET = 1.3
WORKERS_MESSAGES, WORKERS_BATCH, WORKERS_CLIENTS, WORKERS_QUEUES = 60_000, 32, 16, 8
WORKERS_TARGET = 1.6
START_SECONDS = 30.0
LOCAL, REMOTE = "local", "forwarded"
ONE, TWO, BALANCE, CLIENTS = "one worker", "two workers", "balance", "clients"


def rows(report: Report, folder: Path, rabbitmq: RabbitNode, scale: float) -> None:
    """Add all rows of this module."""
    with RedisServer(folder / "redis-scale") as redis:
        _forwarding_rows(report, folder / "scale-forwarding", rabbitmq, redis, scale)
        _worker_rows(report, folder / "scale-workers", rabbitmq, redis, scale)


def _forwarding_rows(report: Report, folder: Path, rabbitmq: RabbitNode, redis: RedisServer, scale: float) -> None:
    """Add the processor time of both proxies for messages that are popped at the owner, and at the other proxy."""
    times = Rates()
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis, size=2) as cluster:
        load.make_topic(cluster.proxies[0], 1)
        wait_until(lambda: _owner(cluster) is not None, timeout_seconds=START_SECONDS, what="an owner")
        owner = _owner(cluster)
        assert owner is not None, "it was waited for"
        (other,) = (one for one in cluster.proxies if one is not owner)
        for number in range(ROUNDS):
            for batch, count in FORWARDED.items():
                total = int(count * scale)
                for name, at in _in_turn(number, ((LOCAL, owner), (REMOTE, other))):
                    asyncio.run(load.fill(owner.port, total=total))
                    used = _drained(cluster.proxies, at.port, total, batch)
                    times.note(f"{name} {batch}", 1e6 * sum(used) / total)
    for batch in FORWARDED:
        report.add(Row(name=_forwarded(batch, LOCAL), value=times.median(f"{LOCAL} {batch}"), unit="us"))
        ratio = times.ratio(f"{REMOTE} {batch}", f"{LOCAL} {batch}")
        report.add(
            Row(
                name=_forwarded(batch, REMOTE),
                value=times.median(f"{REMOTE} {batch}"),
                unit="us",
                against=LOCAL,
                ratio=ratio,
                target=f"<= {FORWARDED_TARGET}x",
                reached=ratio <= FORWARDED_TARGET,
            )
        )


def _forwarded(batch: int, how: str) -> str:
    return f"cluster: processor time of a message, batch {batch}, {how}"


def _owner(cluster: ProxyCluster) -> ProxyProcess | None:
    """Return the proxy that owns the only queue, in the view of all proxies."""
    views = [proxy.client.get("/v1/admin/cluster").raise_for_status().json() for proxy in cluster.proxies]
    owners = {queue["owner"] for view in views for queue in view["queues"]}
    named = {view["instance"]: proxy for view, proxy in zip(views, cluster.proxies, strict=True)}
    return named.get(owners.pop()) if len(owners) == 1 else None


def _worker_rows(report: Report, folder: Path, rabbitmq: RabbitNode, redis: RedisServer, scale: float) -> None:
    """Add the processor time for messages of one worker, and of the busier one of two."""
    times, total = Rates(), int(WORKERS_MESSAGES * scale)
    with ExitStack() as stack:
        proxies = {
            name: stack.enter_context(_started(folder / f"{count}", rabbitmq, redis, count))
            for name, count in ((ONE, 1), (TWO, 2))
        }
        for number in range(ROUNDS):
            for name, proxy in _in_turn(number, (*proxies.items(),)):
                asyncio.run(load.fill(proxy.port, total=total))
                before = _own_seconds()
                used = _drained([proxy], proxy.port, total, WORKERS_BATCH, clients=WORKERS_CLIENTS)
                times.note(name, 1e6 * max(used) / total)
                if name == TWO:
                    times.note(BALANCE, 1e6 * sum(used) / total)
                    times.note(CLIENTS, 1e6 * (_own_seconds() - before) / total)
    name = f"cluster: processor time of a message, batch {WORKERS_BATCH}"
    report.add(Row(name=f"{name}, one worker", value=times.median(ONE), unit="us"))
    report.add(Row(name=f"{name}, both of two workers", value=times.median(BALANCE), unit="us"))
    report.add(Row(name=f"{name}, the clients", value=times.median(CLIENTS), unit="us"))
    gain = times.ratio(ONE, TWO)
    report.add(
        Row(
            name=f"{name}, the busier of two workers",
            value=times.median(TWO),
            unit="us",
            against="faster than one worker",
            ratio=gain,
            target=f">= {WORKERS_TARGET}x",
            reached=gain >= WORKERS_TARGET,
        )
    )


@contextmanager
def _started(folder: Path, rabbitmq: RabbitNode, redis: RedisServer, workers: int) -> Iterator[ProxyProcess]:
    vhost = f"scale-{workers}"
    rabbitmq.add_vhost(vhost)
    flags = ["--amqp-url", rabbitmq.amqp_url(vhost), "--redis-url", redis.url(), "--redis-namespace", vhost]
    with ProxyProcess(folder, *flags, "--workers", f"{workers}") as proxy:
        load.make_topic(proxy, WORKERS_QUEUES)
        wait_until(lambda: _is_even(proxy, workers), timeout_seconds=START_SECONDS, what="an even share of the queues")
        yield proxy


def _is_even(proxy: ProxyProcess, workers: int) -> bool:
    queues = proxy.client.get("/v1/admin/cluster").raise_for_status().json()["queues"]
    owners = [queue["owner"] for queue in queues if queue["owner"] is not None]
    return len(owners) == WORKERS_QUEUES and len({*owners}) == workers


def _drained(proxies: Sequence[ProxyProcess], port: int, total: int, batch: int, *, clients: int = 8) -> list[float]:
    """Pop and ack ``total`` messages, and return the processor time of each process that serves, in seconds."""
    processes = [process for proxy in proxies for process in _serving(proxy)]
    before = [_seconds(process) for process in processes]
    asyncio.run(load.drain(port, total=total, batch=batch, clients=clients))
    return [_seconds(process) - earlier for process, earlier in zip(processes, before, strict=True)]


def _serving(proxy: ProxyProcess) -> list[psutil.Process]:
    """Return the workers of a proxy, or the process of a proxy without workers."""
    process = psutil.Process(proxy.pid)
    return process.children() or [process]


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _in_turn(number: int, rounds: Sequence[tuple[str, ProxyProcess]]) -> Sequence[tuple[str, ProxyProcess]]:
    """Return the rounds in turning order, because the first one of a pair may be slower."""
    return rounds if number % 2 else rounds[::-1]
