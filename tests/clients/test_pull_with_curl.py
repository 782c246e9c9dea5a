"""Runs the pull client of docs/pull.md, which uses only curl, unchanged."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.processes import wait_until
from support.proxy import ProxyProcess

DOCUMENT = Path(__file__).parents[2] / "docs" / "pull.md"
TOPIC = "/v1/topics/orders"
GROUP = f"{TOPIC}/groups/billing"
ADMIN = "/v1/admin/topics/orders"
QUEUES, COUNT = 3, 60


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyProcess]:
    with ProxyProcess(tmp_path, "--pull-session-seconds", "4") as proxy:
        assert proxy.client.put(ADMIN, json={"queues": QUEUES}).is_success
        assert proxy.client.put(f"{ADMIN}/groups/billing").is_success
        yield proxy


@contextlib.contextmanager
def running(proxy: ProxyProcess, folder: Path, name: str) -> Generator[subprocess.Popen[bytes]]:
    """The script as a process; it is ended after the block."""
    (block,) = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script = folder / "pull.sh"
    script.write_text(block)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "POPGATE_URL": proxy.url}
    client = subprocess.Popen(["/bin/sh", str(script), name], cwd=folder, env=environment)
    try:
        yield client
        client.send_signal(signal.SIGTERM)
        assert client.wait(20) == 0
    finally:
        client.kill()
        client.wait()


def pulled(folder: Path, *names: str) -> list[tuple[int, str]]:
    """Return the queue and the body of all messages that these clients have handled, in the order of each."""
    found: list[tuple[int, str]] = []
    for name in names:
        path = folder / f"pulled-{name}.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        found += [(one["queue"], one["body"]) for line in lines for one in json.loads(line)["messages"]]
    return found


def has_pulled(folder: Path, count: int) -> bool:
    return len(pulled(folder, "a", "b")) >= count


def publish(proxy: ProxyProcess, first: int, end: int) -> None:
    messages = [
        {"body": f"{number:04}", "headers": {"quoted": '"receipt_handle":"no"'}} for number in range(first, end)
    ]
    assert proxy.client.post(f"{TOPIC}/messages", json={"messages": messages}).is_success


def switch(proxy: ProxyProcess, mode: str) -> None:
    asked = {"mode": mode, "drain_timeout_seconds": 0}
    assert proxy.client.put(f"{ADMIN}/groups/billing/consume-mode", json=asked).is_success


def test_a_client_that_is_nothing_but_curl_pulls_all_in_order_and_shares_with_another(
    proxy: ProxyProcess, tmp_path: Path
) -> None:
    assert shutil.which("curl") is not None, "install curl"
    publish(proxy, 0, COUNT)
    with running(proxy, tmp_path, "a") as first:  # it waits for the mode
        switch(proxy, "pull")
        wait_until(lambda: len(pulled(tmp_path, "a")) == COUNT, timeout_seconds=30, what="all to be pulled")
        sent = COUNT
        with running(proxy, tmp_path, "b"):
            while not pulled(tmp_path, "b"):  # it gets queues once the first has released them
                publish(proxy, sent, sent := sent + QUEUES)
                wait_until(partial(has_pulled, tmp_path, sent), timeout_seconds=30, what="the rest")
        assert first.poll() is None
        wait_until(lambda: proxy.client.get(GROUP).json()["in_flight"] == 0, timeout_seconds=10, what="the last commit")
    got = pulled(tmp_path, "a", "b")
    assert sorted(body for _, body in got) == [f"{number:04}" for number in range(sent)], "each one once"
    for name in ("a", "b"):
        for queue in range(QUEUES):
            of_queue = [body for number, body in pulled(tmp_path, name) if number == queue]
            assert of_queue == sorted(of_queue)
    switch(proxy, "pop")
    assert proxy.client.post(f"{GROUP}/pop", json={"max_messages": 10}).json() == {"messages": []}
