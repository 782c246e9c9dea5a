"""The mixed load of a soak on one proxy: every kind of client, at a steady rate, with seeded choices.

It keeps no history: `make chaos` audits what happens to each message. Here each client checks only that the proxy
answers, and notes how long that took.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

TOPIC, PULLED = "soak", "soak-pulled"
GROUP, PULLED_GROUP = f"/v1/topics/{TOPIC}/groups/default", f"/v1/topics/{PULLED}/groups/default"
DEAD = f"/v1/admin/topics/{TOPIC}/groups/default/dead-letters"
PUBLISHERS, CONSUMERS = 2, 4
CLIENT_REQUESTS_MAX = 200
"""Maximum number of requests of a client before it is replaced by a new one, with new connections."""
BODY_BYTES_MAX = 2_000
BACKLOG_MAX = 1_000
"""Number of ready messages at which the publishers pause, so that a slow machine does not fill the store."""
TIMEOUT_SECONDS = 30.0
MEASURED = ("publish", "pop", "ack")
"""The operations whose latency is sampled. Pops that wait for messages, or find none, are left out."""
EXPECTED = frozenset({200, 201, 202, 204})


class Load:
    """The clients of one proxy. `take_latencies` returns what was measured since the last call, in seconds."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._chance = random.Random(seed)
        self._latencies: dict[str, list[float]] = {name: [] for name in MEASURED}
        self.requests: Counter[str] = Counter()
        self.complaints: Counter[str] = Counter()
        self.restarts = 0
        self.backlog = 0

    def take_latencies(self) -> dict[str, list[float]]:
        taken, self._latencies = self._latencies, {name: [] for name in MEASURED}
        return taken

    async def prepare(self) -> None:
        """Create the topics and groups."""
        policy = {"max_deliveries": 3, "invisibility_seconds": 2, "retry": {"initial_seconds": 0.2}}
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_SECONDS) as http:
            for topic, settings in ((TOPIC, policy), (PULLED, {})):
                for path, body in ((topic, {"queues": 4}), (f"{topic}/groups/default", settings)):
                    (await http.put(f"/v1/admin/topics/{path}", json=body)).raise_for_status()
            mode = await http.put(f"/v1/admin/topics/{PULLED}/groups/default/consume-mode", json={"mode": "pull"})
            mode.raise_for_status()

    async def run(self) -> None:
        """Run all clients until this is cancelled."""
        works: list[tuple[str, Callable[[Client], Awaitable[None]], float]] = [
            *[("publisher", publish, 0.05)] * PUBLISHERS,
            *[("consumer", consume, 0.02)] * CONSUMERS,
            ("puller", pull, 0.05),
            ("locker", lock, 0.1),
            ("redriver", redrive, 1.0),
            ("creator", create_and_delete, 0.5),
            ("looker", look, 0.5),
        ]
        async with asyncio.TaskGroup() as tasks:
            for number, (name, work, pause) in enumerate(works):
                chance = random.Random(self._chance.random())
                tasks.create_task(self._keep(f"{name}-{number}", work, pause, chance), name=f"{name}-{number}")

    async def _keep(
        self, name: str, work: "Callable[[Client], Awaitable[None]]", pause: float, chance: random.Random
    ) -> None:
        """Repeat a client's work, and replace the client from time to time."""
        while True:
            requests_max = chance.randint(CLIENT_REQUESTS_MAX // 4, CLIENT_REQUESTS_MAX)
            async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_SECONDS) as http:
                client = Client(self, http, f"{name}-{self.restarts}", chance)
                while client.requests < requests_max:
                    await work(client)
                    await asyncio.sleep(chance.uniform(0.5, 1.5) * pause)
            self.restarts += 1

    def note(self, operation: str, seconds: float, answer: httpx.Response, accepted: Sequence[int]) -> None:
        self.requests[operation] += 1
        if answer.status_code not in EXPECTED and answer.status_code not in accepted:
            self.complaints[f"{operation}: {answer.status_code} {answer.text[:200]}"] += 1
        if operation in self._latencies:
            self._latencies[operation].append(seconds)


class Client:
    """One client, with its connections."""

    def __init__(self, load: Load, http: httpx.AsyncClient, name: str, chance: random.Random) -> None:
        self.load = load
        self._http = http
        self.name = name
        self.chance = chance
        self.requests = 0
        self.held: list[str] = []

    async def send(
        self, operation: str, path: str, body: object = None, method: str = "POST", accepted: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Send a request; return the answer, or an empty one if it was refused."""
        started = time.monotonic()
        answer = await self._http.request(method, path, json=body)
        seconds = time.monotonic() - started
        self.requests += 1
        found: dict[str, Any] = answer.json() if answer.content and answer.status_code in EXPECTED else {}
        if operation == "pop" and not found.get("messages"):
            operation = "empty pop"
        self.load.note(operation, seconds, answer, accepted)
        return found


async def publish(client: Client) -> None:
    """Publish a few messages: some delayed, some ordered, some that expire, some with a dedup id."""
    if client.load.backlog > BACKLOG_MAX:
        return
    chance = client.chance
    messages: list[dict[str, Any]] = []
    for _ in range(chance.randint(1, 6)):
        message: dict[str, Any] = {"body": "x" * chance.randint(0, BODY_BYTES_MAX), "headers": {"kind": "soak"}}
        kind = chance.random()
        if kind < 0.1:
            message["delay_seconds"] = chance.uniform(0.1, 3)
        elif kind < 0.2:
            message["ordering_key"] = f"key-{chance.randint(0, 20)}"
        elif kind < 0.25:
            message["ttl_seconds"] = chance.uniform(0.5, 3)
        elif kind < 0.35:
            message["dedup_id"] = f"{chance.getrandbits(64):x}"
        messages.append(message)
    topic = PULLED if chance.random() < 0.2 else TOPIC
    await client.send("publish", f"/v1/topics/{topic}/messages", {"messages": messages})


async def consume(client: Client) -> None:
    """Pop, settle with the pop what was popped before, and settle the new messages in all ways, or not at all."""
    chance = client.chance
    waits = chance.random() < 0.5
    pop: dict[str, Any] = {"max_messages": chance.randint(1, 16), "wait_seconds": 1 if waits else 0}
    if client.held:
        pop["ack"], client.held = client.held, []
    operation = "waiting pop" if waits else "pop"
    messages = (await client.send(operation, f"{GROUP}/pop", pop)).get("messages", ())
    acks: list[str] = []
    for message in messages:
        handle, kind = message["receipt_handle"], chance.random()
        if kind < 0.02:
            continue  # its lease expires
        if kind < 0.04:
            await client.send("reject", f"{GROUP}/reject", {"entries": [{"receipt_handle": handle, "reason": "soak"}]})
        elif kind < 0.08:
            entry = {"receipt_handle": handle, "delay_seconds": chance.uniform(0, 1)}
            await client.send("release", f"{GROUP}/release", {"entries": [entry]})
        elif kind < 0.12:
            entry = {"receipt_handle": handle, "invisibility_seconds": 5}
            await client.send("extend", f"{GROUP}/extend", {"entries": [entry]})
            acks.append(handle)
        elif kind < 0.5:
            client.held.append(handle)
        else:
            acks.append(handle)
    if acks:
        await client.send("ack", f"{GROUP}/ack", {"receipt_handles": acks})


async def pull(client: Client) -> None:
    """Pull from the assigned queues and commit. Another client's generation may refuse both."""
    body = {"client_id": client.name, "supports": ["pull"]}
    assigned = await client.send("assign", f"{PULLED_GROUP}/assignment", body)
    for queue in assigned.get("queues", ()):
        own = {"client_id": client.name, "generation": assigned["generation"]}
        path = f"{PULLED_GROUP}/queues/{queue}"
        answer = await client.send("pull", f"{path}/pull", {**own, "max_messages": 64}, accepted=(409, 429))
        if messages := answer.get("messages"):
            last = {"receipt_handle": messages[-1]["receipt_handle"]}
            await client.send("commit", f"{path}/commit", {**own, **last}, accepted=(409,))


async def lock(client: Client) -> None:
    path = f"/v1/locks/soak-{client.chance.randint(0, 5)}"
    await client.send("lock", path, {"kind": "mutex"}, "PUT", accepted=(503,))
    body = {"holder": client.name, "ttl_seconds": 5, "wait_seconds": 1}
    token = (await client.send("lock", f"{path}/acquire", body, accepted=(409, 503))).get("token")
    if token is not None:
        await client.send("lock", f"{path}/renew", {"token": token}, accepted=(409,))
        await client.send("lock", f"{path}/release", {"token": token})


async def redrive(client: Client) -> None:
    await client.send("dead letters", f"{DEAD}?max_messages=10", None, "GET")
    await client.send("redrive", f"{DEAD}/redrive", {"max_messages": 1_000}, accepted=(409,))


async def create_and_delete(client: Client) -> None:
    """Use a topic of its own once, and delete it."""
    name = f"soak-own-{client.chance.getrandbits(40):x}"
    await client.send("admin", f"/v1/admin/topics/{name}", {"queues": 2}, "PUT")
    await client.send("admin", f"/v1/admin/topics/{name}/groups/one", {}, "PUT")
    await client.send("publish", f"/v1/topics/{name}/messages", {"messages": [{"body": "one"}] * 3})
    await client.send("pop", f"/v1/topics/{name}/groups/one/pop", {"max_messages": 2, "wait_seconds": 1})
    await client.send("admin", f"/v1/admin/topics/{name}", None, "DELETE")


async def look(client: Client) -> None:
    client.load.backlog = int((await client.send("look", GROUP, None, "GET")).get("ready", 0))
    await client.send("look", "/v1/admin/topics", None, "GET")
