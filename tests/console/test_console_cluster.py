"""The console of a cluster on RabbitMQ: every proxy shows all proxies, their queues, and the rates of all together."""

import re
from pathlib import Path

from playwright.sync_api import Browser, expect

from support.console import opened_console
from support.console_load import bury, make_group, publish
from support.proxy_cluster import ProxyCluster, instance
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

NOWHERE = "http://guest:guest@127.0.0.1:1/"
"""A management API that does not exist."""


def test_each_proxy_of_a_cluster_shows_the_whole_cluster(
    browser: Browser, tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer
) -> None:
    flags = ("--replica-keeper", "true", "--replica-commands", "none", "--management-url", NOWHERE)
    cluster = ProxyCluster(tmp_path, *flags, nodes=(rabbitmq,), redis=redis_server, size=2)
    with cluster:
        here, there = cluster.proxies
        make_group(here, "orders", "billing", queues=4)
        bury(there, "orders", ["dead"], "no", "billing")
        with opened_console(browser, here.url) as console:
            page = console.page
            console.open("cluster")
            proxies = page.get_by_role("table", name="Proxies")
            for proxy in cluster.proxies:
                row = proxies.get_by_role("row", name=instance(proxy))
                expect(row.get_by_role("cell", name="owns queues")).to_be_visible()
                expect(row.get_by_role("cell", name="2", exact=True).first).to_be_visible()
            assert console.violations() == []
            console.go("", "Overview")
            published = page.get_by_role("img", name="Published: now")
            expect(published).to_be_visible()
            publish(there, "orders", [f"message {number}" for number in range(100)])
            expect(published).to_have_attribute("aria-label", re.compile("at most [1-9]"))
            console.go("topics/orders/billing", "orders/billing")
            queues = page.get_by_role("table", name="Queues of the group")
            for proxy in cluster.proxies:
                expect(queues.get_by_text(instance(proxy)).first).to_be_visible()
            console.go("topics/orders/billing/dead-letters", "orders/billing")
            expect(page.get_by_text("1 letter, the oldest first")).to_be_visible()
            console.go("replicas", "Replicas")
            expect(page.get_by_text("The replicas can't be read: The broker can't be reached.")).to_be_visible()
            expect(page.get_by_text("give its management API with --management-url")).to_be_visible()
            expect(page.get_by_text("Check that RabbitMQ is up")).to_be_visible()
            assert console.violations() == []
            console.go("checks", "Checks")
            page.get_by_role("button", name="Run the doctor").click()
            expect(page.get_by_text("Not looked at")).to_be_visible()
            page.get_by_text("Not looked at").click()
            expect(page.get_by_text("--management-url").first).to_be_visible()
            findings = page.get_by_role("list", name="Findings").get_by_role("listitem")
            expect(findings.filter(has_text="redis-append-sync")).to_contain_text("CONFIG SET appendfsync always")
            assert console.violations() == []
