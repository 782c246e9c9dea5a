"""A pull client as a separate process that may be killed and paused, and records every answer it receives.

    python -m support.pull_worker LOG TOPIC GROUP NAME PATIENCE URL [URL ...]

It pulls, works for a moment, and commits, queue after queue; it writes one line for each answer before it continues. Up
to PATIENCE pulls of a queue are committed together. If a proxy does not answer, it uses the next one.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from support.processes import Server
from support.proxy import plain_client, python_program

Json: TypeAlias = Any
WORK_SECONDS = 0.01
BATCH = 5


class PullWorker(Server):
    """One such process. `log` is the file it writes."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 20

    def __init__(self, folder: Path, name: str, group_path: str, urls: list[str], *, patience: int = 1) -> None:
        self.log = folder / f"{name}.jsonl"
        *_, topic, _, group = group_path.split("/")
        program = python_program("-m", "support.pull_worker", str(self.log), topic, group, name, str(patience), *urls)
        tests = str(Path(__file__).parents[1])
        super().__init__(name, folder / name, arguments=program, environment={"PYTHONPATH": tests})

    def _answers(self) -> bool:
        return self.log.exists()

    def lines(self) -> list[Json]:
        """Return all lines it wrote, without an incomplete last line left by a kill."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]


class _Worker:
    def __init__(self, log: Path, path: str, name: str, urls: list[str]) -> None:
        self._log = log.open("a", buffering=1)
        self._path = path
        self._name = name
        self._clients = [plain_client(url, timeout_seconds=8) for url in urls]
        self.told: Json = {}
        self.beat_at = 0.0

    def post(self, path: str, body: Json) -> httpx.Response | None:
        """Return the answer; None if there was none, or the request must be repeated."""
        try:
            response = self._clients[0].post(f"{self._path}/{path}", json={"client_id": self._name, **body})
        except httpx.HTTPError:
            self._clients.append(self._clients.pop(0))
            return None
        return None if response.status_code >= 500 else response

    def ask(self) -> None:
        shown = {"generation": self.told["generation"]} if self.told else {}
        response = self.post("assignment", {"supports": ["pull"], **shown})
        if response is None or not response.is_success:
            time.sleep(0.1)
            return
        self.told = response.json()
        self.beat_at = time.monotonic() + self.told["heartbeat_seconds"]
        self.write("told", generation=self.told["generation"], queues=self.told["queues"])

    def on_queue(self, verb: str, queue: int, **fields: object) -> Json | None:
        body = {"generation": self.told["generation"], **fields}
        response = self.post(f"queues/{queue}/{verb}", body)
        if response is not None and response.is_success:
            return response.json()
        if response is not None:
            self.beat_at = 0.0
        return None

    def pull(self, queue: int, patience: int) -> None:
        last: Json = None
        for _ in range(patience):
            after = {} if last is None else {"after": last["receipt_handle"]}
            asked = time.time()
            answer = self.on_queue("pull", queue, max_messages=BATCH, wait_seconds=0.2, **after)
            if answer is None or not answer["messages"]:
                break
            bodies = [message["body"] for message in answer["messages"]]
            self.write("got", queue=queue, bodies=bodies, asked=asked, after=None if last is None else last["body"])
            last = answer["messages"][-1]
            time.sleep(WORK_SECONDS)
        if last is None:
            return
        asked = time.time()
        self.write("commits", queue=queue, body=last["body"], asked=asked)
        answer = self.on_queue("commit", queue, receipt_handle=last["receipt_handle"])
        if answer is not None:
            self.write("committed", queue=queue, body=last["body"], count=answer["committed"], asked=asked)

    def write(self, kind: str, **fields: object) -> None:
        told = self.told.get("generation")
        line = {"kind": kind, "by": self._name, "generation": told, "answered": time.time(), **fields}
        self._log.write(json.dumps(line) + "\n")


def _main(log: str, topic: str, group: str, name: str, patience: str, *urls: str) -> None:
    worker = _Worker(Path(log), f"/v1/topics/{topic}/groups/{group}", name, [*urls])
    while True:
        worker.ask()
        for queue in [*worker.told.get("queues", ())]:
            if time.monotonic() >= worker.beat_at:
                break
            worker.pull(queue, int(patience))
        if not worker.told.get("queues"):
            time.sleep(0.2)


if __name__ == "__main__":
    _main(*sys.argv[1:])
