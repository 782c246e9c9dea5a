"""A message that is published, popped and acked, alone or in a batch, must not execute more bytecodes than before.

The number of bytecodes does not depend on the speed or the load of the machine. Some work depends on time and happens
only in some rounds, so each function counts with the round in which it executed the least. asyncio's event loop is left
out, because the number of its turns depends on time, too.

If a change of the product moves a figure out of its range, write the new figure into ``BOUNDS``. A higher figure needs
a reason. A lower figure must be written down, too: otherwise a later regression could hide in the difference.
Allocations are not counted, because CPython has no counter for them, but calls into C are.
"""

import http.client
import json
import signal
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import executed
from support.processes import wait_until
from support.proxy import ProxyProcess, python_program

ROUNDS = 8
WARM_UP_ROUNDS = 2
SLACK = 1.05
"""A regression of 10 % must leave the range, and the rounds of one run must not."""
GROUP = "/v1/topics/t/groups/default"
Figures = dict[tuple[str, int, str], tuple[int, int]]
"""Bytecodes and calls into C, by file, line and name of the function."""


class Cost(NamedTuple):
    """What one message executes."""

    bytecodes: float
    calls: float

    def __str__(self) -> str:
        return f"{self.bytecodes:.0f} bytecodes and {self.calls:.1f} calls into C"


BOUNDS = {  # by the version of Python, and the size of a batch
    ((3, 11), 1): Cost(9_400, 247),
    ((3, 11), 256): Cost(2_650, 84),
}


class Counted:
    """A proxy that counts what it executes."""

    def __init__(self, proxy: ProxyProcess, report: Path) -> None:
        self._proxy = proxy
        self._report = report
        self._client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)

    def post(self, path: str, body: object) -> Any:
        self._client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self._client.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return json.loads(content)

    def publish(self, number: int) -> None:
        for start in range(0, number, 256):
            self.post("/v1/topics/t/messages", {"messages": [{"body": "x" * 1024}] * min(256, number - start)})

    def pop_and_ack(self, batch: int) -> int:
        """Return the number of messages."""
        messages = self.post(f"{GROUP}/pop", {"max_messages": batch, "wait_seconds": 10})["messages"]
        results = self.post(f"{GROUP}/ack", {"receipt_handles": [one["receipt_handle"] for one in messages]})["results"]
        assert results == [{"status": "acked"}] * len(messages)
        return len(messages)

    def so_far(self) -> Figures:
        self._report.unlink(missing_ok=True)
        self._proxy.signal(signal.SIGUSR1)
        wait_until(self._report.exists, timeout_seconds=30, what="the counts")
        rows = json.loads(self._report.read_text())
        return {(file, line, name): (bytecodes, calls) for file, line, name, bytecodes, calls in rows}

    def round(self, batch: int, batches: int) -> Figures:
        """Return what a round executes. It contains the publishing, because messages become ready in it, or later."""
        before = self.so_far()
        self.publish(batch * batches)
        taken = 0
        while taken < batch * batches:
            taken += self.pop_and_ack(batch)
        time.sleep(0.2)  # what the acks leave behind is done, too
        after = self.so_far()
        return {key: tuple(a - b for a, b in zip(after[key], before.get(key, (0, 0)), strict=True)) for key in after}  # type: ignore[misc]

    def close(self) -> None:
        self._client.close()


@contextmanager
def counted(folder: Path) -> Generator[Counted]:
    report = folder / "executed.json"
    program = python_program(str(Path(executed.__file__)))
    with (
        ProxyProcess(folder, environment={"EXECUTED": str(report)}, program=program) as proxy,
        closing(Counted(proxy, report)) as found,
    ):
        yield found


def cost(rounds: list[Figures], messages: int) -> Cost:
    """Return what a message executes outside of asyncio, from the least round of each function."""
    ours = [key for key in rounds[0] if "/asyncio/" not in key[0] and not key[0].endswith("/selectors.py")]
    least = [tuple(min(one.get(key, (0, 0))[part] for one in rounds) for part in (0, 1)) for key in ours]
    return Cost(*(sum(one[part] for one in least) / messages for part in (0, 1)))


@pytest.mark.parametrize(("batch", "batches"), [(1, 25), (256, 2)])
def test_a_message_executes_no_more_than_before(tmp_path: Path, batch: int, batches: int) -> None:
    with counted(tmp_path) as proxy:
        proxy.publish(1)
        proxy.pop_and_ack(1)
        rounds = [proxy.round(batch, batches) for _ in range(WARM_UP_ROUNDS + ROUNDS)][WARM_UP_ROUNDS:]
    found = cost(rounds, batch * batches)
    print(f"in batches of {batch}: {found}")  # noqa: T201
    bound = BOUNDS.get((sys.version_info[:2], batch))
    if bound is None:
        pytest.skip(f"no figures for this version of Python yet: {found}")
    for is_, was in zip(found, bound, strict=True):
        assert was / SLACK < is_ < was * SLACK, f"in batches of {batch}: {found}, but {bound} before"
