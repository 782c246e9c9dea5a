"""The steps of a new user with this repository and its README, and nothing else.

The marked blocks of the README run unchanged, against real servers. The tutorial's are in `test_main_job`.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acceptance.readme import README, Block, scenario
from acceptance.terminal import ServerBlock, Substitution, Terminal, checkout, reader_environment
from popgate import __version__
from popgate.ports.journal import EVENTS_WITHOUT_MESSAGE, EventKind
from support.processes import PortBlock, wait_until
from support.proxy import ProxyProcess

STOP_SECONDS_MAX = 10
EXAMPLE_SECONDS = 30
SUBSCRIPTION = "/v1/topics/{topic}/groups/{group}"
PLACES = {"S": SUBSCRIPTION, "A": "/v1/admin/topics/{topic}/groups/{group}"}
"""The README's placeholders."""
PRINTED = ('{"results":[{"status":"published"...', '..."body":"hello"...', '{"results":[{"status":"acked"}]}')
"""The output of the three lines that `popgate serve` prints."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy as `make run` starts it, for the examples that need one."""
    with ProxyProcess(tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


def test_the_first_command_starts_a_proxy_and_the_next_ones_do_what_the_readme_says(tmp_path: Path) -> None:
    ports = PortBlock()
    (port,) = ports.ports
    environment = reader_environment(port, tmp_path / "data")
    substitution = Substitution(port=port)
    server, *pasted = scenario("quick-start")
    with ServerBlock(tmp_path / "server", server, port, substitution, environment) as running:
        assert f"popgate {__version__} on the embedded broker: http://127.0.0.1:{port}" in running.output
        with Terminal(checkout(tmp_path), substitution, environment) as terminal:
            for block in pasted:
                terminal.paste(block)
            for block in printed_by_the_server(running.output):
                terminal.paste(block)
        os.killpg(running.pid, signal.SIGINT)  # Ctrl-C
        running.wait(STOP_SECONDS_MAX)
        assert "Traceback" not in running.output


def test_a_reader_makes_a_key_and_uses_it(tmp_path: Path) -> None:
    ports = PortBlock()
    (port,) = ports.ports
    environment = reader_environment(port, tmp_path / "data")
    here = {"keys.toml": str(tmp_path / "keys.toml"), "orders-app.key": str(tmp_path / "orders-app.key")}
    substitution = Substitution(port=port, counts=here)
    make_keys, server, use, refused = scenario("keys")
    with Terminal(checkout(tmp_path), substitution, environment) as terminal:
        assert '"orders-app"' in terminal.paste(make_keys)
        with ServerBlock(tmp_path / "server", server, port, substitution, environment) as running:
            assert '"body":"Hello, world"' in terminal.paste(use)
            terminal.paste(refused)
            running.stop()
            assert "Traceback" not in running.output
            assert (tmp_path / "orders-app.key").read_text().strip() not in running.output


def printed_by_the_server(output: str) -> Iterator[Block]:
    """Return what `popgate serve` prints for pasting."""
    to_paste = re.search(r"^Publish, pop and ack a message:\n((?:  .+\n)+)", output, re.MULTILINE)
    assert to_paste is not None
    lines = [line.removeprefix("  ") for line in to_paste[1].splitlines()]
    for line, printed in zip(lines, PRINTED, strict=True):
        yield Block(scenario="serve", language="sh", text=line, keeps_running=False, output=printed)


def test_the_python_examples_run_as_they_stand(tmp_path: Path, proxy: ProxyProcess) -> None:
    calls, consumer = scenario("python")
    environment = reader_environment(proxy.port, tmp_path / "data")

    printed = subprocess.run(
        [sys.executable, "-c", Substitution(port=proxy.port).apply(calls.text)],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=EXAMPLE_SECONDS,
        check=True,
        text=True,
    ).stdout.splitlines()
    assert 1 <= len(printed) <= 2, "a pop answers with what is there"
    assert set(printed) <= {"hello 1", "world 1"}

    publish(proxy, "greetings", "", "not now", "fine")
    with (tmp_path / "consumer.log").open("w") as log:
        running = subprocess.Popen([sys.executable, "-c", consumer.text], env=environment, stdout=log, stderr=log)
    try:
        wait_until(
            lambda: (
                (state := state_of(proxy, "greetings"))["ready"] == 0 and (state["dead"], state["delayed"]) == (1, 1)
            ),
            timeout_seconds=EXAMPLE_SECONDS,
            what="the consumer to settle everything",
        )
        running.send_signal(signal.SIGTERM)
        assert running.wait(STOP_SECONDS_MAX) == 0
    finally:
        running.kill()
        running.wait()
    handled = (tmp_path / "consumer.log").read_text().splitlines()
    assert "handled fine" in handled
    assert len(handled) == 1 + 2 - len(printed)


def test_the_commands_run_as_they_stand(tmp_path: Path, proxy: ProxyProcess) -> None:
    (block,) = scenario("command-line")
    topic = f"commands-{proxy.port}"  # the example's own may contain leftovers of other examples
    renamed = Substitution(port=proxy.port, counts={"greetings": topic})
    with Terminal(tmp_path, renamed, reader_environment(proxy.port, tmp_path / "data")) as terminal:
        printed = terminal.paste(block)
    assert printed.count('"acked"') >= 1
    assert topic in printed
    assert proxy.client.get(f"/v1/admin/topics/{topic}/groups/audit").json()["policy"]["max_deliveries"] == 5


def test_the_readmes_table_of_requests_is_the_whole_interface(proxy: ProxyProcess) -> None:
    table = re.search(r"<!-- http -->\n((?:\|.*\n)+)", README.read_text())
    assert table is not None
    told: set[tuple[str, str]] = set()
    for row in table[1].splitlines()[2:]:
        methods: list[str] = []
        for code in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            method, _, path = code.partition(" ")
            methods.append(method)
            if path:
                told |= {(one, PLACES.get(path[0], path[0]) + path[1:]) for one in methods}
                methods.clear()
    described = proxy.client.get("/openapi.json").json()["paths"]
    assert told == {(method.upper(), path) for path, operations in described.items() for method in operations}


def test_the_page_of_the_metrics_names_every_metric_and_every_event(proxy: ProxyProcess) -> None:
    told = (README.parent / "docs" / "metrics.md").read_text()
    publish(proxy, "measured", "a")
    measured = re.findall(r"^# TYPE (popgate_\w+)", proxy.client.get("/metrics").text, re.MULTILINE)
    assert set(measured) <= set(re.findall(r"`(popgate_\w+)`", told))
    events = re.search(r"\| `popgate_events_total` \|.*by `kind`: (.*)\|", told)
    assert events is not None
    assert set(re.findall(r"`(\w+)`", events[1])) == set(EventKind) - EVENTS_WITHOUT_MESSAGE


def publish(proxy: ProxyProcess, topic: str, *bodies: str) -> None:
    messages = {"messages": [{"body": body} for body in bodies]}
    results = proxy.client.post(f"/v1/topics/{topic}/messages", json=messages).json()["results"]
    assert [result["status"] for result in results] == ["published"] * len(bodies)


def state_of(proxy: ProxyProcess, topic: str) -> dict[str, Any]:
    state: dict[str, Any] = proxy.client.get(f"/v1/topics/{topic}/groups/default").json()
    return state
