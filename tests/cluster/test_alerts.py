"""Each alert rule fires at a real fault, and not before it, in a Prometheus that scrapes real proxies.

A minute of the rules is a second of this test: Prometheus scrapes and evaluates every second, and the durations of the
rules (`for: 5m`, `[10m]`) are shortened to seconds.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from contract.http_server import Topic, put
from popgate.prover.relay import Relay
from support.certificates import MemoryAuthority, write
from support.poisoned_proxy import poisoned_program
from support.processes import PortBlock, wait_until
from support.prometheus import REPOSITORY, RULES, Prometheus, promtool
from support.proxy import POPGATE, ProxyProcess
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

FIRES_SECONDS = 60
"""Maximum seconds until an alert fires, on a busy machine."""
SHORTER = {
    "PopgateOldestMessageTooOld": ("> 600", "> 10"),
    "PopgateBacklogUnread": ("> 300", "> 5"),
}
"""Thresholds in seconds that are part of an expression."""
FROM_THE_START = {"PopgateCertificateEnds"}
"""The certificate of the proxy with TLS ends in five days."""
OF_A_BUSY_MACHINE = {"PopgateDown", "PopgateEventLoopLate"}
READ_OFTEN = ("--metrics-read-seconds", "0.5")


def quick_rules() -> dict[str, Any]:
    """Return the rules with seconds in place of minutes."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for rule in all_rules(rules):
        if rule["alert"] in SHORTER:
            old, new = SHORTER[rule["alert"]]
            assert old in rule["expr"]
            rule["expr"] = rule["expr"].replace(old, new)
        rule["expr"] = re.sub(r"\[(\d+)m\]", r"[\1s]", rule["expr"])
        if "for" in rule:
            rule["for"] = re.sub(r"^(\d+)m$", r"\1s", rule["for"])
    return rules


def all_rules(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"]]


class Site:
    """Proxies that are about to have faults, and the Prometheus that scrapes them."""

    def __init__(self, folder: Path, node: RabbitNode, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.lone = self._proxy("lone")
        self.poisoned = self._proxy("poisoned", program=poisoned_program("wherever its dead letter is made"))
        authority = MemoryAuthority()
        self.certificate, self.key = write(folder, *authority.issue(valid_for=timedelta(days=5)))
        self.tls = ProxyProcess(
            folder / "tls",
            "--tls-certificate-file",
            str(self.certificate),
            "--tls-key-file",
            str(self.key),
            *READ_OFTEN,
        )
        self.tls.launch()  # it is never ready for the plain client
        stack.callback(self.tls.close)
        self.redis = stack.enter_context(RedisServer(folder / "redis"))
        self.node, self.vhost = node, stack.enter_context(node.own_vhost("alerts"))
        shared = ("--amqp-url", node.amqp_url(self.vhost), "--redis-url", self.redis.url())
        self.owner = self._proxy("owner", *shared)
        self.front = self._proxy("front", *shared, "--owns-queues", "false")
        self.relay = Relay(node.amqp_url(stack.enter_context(node.own_vhost("alerts"))), lambda _: None)
        self.cut_off = self._proxy("cut-off", "--amqp-url", self.relay.url)
        self.prometheus = stack.enter_context(Prometheus(folder / "prometheus", self._jobs(), quick_rules()))

    def _proxy(self, name: str, *flags: str, program: tuple[str, ...] | None = None) -> ProxyProcess:
        proxy = ProxyProcess(self._folder / name, *flags, *READ_OFTEN, program=program or POPGATE)
        return self._stack.enter_context(proxy)

    def _jobs(self) -> list[dict[str, Any]]:
        plain = [self.lone, self.poisoned, self.owner, self.front, self.cut_off]
        return [
            {"job_name": "popgate", "static_configs": [{"targets": [f"127.0.0.1:{one.port}" for one in plain]}]},
            {
                "job_name": "popgate-tls",
                "scheme": "https",
                "tls_config": {"insecure_skip_verify": True},
                "static_configs": [{"targets": [f"127.0.0.1:{self.tls.port}"]}],
            },
        ]

    def topic(self, proxy: ProxyProcess, name: str, **policy: object) -> Topic:
        topic = Topic(proxy.client, name)
        put(proxy.client, topic.admin_path, {"queues": 1})
        put(proxy.client, f"{topic.admin_path}/groups/default", policy)
        return topic

    def knows(self, topic: Topic) -> None:
        """Wait until Prometheus has scraped the rows of a topic: it sees growth only from there on."""
        row = f'popgate_events_total{{topic="{topic.name}",kind="dead_lettered"}}'
        wait_until(lambda: bool(self.prometheus.query(row)), timeout_seconds=FIRES_SECONDS, what="a scrape")

    def fires(self, *alerts: str) -> None:
        """Wait until these alerts have fired."""

        def have_fired() -> bool:
            return set(alerts) <= self.prometheus.fired()

        try:
            wait_until(have_fired, timeout_seconds=FIRES_SECONDS, what="the alerts")
        except TimeoutError:
            missing = set(alerts) - self.prometheus.fired()
            active = self.prometheus.client.get("/api/v1/alerts").text
            raise AssertionError(f"these did not fire: {sorted(missing)}; active: {active}") from None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, prometheus_programs: None) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("alerts"), rabbitmq, stack)


def test_every_alert_fires_at_its_fault_and_none_before(site: Site) -> None:
    quiet = site.topic(site.lone, "quiet")
    quiet.ack(*publish_and_pop(quiet, 3))
    rejecting = site.topic(site.lone, "rejected")
    site.fires(*FROM_THE_START)
    site.knows(rejecting)
    assert site.prometheus.fired() - OF_A_BUSY_MACHINE == FROM_THE_START
    neglected(site)
    expiring(site)
    rejected(rejecting)
    poisoned(site)
    site.key.write_text("not a key")
    deleted_queue(site)
    overloaded(site.lone)
    site.topic(site.cut_off, "kept")
    site.fires("PopgateQueuesMissing")
    site.owner.kill()
    site.fires("PopgateQueuesUnowned", "PopgateDown")
    site.relay.lead_to(f"amqp://127.0.0.1:{PortBlock().ports[0]}/")
    site.relay.cut()
    site.redis.stop()
    site.fires(*(rule["alert"] for rule in all_rules(quick_rules())))


def publish_and_pop(topic: Topic, count: int, **fields: object) -> list[Any]:
    topic.publish(*"x" * count)
    return topic.pop_all(count, **fields)


def neglected(site: Site) -> None:
    """PopgateOldestMessageTooOld, PopgateReadyWithoutPollers: messages that no client takes."""
    site.topic(site.lone, "neglected").publish("a", "b")


def expiring(site: Site) -> None:
    """PopgateLeasesExpire: a client that hangs."""
    publish_and_pop(site.topic(site.lone, "expiring"), 8, invisibility_seconds=1)


def rejected(topic: Topic) -> None:
    """PopgateDeadLettersGrow: a client that rejects."""
    (message,) = publish_and_pop(topic, 1)
    topic.settle("reject", [{"receipt_handle": message["receipt_handle"], "reason": "it does not fit"}])


def poisoned(site: Site) -> None:
    """PopgateMessagesStuck, PopgateFaults: a message on which popgate fails, even when it dead-letters it."""
    topic = site.topic(site.poisoned, "orders", max_deliveries=1)
    topic.publish("poison", headers={"poison": True})
    topic.pop_all(1, invisibility_seconds=1)
    topic.pop(wait_seconds=2)


def deleted_queue(site: Site) -> None:
    """PopgateQueuesMissing: a queue that an operator deletes."""
    topic = site.topic(site.owner, "deleted")
    site.topic(site.owner, "kept")
    site.node.api("DELETE", "queues", site.vhost, "popgate:deleted:default:0")
    topic.client.post(f"{topic.group_path}/pop", json={})


def overloaded(proxy: ProxyProcess) -> None:
    """PopgateEventLoopLate: a process that gets no processor time."""
    for _ in range(6):
        proxy.pause()
        time.sleep(1.5)
        proxy.resume()
        time.sleep(0.3)


# ---------------------------------------------------------------- the files


@pytest.mark.usefixtures("prometheus_programs")
def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_each_alert_has_a_severity_and_a_chapter_of_the_runbook_and_each_chapter_an_alert() -> None:
    rules = all_rules(yaml.safe_load(RULES.read_text()))
    runbook = (REPOSITORY / "docs" / "runbook.md").read_text()
    chapters = re.split(r"^## ", runbook, flags=re.MULTILINE)[1:]
    titles = [chapter.partition("\n")[0] for chapter in chapters]
    assert sorted(titles) == sorted(rule["alert"] for rule in rules)
    for chapter in chapters:
        for part in ("**Meaning.**", "**Look here.**", "**Do this.**"):
            assert chapter.count(part) == 1, chapter
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy" / "grafana" / "popgate.json").read_text())


def test_every_panel_of_the_dashboard_shows_data_of_proxies_under_load(site: Site) -> None:
    targets = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    left = {f"{title} {target['refId']}": target for title, target in targets}

    def all_have_data() -> bool:
        load(site)
        for title in [title for title, target in left.items() if has_data(site.prometheus, target)]:
            del left[title]
        return not left

    try:
        wait_until(all_have_data, timeout_seconds=FIRES_SECONDS, what="data")
    except TimeoutError:
        assert not left, "no data"


def load(site: Site) -> None:
    """Let messages be acked, rejected, retried and expire, and refuse a request."""
    topic = site.topic(site.lone, "dashboard")
    acked, rejected, released, _ = publish_and_pop(topic, 4, invisibility_seconds=1)
    topic.ack(acked)
    topic.settle("reject", [{"receipt_handle": rejected["receipt_handle"], "reason": "it does not fit"}])
    topic.settle("release", [{"receipt_handle": released["receipt_handle"]}])
    topic.ack(*topic.pop_all(1))
    refused = topic.client.post(f"{topic.group_path}/pop", json={"max_messages": -1})
    assert refused.is_client_error


def has_data(prometheus: Prometheus, target: dict[str, Any]) -> bool:
    """Whether a panel's query has a number, and all labels of its legend. Grafana shows NaN as no data."""
    rows = prometheus.query(in_place_of_variables(target["expr"]))
    labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    return any(row["value"][1] != "NaN" and labels <= set(row["metric"]) for row in rows)


def test_each_metric_and_variable_of_the_dashboard_exists(site: Site) -> None:
    shown = scraped(site.lone.client)
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            names = re.findall(r"\b(popgate_\w+|process_\w+)", target["expr"])
            assert names or target["expr"].startswith("sum(up"), target["expr"]
            assert set(names) <= shown, f"{panel['title']}: {set(names) - shown}"
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert found is not None
            match = {"match[]": in_place_of_variables(found[1])}
            values = site.prometheus.client.get(f"/api/v1/label/{found[2]}/values", params=match).json()["data"]
            assert len(values) > 0, variable["name"]
            assert variable["name"] == found[2]


def in_place_of_variables(expression: str) -> str:
    for name in ("job", "topic", "group"):
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "1m")


def scraped(client: httpx.Client) -> set[str]:
    lines: Callable[[str], list[str]] = str.splitlines
    return {re.split(r"[{ ]", line)[0] for line in lines(client.get("/metrics").text) if not line.startswith("#")}
