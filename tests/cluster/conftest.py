"""Shared parts of the process-level tests: the audit judges each of them, and most run on both brokers."""

import asyncio
import resource
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from support.audit import Audit, Lease, Verb, now
from support.audit_client import Client, until
from support.audit_load import Habits, Load
from support.audit_rules import explain, judge
from support.audit_told import tell
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitCluster, RabbitNode
from support.rabbitmq_releases import RabbitRelease

RETURN_SECONDS = 20.0
"""Maximum seconds until a message comes again, on a busy machine."""
OWN_VHOST = "cluster"


@pytest.fixture(params=["embedded", "rabbitmq"])
def broker_flags(request: pytest.FixtureRequest) -> Sequence[str]:
    """Return the flags of `popgate serve` that choose the broker; on RabbitMQ the records are in the embedded state."""
    if request.param == "embedded":
        return []
    return ["--amqp-url", str(request.getfixturevalue("amqp_url"))]


@pytest.fixture(scope="module")
def module_node(tmp_path_factory: pytest.TempPathFactory, rabbitmq_release: RabbitRelease) -> Iterator[RabbitNode]:
    with RabbitCluster(tmp_path_factory.mktemp("own-rabbitmq"), release=rabbitmq_release) as cluster:
        yield cluster.nodes[0]


@pytest.fixture
def own_node(module_node: RabbitNode) -> Iterator[RabbitNode]:
    """A node that the test may stop, kill and set alarms on, with an empty virtual host `OWN_VHOST`."""
    module_node.add_vhost(OWN_VHOST)
    yield module_node
    module_node.start()
    module_node.delete_vhost(OWN_VHOST)


# ---------------------------------------------------------------- a cluster at work


@asynccontextmanager
async def at_work(cluster: ProxyCluster, audit: Audit, seed: int, habits: Habits) -> AsyncGenerator[list[Load]]:
    """Run a load through each proxy."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(proxy.url, audit)) for proxy in cluster.proxies]
        await clients[0].create(queues=7)
        yield [
            await stack.enter_async_context(Load(client, f"{seed}", habits, name=f"{number}"))
            for number, client in enumerate(clients)
        ]


async def drain(loads: list[Load], *, timeout_seconds: float = 90.0) -> None:
    """Stop publishing, and return when nothing is left."""
    for load in loads:
        load.stop_publishing()
    await asyncio.gather(*(load.drain(timeout_seconds=timeout_seconds) for load in loads))


def limit_file_size(proxy: ProxyProcess, size: int) -> None:
    """Keep the living process from writing a file beyond `size` bytes, as if its disk was full."""
    resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---------------------------------------------------------------- judging


def assert_kept(audit: Audit, *, drained: bool = False) -> None:
    """Assert that every promise so far was kept."""
    violations = judge(audit, drained=drained)
    assert not violations, explain(violations)


def assert_no_traceback(proxy: ProxyProcess) -> None:
    """Assert that the proxy had no unforeseen error, over all its starts."""
    log = (proxy.folder / "output.log").read_text(errors="replace")
    at = log.find("Traceback")
    assert at < 0, log[max(0, at - 500) : at + 4000]


async def ack_those_alive(client: Client, leases: Sequence[Lease]) -> int:
    """Ack leases; return how many of them were certainly live. Those must be acked, whatever the faults."""
    statuses = await client.settle_surely(Verb.ACK, leases)
    answered = now()
    alive = [status for lease, status in zip(leases, statuses, strict=True) if answered < lease.ends_at]
    assert set(alive) <= {"acked"}, alive
    return len(alive)


async def come_again(audit: Audit, leases: Sequence[Lease]) -> None:
    """Return when another client has got each of these messages, except those whose ttl is over. The audit checks
    that this was not before the leases ended.
    """

    def is_missing(lease: Lease) -> bool:
        history = audit.histories[lease.message_id]
        kept_until = history.publish.is_kept_until if history.publish is not None else float("inf")
        # Compare with the answer: a pop that was sent before this lease's pop may have waited for the message.
        came_again = any(other.answered > lease.answered for other in history.leases)
        return not came_again and now() < kept_until

    def missing() -> list[str]:
        return [lease.message_id for lease in leases if is_missing(lease)]

    latest = max(lease.ends_at for lease in leases)
    await until(
        lambda: not missing(),
        timeout_seconds=max(0.0, latest - now()) + RETURN_SECONDS,
        what=lambda: "unacked messages to come again: " + "\n".join(tell(audit, one) for one in missing()[:3]),
    )


def report(what: str, audit: Audit, **more: object) -> None:
    """Print the run's figures, for users of the full counts."""
    figures = {**audit.figures(), **more}
    print(f"\n{what}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))  # noqa: T201 - the result
