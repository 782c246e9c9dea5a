"""The journal of a real proxy in an object store: whole objects, over a store that hangs."""

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx

from cluster.conftest import assert_no_traceback
from support.processes import PortBlock, wait_until
from support.proxy import ProxyProcess, popgate_command
from support.s3 import KEYS, S3Server

MESSAGES = "/v1/topics/t/messages"
GROUP = "/v1/topics/t/groups/default"
PATIENCE_SECONDS = 60.0
COUNT = 50


def use(client: httpx.Client) -> None:
    """Publish, pop and ack some messages."""
    told = client.post(MESSAGES, json={"messages": [{"body": "b"}] * COUNT}).json()["results"]
    assert [one["status"] for one in told] == ["published"] * COUNT
    left = COUNT
    while left:
        found = client.post(f"{GROUP}/pop", json={"max_messages": left, "wait_seconds": 20}).json()["messages"]
        handles = [one["receipt_handle"] for one in found]
        results = client.post(f"{GROUP}/ack", json={"receipt_handles": handles}).json()["results"]
        assert [one["status"] for one in results] == ["acked"] * len(handles)
        left -= len(found)


def figure(client: httpx.Client, name: str) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"popgate_journal_{name} ")]
    return float(line.split()[1])


def test_an_object_store_that_hangs_holds_up_nobody_and_gets_every_event_once(tmp_path: Path) -> None:
    with S3Server(tmp_path / "s3") as store:
        journal = ("--journal", store.url("lake/journal"), "--journal-rotate-seconds", "1")
        with ProxyProcess(tmp_path / "proxy", *journal, environment=KEYS) as proxy:
            use(proxy.client)
            wait_until(
                lambda: figure(proxy.client, "buffered_events") == 0, timeout_seconds=PATIENCE_SECONDS, what="a file"
            )
            store.pause()
            use(proxy.client)
            wait_until(
                lambda: figure(proxy.client, "lag_seconds") > 3, timeout_seconds=PATIENCE_SECONDS, what="a journal late"
            )
            use(proxy.client)
            assert figure(proxy.client, "buffered_events") >= 6 * COUNT
            store.resume()
            wait_until(
                lambda: figure(proxy.client, "buffered_events") == 0, timeout_seconds=PATIENCE_SECONDS, what="its tail"
            )
            assert figure(proxy.client, "events_dropped_total") == 0
            use(proxy.client)
            assert proxy.stop() == 0
            assert_no_traceback(proxy)
        dataset: Any = importlib.import_module("pyarrow.dataset")
        files = dataset.dataset("lake/journal", filesystem=store.filesystem(), partitioning="hive")
        rows = files.to_table(columns=["event", "journal_seq", "hour"]).to_pylist()
    events = [row["event"] for row in rows]
    assert {name: events.count(name) for name in ("published", "delivered", "acked")} == dict.fromkeys(
        ("published", "delivered", "acked"), 4 * COUNT
    )
    assert sorted(row["journal_seq"] for row in rows) == [*range(1, len(rows) + 1)]


def test_a_bucket_that_is_not_there_is_told_at_start(tmp_path: Path) -> None:
    block = PortBlock()
    with S3Server(tmp_path / "s3") as store:
        command = popgate_command("serve", "--port", str(block.ports[0]), "--data-dir", str(tmp_path / "data"))
        refused = subprocess.run(
            [*command, "--journal", store.url("nowhere/journal")],
            env={"PATH": os.environ["PATH"], **KEYS},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert refused.returncode == 1
    (told,) = refused.stderr.splitlines()
    assert told.startswith("popgate: the journal can't be written to s3://nowhere/journal (Bucket 'nowhere' not found")
