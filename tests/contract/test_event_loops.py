"""`popgate serve` runs in the event loop that ``--event-loop`` names."""

import subprocess
from pathlib import Path

import pytest

from support.proxy import ProxyProcess, popgate_command


def uses_uvloop(proxy: ProxyProcess) -> bool:
    return "/uvloop/" in Path(f"/proc/{proxy.pid}/maps").read_text()


def without_uvloop(folder: Path) -> dict[str, str]:
    """Return the environment of a process for which uvloop is not installed."""
    (folder / "uvloop.py").write_text("raise ModuleNotFoundError('No module named uvloop')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(("name", "is_fast"), [("auto", True), ("uvloop", True), ("asyncio", False)])
def test_the_proxy_serves_in_the_named_loop(tmp_path: Path, name: str, is_fast: bool) -> None:
    with ProxyProcess(tmp_path, "--event-loop", name) as proxy:
        assert uses_uvloop(proxy) is is_fast
        proxy.client.post("/v1/topics/t/messages", json={"messages": [{"body": "one"}]}).raise_for_status()
        (message,) = proxy.client.post("/v1/topics/t/groups/default/pop", json={"wait_seconds": 5}).json()["messages"]
        acked = proxy.client.post(
            "/v1/topics/t/groups/default/ack", json={"receipt_handles": [message["receipt_handle"]]}
        )
        assert acked.json() == {"results": [{"status": "acked"}]}
        assert proxy.stop() == 0


def test_without_uvloop_the_proxy_serves_in_asyncios_loop(tmp_path: Path) -> None:
    with ProxyProcess(tmp_path, environment=without_uvloop(tmp_path)) as proxy:
        assert not uses_uvloop(proxy)


def test_a_required_uvloop_that_is_missing_is_told(tmp_path: Path) -> None:
    command = popgate_command("serve", "--event-loop", "uvloop", "--data-dir", str(tmp_path / "data"))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, env=without_uvloop(tmp_path)
    )
    assert ended.returncode != 0
    assert "--event-loop uvloop needs uvloop: pip install 'popgate[fast]'" in ended.stderr
