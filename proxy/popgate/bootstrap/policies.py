"""Checks for policies that endanger messages while a proxy runs, if RabbitMQ's management API can be reached."""

import asyncio
import importlib
import random
from collections.abc import Iterator

from popgate.config import ServeOptions
from popgate.domain.names import BrokerQueue
from popgate.engine.engine import Engine

JITTER = 0.8, 1.2


async def watch_policies(options: ServeOptions, vhost: str, engine: Engine) -> None:
    """Check every ``policy_check_seconds``, approximately. Never returns."""

    async def rest() -> None:
        await asyncio.sleep(options.policy_check_seconds * random.uniform(*JITTER))

    def own_queues() -> Iterator[BrokerQueue]:
        for served in engine.topics.served.values():
            layout = served.layout
            yield from (layout.dead,) if layout.adopted else (*layout.queues, layout.dead)

    await rest()
    # A slow import while requests are already served must not run on the event loop.
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
