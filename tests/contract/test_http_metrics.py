"""The metrics and the state of a subscription are true without consumers, in a cluster too, and cost no waiting."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as read_text

from contract.http_server import HttpServer, Topic, answer, leave_out_a_pair, started_server
from support.processes import wait_until
from support.prometheus import REPOSITORY, promtool, read_open_metrics

READ_SECONDS = 20
"""Maximum seconds until a proxy has read its backlogs, on a busy machine."""
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module", params=["embedded", "rabbitmq", "front"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, *, full_run: bool
) -> Iterator[HttpServer]:
    """A server that reads its backlogs often."""
    leave_out_a_pair(request, full_run=full_run)
    folder = tmp_path_factory.mktemp(f"metrics-{request.param}")
    with started_server(request, folder, "--metrics-read-seconds", "0.2") as server:
        yield server


def rows(server: HttpServer, topic: Topic) -> dict[str, float]:
    """Return the sums over all proxies of the group's rows, by the name of the metric."""
    found: dict[str, float] = {}
    for name, value in server.metrics().items():
        if f'topic="{topic.name}"' in name and f'group="{topic.group}"' in name and "kind=" not in name:
            found[name.partition("{")[0]] = value
    return found


def wait_for(server: HttpServer, topic: Topic, **expected: float) -> dict[str, float]:
    """Wait until the group's rows are as expected, and return all of them."""

    def are_there() -> bool:
        found = rows(server, topic)
        return all(found.get(f"popgate_{name}") == value for name, value in expected.items())

    try:
        wait_until(are_there, timeout_seconds=READ_SECONDS, what="the metrics")
    except TimeoutError:
        found = rows(server, topic)
        assert {name: found.get(f"popgate_{name}") for name in expected} == expected
    return rows(server, topic)


def test_a_backlog_shows_although_no_client_has_ever_asked(server: HttpServer) -> None:
    topic = server.topic(queues=2)
    topic.publish("a", "b", "c")
    found = wait_for(server, topic, ready=3, dead=0, in_flight=0, polls_total=0)
    assert found["popgate_ready_buffered"] == 0, "nothing is in memory"
    time.sleep(1.1)
    age = wait_for(server, topic, ready=3)["popgate_oldest_message_age_seconds"]
    assert 1.0 <= age < 60.0
    state = topic.state()
    assert state["oldest_age_seconds"] >= 1.0
    assert (state["ready"], state["backlog"], state["published_count"], state["polls_count"]) == (3, 3, 3, 0)


def test_messages_are_counted_in_each_state_and_on_their_way_there(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish(*"abcdef")
    kept, again, rejected, *acked = topic.pop_all(5)
    topic.ack(*acked)
    topic.settle("reject", [{"receipt_handle": rejected["receipt_handle"], "reason": "broken"}])
    topic.settle("release", [{"receipt_handle": again["receipt_handle"]}])
    retried = topic.pop_one()
    assert retried["message_id"] == again["message_id"]
    found = wait_for(server, topic, ready=1, in_flight=2, dead=1, redeliveries_total=1)
    assert found["popgate_publish_to_delivery_seconds_count"] == 5
    assert found["popgate_delivery_to_ack_seconds_count"] == 2
    assert found["popgate_lease_duration_seconds_count"] == 4, "two acked, one rejected, one released"
    state = topic.state()
    expected = {
        "ready": 1,
        "in_flight": 2,
        "backlog": 3,
        "dead": 1,
        "published_count": 6,
        "delivered_count": 6,
        "settled_count": 3,
        "expired_count": 0,
        "redelivered_count": 1,
        "dead_lettered_count": 1,
    }
    assert {name: state[name] for name in expected} == expected
    topic.ack(kept, retried)


def test_an_expired_lease_and_a_waiting_pop_are_counted(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("a")
    topic.pop_one(invisibility_seconds=1)
    again = topic.pop_one(wait_seconds=20)
    assert again["delivery_count"] == 2
    state = topic.state()
    assert (state["expired_count"], state["redelivered_count"]) == (1, 1)
    assert state["polls_count"] >= 2
    topic.ack(again)


def test_the_age_of_messages_that_return_to_the_broker_is_that_of_their_publish(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("old", "older")
    time.sleep(1.0)
    topic.pop(max_messages=1)  # the other message comes into memory, too
    answer(server.client.post(f"{topic.admin_path}/groups/default/pause"))  # both return to the broker
    found = wait_for(server, topic, ready=1, paused=1)
    assert found["popgate_oldest_message_age_seconds"] >= 1.0


# ---------------------------------------------------------------- the formats


def test_a_scraper_that_knows_openmetrics_gets_it_and_another_parser_reads_it(server: HttpServer) -> None:
    topic = server.topic()
    topic.publish("a")
    topic.ack(topic.pop_one())
    plain = server.client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    opened = server.client.get("/metrics", headers={"accept": f"{OPEN_METRICS};q=0.5,text/plain;q=0.2"})
    assert opened.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    families = {family.name: family for family in read_open_metrics(opened.text)}
    assert set(families) == {family.name for family in read_text(plain.text)}
    assert all(family.documentation for family in families.values())
    for family in families.values():
        check_units(family)


def check_units(family: Metric) -> None:
    """Check that a time is in seconds and a size in bytes, and that the name says so."""
    for part in ("millis", "_ms", "minutes", "kilobytes", "_kb"):
        assert part not in family.name
    if family.type == "histogram":
        assert family.unit == "seconds"
        assert family.name.endswith("_seconds")


@pytest.mark.usefixtures("prometheus_programs")
def test_promtool_finds_nothing_to_complain_about(server: HttpServer) -> None:
    server.topic().publish("a")
    assert promtool("check", "metrics", given=server.client.get("/metrics").text) == ""


def test_the_documentation_names_every_metric_and_no_other(server: HttpServer) -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    shown = {
        family.name
        for process in (server.process, server.owner)
        for family in (read_open_metrics(scrape(process.client)) if process is not None else ())
        if family.name.startswith("popgate_")
    }
    missing = {name for name in shown if f"`{name}`" not in page and f"`{name}_total`" not in page}
    assert not missing


def scrape(client: httpx.Client) -> str:
    return client.get("/metrics", headers={"accept": OPEN_METRICS}).text


# ---------------------------------------------------------------- autoscaling


def test_keda_reads_ready_plus_in_flight_where_its_scaler_looks(server: HttpServer) -> None:
    """KEDA's metrics-api scaler reads the value at `valueLocation` in the answer to `url`."""
    documents = list(yaml.safe_load_all((REPOSITORY / "deploy" / "keda" / "scaledobject.yaml").read_text()))
    (scaled,) = [one for one in documents if one["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    assert trigger["metadata"].get("format", "json") == "json"
    topic = server.topic()
    topic.publish("a", "b", "c")
    topic.pop_one()
    url = httpx.URL(trigger["metadata"]["url"].replace("/orders/", f"/{topic.name}/").replace("/billing", "/default"))
    value: Any = json.loads(server.client.get(url.path).text)
    for part in trigger["metadata"]["valueLocation"].split("."):
        value = value[part]
    assert value == 3, "two ready, one in flight"
    assert float(trigger["metadata"]["targetValue"]) >= 1
