"""The compose file, as far as it can be checked without Docker: its commands are popgate's, and its names match."""

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from popgate.cli.commands import parser
from popgate.config import ServeOptions, serve_options
from popgate.config.options import SETTINGS
from popgate_spark.cli import parser as pipeline_parser
from support.rabbitmq_releases import NEWEST

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROXIES = [name for name in SERVICES if name.startswith("popgate")]


def options_of(proxy: str) -> ServeOptions:
    parsed = vars(parser().parse_args(SERVICES[proxy]["command"]))
    return serve_options({one.name: parsed[one.name] for one in SETTINGS if parsed[one.name] is not None}, {}, None)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxys_command_is_understood(name: str) -> None:
    options = options_of(name)
    nodes = [urlsplit(url).hostname for url in options.amqp_urls]
    assert sorted(map(str, nodes)) == [name for name in SERVICES if "rabbitmq" in name]
    assert options.redis_url == "redis://redis:6379/0"
    assert options.host == "0.0.0.0"  # inside of a container
    assert options.journal == "/journal"


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxys_replica_keeper_may_ask_every_node(name: str) -> None:
    options, nodes = options_of(name), [node for node in SERVICES if "rabbitmq" in node]
    assert options.replica_keeper
    assert options.min_replicas <= len(nodes)
    urls = [urlsplit(url) for url in options.management_urls]
    assert sorted((url.hostname, url.port) for url in urls) == [(node, 15_672) for node in nodes]
    for node in nodes:
        assert SERVICES[node]["image"].endswith("-management"), "its API is asked: a proxy's image has no tools"
        user = (SERVICES[node]["environment"][f"RABBITMQ_DEFAULT_{one}"] for one in ("USER", "PASS"))
        assert tuple(user) in {(url.username, url.password) for url in urls}


def test_rabbitmq_is_of_the_release_that_the_tests_run_on() -> None:
    images = {SERVICES[name]["image"] for name in SERVICES if "rabbitmq" in name}
    assert images == {f"rabbitmq:{NEWEST}-management"}


def test_no_two_proxies_prefer_the_same_node() -> None:
    commands = [SERVICES[name]["command"] for name in PROXIES]
    first = {command[command.index("--amqp-url") + 1].split(",")[0] for command in commands}
    assert len(first) == len(PROXIES)


def test_the_audit_reads_the_proxies_journal_on_the_cluster_that_is_there() -> None:
    script = SERVICES["audit"]["command"][-1]
    line = next(line for line in script.splitlines() if "popgate-pipeline" in line)
    words = shlex.split(line.partition("||")[0])
    parsed = pipeline_parser().parse_args(words[1:])
    assert (parsed.job, parsed.journal) == ("audit", "/journal")
    assert parsed.state.startswith("/reports/")
    assert parsed.master == SERVICES["spark-worker"]["command"][-1] == "spark://spark-master:7077"
    assert dict(parsed.conf)["spark.driver.host"] == SERVICES["audit"]["hostname"]
    for name in ("spark-worker", "audit", *PROXIES):
        assert "journal:/journal" in SERVICES[name]["volumes"]


def test_what_is_referred_to_is_there() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        assert {one["source"] for one in service.get("configs", ())} <= set(COMPOSE["configs"])
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network"


def test_every_node_and_every_proxy_is_known_to_its_neighbours() -> None:
    nodes = COMPOSE["configs"]["rabbitmq"]["content"]
    backends = COMPOSE["configs"]["haproxy"]["content"]
    for name, service in SERVICES.items():
        if "rabbitmq" in name:
            assert service["hostname"] == name
            assert f"rabbit@{name}\n" in nodes
        if name in PROXIES:
            assert f"server {name} {name}:8080\n" in backends
