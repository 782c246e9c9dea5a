"""Pop and pull clients that work on one group in any consume mode, and the fate of each message.

Every client repeats refused requests, settles everything it gets, and records each hand-out and the answer to its
settlement. A receipt handle that is given to the same client again is no new hand-out.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from support.audit_client import http_client

Json: TypeAlias = Any

GROUP = "g"
DONE = frozenset({"acked", "already_acked", "committed"})
REFUSED = frozenset({"expired", "fenced", "wrong_mode"})
REST_SECONDS = 0.03
PUBLISH_SECONDS = 0.25
BATCH = 8


@dataclass(slots=True)
class HandOut:
    """One message in one lease. ``answers``: to its settlements."""

    client: str
    number: int
    """Position of this hand-out among all hand-outs."""
    answers: list[str] = field(default_factory=list[str])

    @property
    def is_done(self) -> bool:
        return not DONE.isdisjoint(self.answers)


class Record:
    """The promised messages, and the clients that got them."""

    def __init__(self) -> None:
        self.promised: set[str] = set()
        self.hand_outs: dict[str, dict[str, HandOut]] = {}
        """By message, and by receipt handle."""
        self.count = 0
        self.refusals: Counter[str] = Counter()

    def given(self, client: str, messages: Sequence[Json]) -> list[HandOut]:
        found: list[HandOut] = []
        for message in messages:
            self.count += 1
            of_message = self.hand_outs.setdefault(message["body"], {})
            found.append(of_message.setdefault(message["receipt_handle"], HandOut(client, self.count)))
        return found

    def done_by(self, kind: str) -> int:
        """Return how many messages were settled by clients whose names begin with this text."""
        return sum(
            one.is_done and one.client.startswith(kind) for many in self.hand_outs.values() for one in many.values()
        )

    def unsettled(self) -> set[str]:
        """Return promised messages that no client has settled; once nothing is left, they are lost."""
        done = {body for body, many in self.hand_outs.items() if any(one.is_done for one in many.values())}
        return self.promised - done

    def settled_twice(self) -> list[str]:
        return [body for body, many in self.hand_outs.items() if sum(one.is_done for one in many.values()) > 1]

    def repeated(self) -> dict[str, list[HandOut]]:
        """Return the messages that were handed out more than once, in order."""
        return {
            body: sorted(many.values(), key=lambda one: one.number)
            for body, many in self.hand_outs.items()
            if len(many) > 1
        }


class ModeLoad:
    """Publishers, poppers and pull clients, one of each through every proxy. ``run`` ends soon after ``finish``."""

    def __init__(self, urls: Sequence[str], topic: str, chance: random.Random, *, work_seconds: float) -> None:
        self.record = Record()
        self._clients = [http_client(url, timeout_seconds=40.0) for url in urls]
        self._path = f"/v1/topics/{topic}"
        self._group = f"{self._path}/groups/{GROUP}"
        self._chance = chance
        self._work_seconds = work_seconds
        self._publishing = self._working = True
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(self._clients):
                for name, work in (("publisher", self._publish), ("popper", self._pop), ("puller", self._pull)):
                    self._tasks.append(group.create_task(work(f"{name}-{number}", client)))
        for client in self._clients:
            await client.aclose()

    async def finish(self, seconds: float) -> None:
        """Stop publishing, and return when everything is settled, or after a time limit."""
        self._publishing = False
        deadline = asyncio.get_running_loop().time() + seconds
        while self.record.unsettled() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  # it is counted
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # duplicates would come now
        self._working = False

    # -- clients ----------------------------------------------------------------------------------------------------

    async def _publish(self, name: str, client: httpx.AsyncClient) -> None:
        number = 0
        while self._publishing:
            bodies = [f"{name}-{number + place}" for place in range(10)]
            number += len(bodies)
            body = {"messages": [{"body": one} for one in bodies]}
            answer = await self._ask(client, f"{self._path}/messages", body)
            if answer is not None:
                results = zip(bodies, answer["results"], strict=True)
                self.record.promised.update(one for one, result in results if result["status"] == "published")
            await asyncio.sleep(PUBLISH_SECONDS)

    async def _pop(self, name: str, client: httpx.AsyncClient) -> None:
        while self._working:
            asked = {"max_messages": BATCH, "wait_seconds": 1, "invisibility_seconds": 30}
            answer = await self._ask(client, f"{self._group}/pop", asked)
            if answer is None or not answer["messages"]:
                continue
            messages = answer["messages"]
            given = self.record.given(name, messages)
            await self._work()
            handles = {"receipt_handles": [one["receipt_handle"] for one in messages]}
            while (settled := await self._ask(client, f"{self._group}/ack", handles)) is None:
                pass
            for one, result in zip(given, settled["results"], strict=True):
                one.answers.append(result["status"])

    async def _pull(self, name: str, client: httpx.AsyncClient) -> None:
        known: Json = {}
        loop = asyncio.get_running_loop()
        ask_at = 0.0
        while self._working:
            if loop.time() >= ask_at:
                shown = {"generation": known["generation"]} if known else {}
                asked = {"client_id": name, "supports": ["pop", "pull"], **shown}
                known = await self._ask(client, f"{self._group}/assignment", asked) or known
                ask_at = loop.time() + min(0.3, known.get("heartbeat_seconds", 0.3))
            if not known or not known["queues"]:
                await asyncio.sleep(REST_SECONDS)
                continue
            for queue in known["queues"]:
                if not await self._pull_from(name, client, queue, known["generation"]):
                    ask_at = 0.0
                    break
        await client.delete(f"{self._group}/assignment/{name}")

    async def _pull_from(self, name: str, client: httpx.AsyncClient, queue: int, generation: int) -> bool:
        """Tell whether the client may continue with its present knowledge."""
        path = f"{self._group}/queues/{queue}"
        who = {"client_id": name, "generation": generation}
        answer = await self._ask(client, f"{path}/pull", {**who, "max_messages": BATCH, "wait_seconds": 0.1})
        if answer is None:
            return False
        messages = answer["messages"]
        if not messages:
            return True
        given = self.record.given(name, messages)
        await self._work()
        last = {**who, "receipt_handle": messages[-1]["receipt_handle"]}
        while True:
            response = await client.post(f"{path}/commit", json=last)
            if response.status_code != 503:
                break
            await asyncio.sleep(REST_SECONDS)
        status = "committed" if response.is_success else str(response.json()["code"])
        for one in given:
            one.answers.append(status)
        return response.is_success

    async def _work(self) -> None:
        await asyncio.sleep(self._chance.random() * self._work_seconds)

    async def _ask(self, client: httpx.AsyncClient, path: str, body: Json) -> Json | None:
        """Return the answer; None, after a pause, if the request is refused for now."""
        response = await client.post(path, json=body)
        if response.is_success:
            return response.json()
        code = response.json()["code"]
        assert response.status_code == 503 or code in REFUSED, f"{path}: {response.status_code} {response.text}"
        self.record.refusals[code] += 1
        await asyncio.sleep(REST_SECONDS)
        return None
