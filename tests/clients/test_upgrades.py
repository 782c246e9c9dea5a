"""A proxy of this version starts on the data folders of earlier versions, and everything is there. A folder of a later
version is refused."""

import base64
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.sqlite.schema import SCHEMA_VERSION
from releases.data_folder import BINARY, GROUP, STORE, files, load
from support.processes import ServerFailedError
from support.proxy import ProxyProcess


def test_there_is_a_folder_of_this_version() -> None:
    assert SCHEMA_VERSION in files(), "PYTHONPATH=tests .venv/bin/python -m releases.data_folder"


@pytest.mark.parametrize("version", files())
def test_a_data_folder_of_an_earlier_version_is_upgraded_with_everything(tmp_path: Path, version: int) -> None:
    known = load(files()[version], tmp_path / "data")
    with closing(sqlite3.connect(tmp_path / "data" / STORE)) as connection, connection:
        later = (time.time() + 3600,)  # what is kept is older than its times
        connection.execute("UPDATE delayed SET due_at = ?", later)
        connection.execute("UPDATE message SET expires_at = ? WHERE expires_at IS NOT NULL", later)
    with ProxyProcess(tmp_path, data_folder=tmp_path / "data") as proxy:
        topics = {one["topic"]: one for one in proxy.client.get("/v1/admin/topics").json()["topics"]}
        assert (topics["orders"]["queues"], topics["orders"]["groups"]) == (2, ["billing", "paused"])
        check_group(proxy, known)
        check_locks(proxy, known)
        pull = proxy.client.get("/v1/topics/pulled/groups/reader").json()
        assert (pull["mode"], pull["ready"]) == ("pull", 1)
    with closing(sqlite3.connect(tmp_path / "data" / STORE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def check_group(proxy: ProxyProcess, known: dict[str, Any]) -> None:
    state = proxy.client.get(GROUP).json()
    assert {name: state["policy"][name] for name in known["policy"]} == known["policy"]
    assert state["dead"] == 1
    assert state["delayed"] >= 1, "and the message whose lease has ended, while it waits for its retry"
    paused = proxy.client.get("/v1/topics/orders/groups/paused").json()
    assert paused["policy"]["paused"] is True
    assert paused["ready"] == 6
    messages: dict[str, dict[str, Any]] = {}
    while popped := proxy.client.post(f"{GROUP}/pop", json={"max_messages": 9, "wait_seconds": 3}).json()["messages"]:
        messages |= {one["message_id"]: one for one in popped}
    assert set(messages) == {"m-leased", "m-ready", "m-binary", "m-once"}
    assert messages["m-leased"]["delivery_count"] == 2
    late = proxy.client.post(f"{GROUP}/ack", json={"receipt_handles": [known["handle"]]}).json()
    assert late["results"] == [{"status": "expired"}], "its signature is valid, and another lease has begun"
    assert (messages["m-ready"]["headers"], messages["m-ready"]["ordering_key"]) == ({"kind": "a", "n": 1}, "k")
    assert base64.b64decode(messages["m-binary"]["body_base64"]) == BINARY
    letters = proxy.client.get("/v1/admin/topics/orders/groups/billing/dead-letters").json()["messages"]
    assert [(one["body"], one["reason"]) for one in letters] == [("rejected", "broken")]


def check_locks(proxy: ProxyProcess, known: dict[str, Any]) -> None:
    lock = proxy.client.get("/v1/locks/report").json()
    assert (lock["kind"], lock["slots"]) == ("semaphore", 3)
    body = {"holder": "two", "ttl_seconds": 60, "wait_seconds": 1}
    acquired = proxy.client.post("/v1/locks/report/acquire", json=body).json()
    assert acquired["fencing_token"] > known["fencing_token"]


def test_a_data_folder_of_a_later_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    load(files()[SCHEMA_VERSION], tmp_path / "data")
    with closing(sqlite3.connect(tmp_path / "data" / STORE)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ServerFailedError) as failed, ProxyProcess(tmp_path, data_folder=tmp_path / "data"):
        pass
    assert f"was written by a newer popgate (schema {SCHEMA_VERSION + 1}, this one knows {SCHEMA_VERSION})" in str(
        failed.value
    )
    assert "Traceback" not in str(failed.value)
    with closing(sqlite3.connect(f"file:{tmp_path / 'data' / STORE}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
        assert connection.execute("SELECT count(*) FROM message").fetchone()[0] > 0
