"""A backlog of any length costs the proxy no more memory than `--buffer-bytes-max`, with any pollers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import httpx
import orjson
import psutil
import pytest

from support.audit import now
from support.proxy import ProxyProcess

COUNT, COUNT_FULL = 30_000, 1_000_000
BODY = "0123456789abcdef" * 64
BATCH_COUNT = 256
PUBLISHERS = 4
MIB = 1 << 20
BUFFER_BYTES_MAX, BUFFER_BYTES_MAX_FULL = 8 * MIB, 16 * MIB
HOARDED, HOARDED_FULL = 16_384, 32_768
LEASE_BYTES_MAX = 1_024
"""Maximum bytes of a lease in addition to the payload."""
EMBEDDED_CACHES_BYTES = 40 * MIB
"""The embedded store caches 32 MiB of pages and 8 MiB of records, in addition to the buffer."""
GROUP = "/v1/topics/backlog/groups/default"
POLLERS = 16
POLL_PAUSE_SECONDS = 0.2
WATCH_SECONDS, WATCH_SECONDS_FULL = 4.0, 60.0
WARM_ROUNDS, WARM_ROUNDS_FULL = 30, 60
FILL_TIMEOUT_SECONDS = 1_200.0


@asynccontextmanager
async def http_of(proxy: ProxyProcess) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False) as http:
        yield http


async def create(http: httpx.AsyncClient, topic: str) -> None:
    for path in (f"/v1/admin/topics/{topic}", f"/v1/admin/topics/{topic}/groups/default"):
        answer = await http.put(path, json={"queues": 2} if path.endswith(topic) else {"max_deliveries": None})
        assert answer.is_success, answer.text


async def publish(http: httpx.AsyncClient, topic: str, count: int) -> int:
    """Publish one batch; return how many are stored. Waits while the broker is overloaded."""
    content = orjson.dumps({"messages": [{"body": BODY}] * count})
    answer = await http.post(f"/v1/topics/{topic}/messages", content=content)
    if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
        await asyncio.sleep(int(answer.headers["retry-after"]))
        return 0
    assert answer.is_success, answer.text
    return sum(result["status"] == "published" for result in answer.json()["results"])


async def fill(http: httpx.AsyncClient, count: int) -> None:
    left = count

    async def work() -> None:
        nonlocal left
        while left > 0:
            batch = min(BATCH_COUNT, left)
            left -= batch
            stored = await publish(http, "backlog", batch)
            left += batch - stored

    async with asyncio.timeout(FILL_TIMEOUT_SECONDS), asyncio.TaskGroup() as tasks:
        for _ in range(PUBLISHERS):
            tasks.create_task(work())


async def pop_and_ack(http: httpx.AsyncClient, topic: str, count: int) -> int:
    """Pop once; return how many messages came, all of them acked."""
    group = f"/v1/topics/{topic}/groups/default"
    popped = await http.post(f"{group}/pop", json={"max_messages": count, "wait_seconds": 5})
    assert popped.is_success, popped.text
    handles = [message["receipt_handle"] for message in popped.json()["messages"]]
    if handles:
        acked = await http.post(f"{group}/ack", json={"receipt_handles": handles})
        assert {result["status"] for result in acked.json()["results"]} == {"acked"}
    return len(handles)


async def warm_up(http: httpx.AsyncClient, rounds: int) -> None:
    """Let the process do everything a few times, so that later growth is due to the backlog."""
    await create(http, "warm")
    for _ in range(rounds):
        left = await publish(http, "warm", BATCH_COUNT)
        while left > 0:  # a publish without an answer may have been stored, too
            left -= await pop_and_ack(http, "warm", BATCH_COUNT)


class Peak:
    """The largest resident memory of a process, above the initial amount."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._process = psutil.Process(proxy.pid)
        self.before: int = self._process.memory_info().rss
        self.grown = 0

    def look(self) -> None:
        self.grown = max(self.grown, self._process.memory_info().rss - self.before)


async def poll_idly(http: httpx.AsyncClient, peak: Peak, seconds: float) -> int:
    """Run pollers that take one message now and then; return how many they took."""
    watch_until = now() + seconds
    counts: list[int] = []

    async def poll() -> None:
        while now() < watch_until:
            counts.append(await pop_and_ack(http, "backlog", 1))
            peak.look()
            await asyncio.sleep(POLL_PAUSE_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(POLLERS):
            tasks.create_task(poll())
    return sum(counts)


async def hoard(http: httpx.AsyncClient, peak: Peak, count: int) -> list[str]:
    """Lease that many messages without settling them; return their receipt handles."""
    handles: list[str] = []
    async with asyncio.timeout(FILL_TIMEOUT_SECONDS):
        while len(handles) < count:
            asked = {"max_messages": BATCH_COUNT, "wait_seconds": 10, "invisibility_seconds": 3_600}
            popped = await http.post(f"{GROUP}/pop", json=asked)
            assert popped.is_success, popped.text
            handles += [message["receipt_handle"] for message in popped.json()["messages"]]
            peak.look()
    return handles


@pytest.mark.crash
async def test_a_long_backlog_costs_no_more_than_the_buffer(
    broker_flags: Sequence[str], tmp_path: Path, full_run: bool
) -> None:
    """With idle pollers; and with leases that hold far more than the buffer, whose bodies are dropped."""
    if not broker_flags and not full_run:
        pytest.skip("the short run asks this of RabbitMQ only")
    count = COUNT_FULL if full_run else COUNT
    buffer_bytes_max = BUFFER_BYTES_MAX_FULL if full_run else BUFFER_BYTES_MAX
    data_folder = tmp_path / "data"
    began = now()
    with ProxyProcess(tmp_path / "filler", *broker_flags, data_folder=data_folder) as filler:
        async with http_of(filler) as http:
            await create(http, "backlog")
            await fill(http, count)
        await asyncio.to_thread(filler.stop)
    filled = now()
    flags = [*broker_flags, "--buffer-bytes-max", f"{buffer_bytes_max}"]
    with ProxyProcess(tmp_path / "proxy", *flags, data_folder=data_folder) as proxy:
        async with http_of(proxy) as http:
            await warm_up(http, WARM_ROUNDS_FULL if full_run else WARM_ROUNDS)
            peak = Peak(proxy)
            popped = await poll_idly(http, peak, WATCH_SECONDS_FULL if full_run else WATCH_SECONDS)
            idle = peak.grown
            state = (await http.get(GROUP)).json()
            hoarded = await hoard(http, peak, HOARDED_FULL if full_run else HOARDED)
            leased = (await http.get(GROUP)).json()
            peak.look()
    print(  # noqa: T201 - the result
        f"\n{count} messages filled in {filled - began:.0f} s; RSS {peak.before / MIB:.1f} MiB; "
        f"grown by {idle / MIB:.1f} MiB with idle pollers that took {popped}, "
        f"by {peak.grown / MIB:.1f} MiB with {len(hoarded)} leases"
    )
    assert state["ready"] + popped >= count  # an overloaded RabbitMQ may have stored messages that it did not confirm
    assert leased["in_flight"] == len(hoarded)
    assert idle <= buffer_bytes_max
    caches = 0 if broker_flags else EMBEDDED_CACHES_BYTES
    assert peak.grown <= buffer_bytes_max + len(hoarded) * LEASE_BYTES_MAX + caches
