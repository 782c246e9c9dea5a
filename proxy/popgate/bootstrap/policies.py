"""While a proxy runs, checks whether RabbitMQ has policies that endanger messages. This requires RabbitMQ's management
API."""

import asyncio
import importlib
import random
from collections.abc import Iterator

from popgate.config import ServeOptions
from popgate.domain.names import BrokerQueue
from popgate.engine.engine import Engine

JITTER = 0.8, 1.2


async def watch_policies(options: ServeOptions, vhost: str, engine: Engine) -> None:
    """Check RabbitMQ's policies about every ``policy_check_seconds``. Never returns."""

    async def rest() -> None:
        await asyncio.sleep(options.policy_check_seconds * random.uniform(*JITTER))

    def own_queues() -> Iterator[BrokerQueue]:
        for served in engine.topics.served.values():
            layout = served.layout
            yield from (layout.dead,) if layout.adopted else (*layout.queues, layout.dead)

    await rest()
    # This import is slow. On the event loop, it would delay the requests that are already served.
    await asyncio.to_thread(importlib.import_module, "popgate.adapters.doctor.policy_watch")
    from popgate.adapters.doctor.policy_watch import PolicyWatch
    from popgate.adapters.replicas.management import Management

    management = Management(options.management_urls, vhost)
    watch = PolicyWatch(management, vhost, own_queues)
    try:
        while True:
            await watch.look()
            await rest()
    finally:
        await management.close()
