"""docs/moving-to-pop.md, command by command: a team moves from pull to pop and back while messages flow."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acceptance.readme import PROJECT, scenario
from acceptance.terminal import Substitution, Terminal, reader_environment
from popgate_client import Client
from support.processes import wait_until
from support.proxy import ProxyProcess

PAGE = PROJECT / "docs" / "moving-to-pop.md"
WAIT_SECONDS = 30


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path / "proxy", "--pull-session-seconds", "4") as proxy:
        yield proxy


@contextmanager
def program(folder: Path, url: str, *arguments: str) -> Generator[Callable[[], str]]:
    """Run a client as a process and stop it at the end; yields a function that returns its output so far."""
    output = folder / "printed.txt"
    folder.mkdir()
    client_path = os.environ.get("PYTHONPATH", "")
    with output.open("wb") as out:
        client = subprocess.Popen(
            arguments,
            cwd=folder,
            stdout=out,
            stderr=out,
            env={"PATH": os.environ["PATH"], "POPGATE_URL": url, "PYTHONPATH": client_path},
        )
    try:
        yield output.read_text
        client.send_signal(signal.SIGTERM)
        assert client.wait(WAIT_SECONDS) == 0, output.read_text()
    finally:
        client.kill()
        client.wait()


def legacy_client() -> str:
    (script,) = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", (PROJECT / "docs" / "pull.md").read_text(), re.DOTALL)
    return str(script)


def test_a_team_moves_and_comes_back_by_the_commands_of_the_page(proxy: ProxyProcess, tmp_path: Path) -> None:
    made, new_client, preview, policy, to_pop, watched, back = scenario("moving", PAGE)
    old = ("/bin/sh", "-c", legacy_client(), "pull.sh", "legacy-1")
    new = (sys.executable, "-c", new_client.text)
    environment = reader_environment(proxy.port, tmp_path / "data")
    with Client(proxy.url) as client, Terminal(tmp_path, Substitution(port=proxy.port), environment) as terminal:
        terminal.paste(made)
        with program(tmp_path / "old", proxy.url, *old):
            publish(client, "alone", 8)
            pulled = tmp_path / "old" / "pulled-legacy-1.txt"
            wait_until(pulled.exists, timeout_seconds=WAIT_SECONDS, what="the old client")
            with program(tmp_path / "beside", proxy.url, *new) as printed:
                wait_until(
                    lambda: publish(client, "shared", 4) and "pull shared" in printed(),
                    timeout_seconds=WAIT_SECONDS,
                    what="the new client's share of the queues",
                )
                all_settled(client)
        with program(tmp_path / "new", proxy.url, *new) as printed:
            publish(client, "first", 8)
            all_settled(client)
            terminal.paste(preview)
            terminal.paste(policy)
            terminal.paste(to_pop)
            publish(client, "second", 8)
            all_settled(client)
            terminal.paste(watched)
            terminal.paste(back)
            publish(client, "third", 8)
            all_settled(client)
            lines = printed().splitlines()
        told = [f"{mode} {text}" for mode, text in (("pull", "first"), ("pop", "second"), ("pull", "third"))]
        assert [sum(line.startswith(begin) for line in lines) for begin in told] == [8, 8, 8], "each one once"


def publish(client: Client, text: str, count: int) -> bool:
    return all(result.ok for result in client.publish("orders", *(f"{text} {number}" for number in range(count))))


def all_settled(client: Client) -> None:
    def is_empty() -> bool:
        state = client.stats("orders", "billing")
        return (state["ready"], state["in_flight"], state["delayed"], state["dead"]) == (0, 0, 0, 0)

    wait_until(is_empty, timeout_seconds=WAIT_SECONDS, what="all to be settled")
