"""The cost of the state in Redis: memory a record, time a message in Redis and in the proxy.

python redis_state.py [RECORDS] prints a table; 1,000,000 records by default
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.dedup import RedisDedupStore
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
from popgate.domain.message import copy_id_minter
from popgate.domain.names import BrokerQueue, CopyId, GroupName, LeaseId, Subscription, TopicName
from popgate.ports.dedup import DedupEntry
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry
from support.redis import RedisServer

BATCH = 32
BATCHES_AT_ONCE = 8
QUEUE = BrokerQueue("popgate:orders:default:0")
SUBSCRIPTION = Subscription(TopicName("orders"), GroupName("default"))


class Bench:
    def __init__(self, connection: RedisConnection) -> None:
        self._redis = connection
        self.store = RedisLeaseStore(connection)
        self.dedup = RedisDedupStore(connection)
        self.epoch = 0

    async def grant(self, number: int, copies: Sequence[CopyId], attempt_id: str | None = None) -> None:
        request = GrantRequest(
            subscription=SUBSCRIPTION,
            lease_id=LeaseId(f"0123456789{number:x}"),
            entries=[GrantEntry(QUEUE, self.epoch, copy_id, 0) for copy_id in copies],
            invisibility_seconds=3_600.0,
            max_deliveries=16,
            mode_generation=1,
            attempt_id=attempt_id,
        )
        assert {answer.status for answer in await self.store.grant(request)} == {GrantStatus.GRANTED}

    async def ack(self, number: int, copies: Sequence[CopyId]) -> None:
        lease_id = LeaseId(f"0123456789{number:x}")
        entries = [SettleEntry(QUEUE, copy_id, lease_id, SettleAction.ACK) for copy_id in copies]
        assert {answer.status for answer in await self.store.settle(entries)} == {SettleStatus.DONE}

    async def used_memory(self) -> int:
        info: bytes = await self._redis.command("INFO", "memory")
        return int(info.split(b"used_memory:")[1].split()[0])

    async def redis_seconds(self) -> float:
        info: bytes = await self._redis.command("INFO", "commandstats")
        return (
            sum(int(line.split(b"usec=")[1].split(b",")[0]) for line in info.splitlines() if b"cmdstat_eval" in line)
            / 1e6
        )

    async def measure(
        self, what: str, batches: Sequence[Sequence[CopyId]], call: Callable[[int, Sequence[CopyId]], Awaitable[None]]
    ) -> None:
        """Call once a batch, some at a time, and print the time."""
        memory, redis_seconds = await self.used_memory(), await self.redis_seconds()
        started, cpu = time.perf_counter(), time.process_time()
        numbers = iter(range(len(batches)))

        async def work() -> None:
            for number in numbers:
                await call(number, batches[number])

        await asyncio.gather(*(work() for _ in range(BATCHES_AT_ONCE)))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        count = sum(map(len, batches))
        redis_seconds = await self.redis_seconds() - redis_seconds
        memory = await self.used_memory() - memory
        print(
            f"{what:28} {memory / count:8.0f} bytes {redis_seconds / count * 1e6:8.2f} us in Redis "
            f"{cpu / count * 1e6:8.2f} us in the proxy {count / wall:10,.0f} a second"
        )


async def main(records: int) -> None:
    with tempfile.TemporaryDirectory(prefix="popgate-bench-") as folder, RedisServer(Path(folder)) as server:
        connection = RedisConnection(parse_address(server.url()))
        bench = Bench(connection)
        bench.epoch = await bench.store.claim(QUEUE)
        mint = copy_id_minter(time.time)
        for batch in (BATCH, 1):
            total = records if batch == BATCH else records // 10
            batches = [[mint() for _ in range(batch)] for _ in range(total // batch)]
            print(f"batches of {batch}, {total:,} records")
            await bench.measure("leased", batches, bench.grant)
            await bench.measure("leased, then acked", batches, bench.ack)
            started = time.perf_counter()
            await bench.store.trim(QUEUE, settled_before=float("inf"), older_than_seconds=-1.0)
            print(f"{'trimmed':28} {(time.perf_counter() - started) / total * 1e6:8.2f} us")
        batches = [[mint() for _ in range(BATCH)] for _ in range(records // 10 // BATCH)]
        print(f"batches of {BATCH}")
        await bench.measure("with an attempt id", batches, lambda n, copies: bench.grant(n, copies, f"attempt-{n:08}"))

        def entries(copies: Sequence[CopyId]) -> list[DedupEntry]:
            return [DedupEntry(f"order-{copy_id[-8:]}", copy_id, copy_id, 0) for copy_id in copies]

        async def reserve(_: int, copies: Sequence[CopyId]) -> None:
            assert await bench.dedup.reserve(SUBSCRIPTION.topic, entries(copies), window_seconds=300.0) == {}

        await bench.measure("dedup ids reserved", batches, reserve)
        await bench.measure(
            "dedup ids confirmed", batches, lambda _, copies: bench.dedup.confirm(SUBSCRIPTION.topic, entries(copies))
        )
        started = time.perf_counter()
        loaded = await bench.store.load(QUEUE)
        seconds = time.perf_counter() - started
        print(f"{len(loaded):,} live records of a queue loaded in {seconds:.2f} s")
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
