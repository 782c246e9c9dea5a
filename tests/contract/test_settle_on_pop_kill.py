"""A proxy is killed while its client settles with each pop. What was answered as acked never comes back."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import wait_until
from support.proxy import ProxyProcess, plain_client

MESSAGES = 400
BATCH = 5
GROUP = "/v1/topics/t/groups/default"


def taken(client: httpx.Client, acks: list[str], *, wait_seconds: float) -> dict[str, Any]:
    order = {"max_messages": BATCH, "wait_seconds": wait_seconds, "invisibility_seconds": 2, "ack": acks}
    answer = client.post(f"{GROUP}/pop", json=order if acks else {**order, "ack": ["none"]})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.parametrize("acked_before_the_kill", [40, 200])
def test_what_was_acked_with_a_pop_stays_acked_after_a_kill(tmp_path: Path, acked_before_the_kill: int) -> None:
    acked: set[str] = set()
    asked: set[str] = set()

    def work(url: str) -> None:
        held: list[dict[str, str]] = []
        with plain_client(url, timeout_seconds=10) as client:
            while True:
                handles = [one["receipt_handle"] for one in held]
                asked.update(one["body"] for one in held)
                try:
                    found = taken(client, handles, wait_seconds=1)
                except httpx.TransportError:  # the proxy was killed
                    return
                acked.update(
                    one["body"] for one, result in zip(held, found["ack"], strict=False) if result["status"] == "acked"
                )
                held = found["messages"]

    with ProxyProcess(tmp_path) as proxy:
        messages = [{"body": str(number)} for number in range(MESSAGES)]
        for start in range(0, MESSAGES, 200):
            body = {"messages": messages[start : start + 200]}
            proxy.client.post("/v1/topics/t/messages", json=body).raise_for_status()
        worker = threading.Thread(target=work, args=(proxy.url,))
        worker.start()
        wait_until(lambda: len(acked) >= acked_before_the_kill, timeout_seconds=20, what="acks")
        proxy.kill()
        worker.join()
        assert len(acked) < MESSAGES, "it was killed at work"
        proxy.start()
        again: set[str] = set()
        handles: list[str] = []
        while True:
            found = taken(proxy.client, handles, wait_seconds=5)
            again.update(one["body"] for one in found["messages"])
            handles = [one["receipt_handle"] for one in found["messages"]]
            if not handles:
                break
        assert not again & acked, "acked, and delivered again"
        assert again >= {str(number) for number in range(MESSAGES)} - asked, "lost"
