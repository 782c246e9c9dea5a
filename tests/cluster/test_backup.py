"""`popgate backup` of a proxy under load, a kill, and `popgate restore`: what is delivered again, and what is lost."""

import json
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess, popgate_command

TOPIC = "orders"
GROUP = f"/v1/topics/{TOPIC}/groups/default"
LOADED_SECONDS = 0.4
BODY = "x" * 2_000


class Load:
    """Publishes and acks on one topic until `stop`. Its sets contain ids of messages, by the proxy's answers."""

    def __init__(self, url: str) -> None:
        self.published: set[str] = set()
        self.acking: set[str] = set()
        self.acked: set[str] = set()
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._publish, self._publish, self._consume)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _publish(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as http:
            while not self._stopped.is_set():
                answer = posted(http, f"/v1/topics/{TOPIC}/messages", {"messages": [{"body": BODY}] * 8})
                self.published |= {
                    one["message_id"] for one in answer.get("results", ()) if one["status"] == "published"
                }

    def _consume(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as http:
            while not self._stopped.is_set():
                messages = posted(http, f"{GROUP}/pop", {"max_messages": 8, "wait_seconds": 1}).get("messages", ())
                ids = [one["message_id"] for one in messages]
                self.acking |= set(ids)
                handles = [one["receipt_handle"] for one in messages]
                results = posted(http, f"{GROUP}/ack", {"receipt_handles": handles}).get("results", ()) if ids else ()
                self.acked |= {name for name, one in zip(ids, results, strict=False) if one["status"] == "acked"}


def posted(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a POST, or an empty one if the proxy was killed."""
    try:
        answer = http.post(path, json=body)
    except httpx.HTTPError:
        return {}
    return dict(answer.json()) if answer.is_success else {}


def drained(proxy: ProxyProcess) -> dict[str, int]:
    """Pop and ack until nothing is ready; return how often each message id was delivered."""
    delivered: dict[str, int] = {}
    while messages := posted(proxy.client, f"{GROUP}/pop", {"max_messages": 256, "wait_seconds": 1})["messages"]:
        for one in messages:
            delivered[one["message_id"]] = delivered.get(one["message_id"], 0) + 1
        posted(proxy.client, f"{GROUP}/ack", {"receipt_handles": [one["receipt_handle"] for one in messages]})
    return delivered


def acquired_token(proxy: ProxyProcess, lock: dict[str, Any]) -> int:
    """Acquire the lock, as soon as the proxy serves locks; return its fencing token."""
    answers: list[dict[str, Any]] = []

    def is_acquired() -> bool:
        answers.append(posted(proxy.client, "/v1/locks/fence/acquire", lock))
        return "fencing_token" in answers[-1]

    wait_until(is_acquired, timeout_seconds=10, what="the lock")
    return int(answers[-1]["fencing_token"])


@contextmanager
def served(folder: Path, *flags: str, data: str = "data") -> Generator[ProxyProcess]:
    with ProxyProcess(folder, *flags, data_folder=folder / data, name=data) as proxy:
        yield proxy


def popgate(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        popgate_command(*arguments), capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture(params=["embedded", "rabbitmq"])
def flags(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "embedded":
        return []
    return ["--amqp-url", request.getfixturevalue("amqp_url"), "--auto-create", "true"]


def test_a_backup_under_load_restores_what_was_there_at_its_time(tmp_path: Path, flags: list[str]) -> None:
    with served(tmp_path, *flags) as proxy:
        lock = {"holder": "tester", "ttl_seconds": 600}
        assert posted(proxy.client, f"/v1/topics/{TOPIC}/messages", {"messages": [{"body": BODY}] * 50})["results"]
        held = posted(proxy.client, f"{GROUP}/pop", {"max_messages": 5, "invisibility_seconds": 600})["messages"]
        load = Load(proxy.url)
        load.start()
        time.sleep(LOADED_SECONDS)
        published, acked = set(load.published), set(load.acked)
        done = CommandLine(proxy.url)("backup", str(tmp_path / "backup"))
        assert done.code == 0, done.err
        begun = set(load.acking)
        proxy.client.put("/v1/locks/fence", json={"kind": "mutex"}).raise_for_status()
        token = acquired_token(proxy, lock)
        settled_later = set(load.acked)
        time.sleep(LOADED_SECONDS)
        proxy.kill()
        load.stop()
    assert len(published) > 50
    assert acked
    assert popgate("restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "restored")).returncode == 0
    with served(tmp_path, *flags, data="restored") as proxy:
        proxy.client.put("/v1/locks/fence", json={"kind": "mutex"}).raise_for_status()
        assert acquired_token(proxy, lock) > token
        settled = posted(proxy.client, f"{GROUP}/ack", {"receipt_handles": [one["receipt_handle"] for one in held]})
        assert [one["status"] for one in settled["results"]] == ["acked"] * 5, "leases of before the backup are open"
        delivered = drained(proxy)
    assert not acked & delivered.keys(), "what was acked before the backup is not delivered again"
    assert published - load.acking <= delivered.keys(), "what was published before the backup, and not acked, is there"
    if flags:  # RabbitMQ has what was published later, and does not have what was acked later
        assert load.published - load.acking <= delivered.keys()
        assert settled_later - acked
        assert not settled_later & delivered.keys(), "RabbitMQ had received these acks long before the kill"
    else:
        assert published - begun <= delivered.keys(), "what was acked after the backup is delivered again"
    assert set(delivered.values()) == {1}


def test_no_backup_of_an_interrupted_command_looks_whole(tmp_path: Path) -> None:
    target = tmp_path / "backups" / "monday"
    with served(tmp_path) as proxy:
        posted(proxy.client, f"/v1/topics/{TOPIC}/messages", {"messages": [{"body": BODY * 250}] * 16})
        command = CommandLine(proxy.url)
        for end, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
            proxy.pause()
            with command.running("backup", str(target), "--timeout", "1") as running:
                wait_until(
                    lambda: any(tmp_path.glob("backups/.monday.partial-*")), timeout_seconds=10, what="the draft"
                )
                running.send_signal(end)
                assert running.wait(20) == code
            proxy.resume()
            assert not target.exists()
            assert bool(list(target.parent.iterdir())) == (end == signal.SIGKILL)
        full = popgate(
            "backup",
            str(target),
            "--url",
            proxy.url,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
        )
        assert full.returncode == 1
        assert "the backup can't be written: File too large" in full.stderr
        assert not target.exists()
        assert command("backup", str(target)).code == 0, "the proxy has ended the interrupted ones"
        assert proxy.client.get("/v1/admin/backup").json()["phase"] == "none"
        assert not list(proxy.data_folder.glob("*.backup"))
        again = command("backup", str(target))
        assert "exists and is not an empty folder" in again.err
        in_use = popgate("restore", str(target), "--data-dir", str(proxy.data_folder))
        assert "another popgate" in in_use.stderr
        stopped = popgate("backup", str(tmp_path / "other"), "--data-dir", str(proxy.data_folder))
        assert "leave --data-dir out" in stopped.stderr


def test_a_damaged_or_interrupted_restore_is_refused_until_it_is_repeated(tmp_path: Path) -> None:
    with served(tmp_path) as proxy:
        posted(proxy.client, f"/v1/topics/{TOPIC}/messages", {"messages": [{"body": "one"}]})
        proxy.kill()
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    done = popgate("backup", str(backup), "--data-dir", str(proxy.data_folder))
    assert done.returncode == 0, done.stderr
    assert popgate("restore", str(backup), "--check").returncode == 0
    store = backup / "popgate.db"
    content = store.read_bytes()
    for damaged in (content[:-1], content[:30_000] + b"\xff" + content[30_001:]):
        store.write_bytes(damaged)
        for arguments in (["--check"], ["--data-dir", str(restored)]):
            refused = popgate("restore", str(backup), *arguments)
            assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
            assert "popgate.db differs from the manifest" in refused.stderr
    started = popgate("serve", "--port", "65535", "--data-dir", str(restored))
    assert "a restore was interrupted" in started.stderr
    store.write_bytes(content)
    assert popgate("restore", str(backup), "--data-dir", str(restored)).returncode == 0
    full = popgate("restore", str(backup), "--data-dir", str(restored))
    assert "is not empty" in full.stderr
    with served(tmp_path, data="restored") as proxy:
        assert len(drained(proxy)) == 1
    manifest = json.loads((backup / "manifest.json").read_text())
    (backup / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "popgate": "9.9"}))
    assert "popgate 9.9 wrote it" in popgate("restore", str(backup), "--check").stderr
    (backup / "manifest.json").unlink()
    assert "is not a whole backup" in popgate("restore", str(backup), "--check").stderr
