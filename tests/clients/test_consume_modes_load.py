"""Consumers change over between pop and pull under load: nothing is lost, and order is kept."""

import random
import time
from collections import Counter

import pytest

from support.consumer_load import GROUP, assert_only_cuts_doubled, modes, switched, under_load, work_goes_on
from support.proxy import ProxyProcess

DRAIN_SECONDS = 30
CONSUMERS = 3


def test_switches_that_drain_lose_nothing_and_nothing_comes_twice(
    killable_proxy: ProxyProcess, topic: str, full_run: bool
) -> None:
    with under_load([killable_proxy.url] * CONSUMERS, topic) as (client, record, consumers):
        for mode in modes(20 if full_run else 4):
            switched(client, topic, mode, consumers, DRAIN_SECONDS)
            work_goes_on(record, consumers, mode)
    assert [one for one, count in Counter(record.ended).items() if count > 1] == []
    assert record.doubled_at_once == []
    assert sum(consumer.counters.leases_lost for consumer in consumers) == 0
    assert min(consumer.counters.mode_changes for consumer in consumers) >= 3
    assert min(consumer.counters.handled for consumer in consumers) > 0


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_switches_at_once_over_proxies_that_end_lose_nothing_and_keep_the_order(
    killable_proxy: ProxyProcess, topic: str, full_run: bool, seed: int, ending: str
) -> None:
    if ending == "stop" and not full_run:
        pytest.skip("the short run kills")
    chance = random.Random(seed)
    with under_load([killable_proxy.url] * CONSUMERS, topic) as (client, record, consumers):
        for mode in modes(20 if full_run else 2):
            client.set_consume_mode(topic, GROUP, mode, drain_timeout_seconds=0)
            time.sleep(chance.uniform(0, 0.3))  # anywhere in the change, and beside it
            getattr(killable_proxy, ending)()
            killable_proxy.start()
            switched(client, topic, mode, consumers, 0)
            work_goes_on(record, consumers, mode)
    assert_only_cuts_doubled(record, consumers)
