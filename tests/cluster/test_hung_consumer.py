"""The short form of `make bench ARGS="--only modes"`: checks that it runs, and limits a hung consumer's effect on
others.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from bench import hanging, load, modes
from bench.report import Rates
from support.proxy import ProxyProcess

PLAN = hanging.Plan(seconds=7.0, hangs_at=1.0, rate=40, in_hand_max=12, invisibility_seconds=3.0)
SHARE = 0.01
Told = Callable[[str, object], None]


async def test_of_one_hung_consumer_pop_clients_notice_nothing_and_what_it_holds_comes_again_in_time(
    tmp_path: Path, amqp_url: str, record_property: Told
) -> None:
    session = ["--pull-session-seconds", f"{PLAN.invisibility_seconds:g}"]
    with ProxyProcess(tmp_path, "--amqp-url", amqp_url, *session) as proxy:
        runs = await asyncio.gather(*(hanging.measure(way, PLAN, proxy, amqp_url) for way in hanging.WAYS))
    pop, pull, silent, plain = (run.summary() for run in runs)
    record_property("told", f"one of four hangs: {pop}")
    assert pop.held == PLAN.in_hand_max
    assert pop.other_wait_seconds_max < PLAN.invisibility_seconds * 0.75, "a queue has waited for the hung consumer"
    assert pop.held_wait_seconds_max <= PLAN.invisibility_seconds + hanging.LATE_SECONDS_MAX
    assert pop.still_held == 0
    # For the other ways, the figures must show the hanging consumer, as the plot does.
    hung_seconds = PLAN.seconds - PLAN.hangs_at
    assert pull.other_wait_seconds_max > hung_seconds / 2
    assert pull.still_held == PLAN.in_hand_max
    assert silent.held > 0
    assert silent.still_held == 0
    assert plain.still_held == PLAN.in_hand_max
    assert plain.oldest_seconds_at_end > hung_seconds - 1.0


def test_the_benchmark_takes_and_settles_what_it_publishes_in_either_mode(tmp_path: Path) -> None:
    rates = Rates()
    with ProxyProcess(tmp_path) as proxy:
        load.make_topic(proxy, modes.LATENCY_QUEUES)
        for mode in modes.MODES:
            modes.note(rates, "embedded", proxy, mode, modes.LATENCY_QUEUES, SHARE)
            group = proxy.client.get("/v1/topics/bench/groups/default").json()
            assert (group["mode"], group["ready"], group["in_flight"]) == (mode, 0, 0)
            assert rates.median(f"embedded {mode}") > 0
            assert 0 < rates.median(f"embedded {mode} p50") <= rates.median(f"embedded {mode} p99")
