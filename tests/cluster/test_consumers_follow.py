"""Consumers at several proxies of a cluster follow the consume mode while proxies are killed during the change."""

import random
import time
from pathlib import Path

from support.consumer_load import GROUP, assert_only_cuts_doubled, modes, switched, under_load, work_goes_on
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

SIZE = 3


def test_consumers_change_over_while_proxies_are_killed_and_nothing_is_lost(
    rabbitmq: RabbitNode, redis_server: RedisServer, tmp_path: Path, seed: int, full_run: bool
) -> None:
    """Consumers whose own proxy is gone continue when it is back, too. Drains are long enough, so only deaths cut
    leases off.
    """
    chance = random.Random(seed)
    with ProxyCluster(tmp_path, "--auto-create", "true", nodes=(rabbitmq,), redis=redis_server, size=SIZE) as cluster:
        urls = [proxy.url for proxy in cluster.proxies]
        with under_load(urls, "orders") as (client, record, consumers):
            work_goes_on(record, consumers, "pop")
            for mode in modes(20 if full_run else 2):
                victim = cluster.proxies[chance.randrange(SIZE)]
                client.set_consume_mode("orders", GROUP, mode, drain_timeout_seconds=30)
                time.sleep(chance.uniform(0, 0.3))  # anywhere in the change, and outside it
                victim.kill()
                time.sleep(chance.uniform(0, 1))
                victim.start()
                switched(client, "orders", mode, consumers, 30)
                work_goes_on(record, consumers, mode)
    assert_only_cuts_doubled(record, consumers)
