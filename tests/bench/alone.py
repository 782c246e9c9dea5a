"""The engine and the embedded store alone, without HTTP: the rate single pops could reach if the rest cost nothing.

python alone.py BATCH TOTAL prints messages a second, popped and acked by 8 workers
"""

import asyncio
import sys
import tempfile
import time

from popgate import bootstrap, config
from popgate.engine.lease.pop_request import PopRequest, Presence
from popgate.engine.publish.publishing import NewMessage
from popgate.engine.settle.orders import SettleOrder, Verb
from popgate.runtime.background import Background
from popgate.runtime.faults import Faults

WORKERS = 8
BODY = b"x" * 1024
TOPIC, GROUP = "bench", "default"


def _failed(error: BaseException) -> None:
    raise SystemExit(f"a background task failed: {error!r}")


async def measure(batch: int, total: int) -> float:
    """Return messages a second."""
    with tempfile.TemporaryDirectory(prefix="popgate-bench-") as folder:
        options = config.serve_options({"data_dir": folder}, {}, None)
        async with bootstrap.started(options, Background(_failed), Faults()) as proxy:
            engine = proxy.engine
            for start in range(0, total, 256):
                await engine.publish(TOPIC, [NewMessage(BODY, {})] * min(256, total - start))
            left = total

            async def work() -> None:
                nonlocal left
                request = PopRequest(max_messages=batch, wait_seconds=1.0, invisibility_seconds=600)
                while left > 0:
                    leased = await engine.pop(TOPIC, GROUP, request, Presence())
                    orders = [SettleOrder(one.receipt_handle) for one in leased]
                    results = await engine.settle(TOPIC, GROUP, Verb.ACK, orders)
                    assert all(result.status == "acked" for result in results)
                    left -= len(leased)

            started = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(WORKERS)))
            return total / (time.perf_counter() - started)


if __name__ == "__main__":
    print(asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]))))
