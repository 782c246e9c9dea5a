"""The scale of several proxies on one machine, in processor time: forwarded pops, and two workers.

Proxies, RabbitMQ, Redis and the clients share the cores here, so rates would show what is left to the proxies. The
processor time of the proxies for a message is a figure of the proxies alone. All kinds of rounds take turns.

Two workers are as fast as the busier of them. So they could serve, on two cores of their own, as many times more
messages than one worker as this one worker needs more processor time than the busier of the two. But on two cores, two
busy workers also compete with RabbitMQ, Redis and the clients for the caches, which makes each message dearer than on
cores of their own. So they are compared with two proxies that do the same work at the same time and share nothing.
"""

import asyncio
import resource
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

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
FORWARDED_CLIENTS = 8
WORKERS_MESSAGES, WORKERS_BATCH, WORKERS_QUEUES = 60_000, 32, 8
WORKERS_CLIENTS = 8
"""Number of clients of each worker."""
WORKERS_TARGET = 1.6
START_SECONDS = 30.0
LOCAL, REMOTE = "local", "forwarded"
ONE, TWO, APART, CLIENTS = "one worker", "two workers", "two proxies", "clients"
T = TypeVar("T")


class Share(NamedTuple):
    """How many messages of a round one proxy serves, and to how many clients."""

    total: int
    clients: int


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
                    used = _drained(cluster.proxies, {at: Share(total, FORWARDED_CLIENTS)}, batch)
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
    """Add the processor time for messages of one worker, of two workers, and of two separate proxies."""
    times, total = Rates(), int(WORKERS_MESSAGES * scale)
    half = Share(total // 2, WORKERS_CLIENTS)
    with ExitStack() as stack:

        def start(name: str, workers: int) -> ProxyProcess:
            return stack.enter_context(_started(folder / name, rabbitmq, redis, name, workers))

        first, second, both = start("scale-first", 1), start("scale-second", 1), start("scale-both", 2)
        kinds: dict[str, dict[ProxyProcess, Share]] = {
            ONE: {first: Share(total, WORKERS_CLIENTS)},
            TWO: {both: Share(total, 2 * WORKERS_CLIENTS)},
            APART: {first: half, second: half},
        }
        for number in range(ROUNDS):
            for name, shares in _in_turn(number, [*kinds.items()]):
                for proxy, (count, _) in shares.items():
                    asyncio.run(load.fill(proxy.port, total=count))
                before = _own_seconds()
                used = _drained([*shares], shares, WORKERS_BATCH)
                times.note(name, 1e6 * max(used) / total)
                times.note(f"{CLIENTS} {name}", 1e6 * (_own_seconds() - before) / total)
    name = f"cluster: processor time of a message, batch {WORKERS_BATCH}"
    report.add(Row(name=f"{name}, one worker", value=times.median(ONE), unit="us"))
    report.add(Row(name=f"{name}, the clients", value=times.median(f"{CLIENTS} {TWO}"), unit="us"))
    busier = f"{name}, the busier of two"
    report.add(
        Row(
            name=f"{busier} workers",
            value=times.median(TWO),
            unit="us",
            against="faster than one worker",
            ratio=times.ratio(ONE, TWO),
        )
    )
    gain = 2 * times.ratio(APART, TWO)
    report.add(
        Row(
            name=f"{busier} separate proxies",
            value=times.median(APART),
            unit="us",
            against="two workers are faster than half of them",
            ratio=gain,
            target=f">= {WORKERS_TARGET}x",
            reached=gain >= WORKERS_TARGET,
        )
    )


@contextmanager
def _started(
    folder: Path, rabbitmq: RabbitNode, redis: RedisServer, vhost: str, workers: int
) -> Generator[ProxyProcess]:
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


def _drained(proxies: Sequence[ProxyProcess], shares: Mapping[ProxyProcess, Share], batch: int) -> list[float]:
    """Pop and ack the shares at once. Return the processor time of each process of ``proxies``, in seconds."""
    processes = [process for proxy in proxies for process in _serving(proxy)]
    before = [_seconds(process) for process in processes]
    asyncio.run(_drain(shares, batch))
    return [_seconds(process) - earlier for process, earlier in zip(processes, before, strict=True)]


async def _drain(shares: Mapping[ProxyProcess, Share], batch: int) -> None:
    await asyncio.gather(
        *(
            load.drain(proxy.port, total=total, batch=batch, clients=clients)
            for proxy, (total, clients) in shares.items()
        )
    )


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


def _in_turn(number: int, rounds: Sequence[tuple[str, T]]) -> Sequence[tuple[str, T]]:
    """Return the rounds in turning order, because the first one may be slower."""
    return rounds if number % 2 else rounds[::-1]
