"""Requests to proxies, usually over raw HTTP, that are all recorded in an `Audit`, each as a single attempt.

The client knows what a lost answer leaves open. `audit_load` and the tests decide how much is requested, and when.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import orjson

from support.audit import PLAIN, Audit, DeadLetter, Delivered, Lease, Publish, Seen, Traits, Verb, now

POLL_SECONDS = 0.02
RETRY_SECONDS = 0.03
REQUEST_TIMEOUT_SECONDS = 60.0
"""Seconds that a client waits; longer than any pause of a proxy, because other tests cover clients that give up."""
FILLER = "0123456789abcdef" * 64
LETTERS_PER_PAGE = 256
NOT_SENT: dict[str, Any] = {}


async def until(condition: Callable[[], bool], *, timeout_seconds: float, what: Callable[[], str] | str) -> None:
    """Return as soon as `condition` holds. Raises: TimeoutError naming `what`."""
    deadline = now() + timeout_seconds
    while not condition():
        if now() > deadline:
            raise TimeoutError(f"waited {timeout_seconds:g} s for {what if isinstance(what, str) else what()}")
        await asyncio.sleep(POLL_SECONDS)


class AuditedClient(ABC):
    """Requests that are recorded, each as a single attempt. A subclass decides how they are sent."""

    def __init__(self, audit: Audit, *, topic: str = "audit", group: str = "default") -> None:
        self.audit = audit
        self.refusals: dict[str, int] = {}
        """Number of 503 answers by `code`."""
        self.last_redrive: object = None
        """The latest answer to a redrive; None if there was none."""
        self.topic = topic
        self._topic_path = f"/v1/topics/{topic}"
        self._group_path = f"{self._topic_path}/groups/{group}"
        self._admin_path = f"/v1/admin/topics/{topic}"
        self._group = group

    async def publish(
        self, messages: Sequence[tuple[str, str]], traits: Sequence[Traits] | None = None, *, again: bool = False
    ) -> list[Publish]:
        """Publish (message id, body). A message without an answer may be stored. If all have dedup_ids, they are
        sent until each is published, and with ``again`` once more.
        """
        traits = traits or [PLAIN] * len(messages)
        publishes = self.audit.publishing([(message_id, len(body)) for message_id, body in messages], traits)
        entries = [_entry(*message, one) for message, one in zip(messages, traits, strict=True)]
        path = f"{self._topic_path}/messages"
        answer = await self.post(path, {"messages": entries})
        if all(one.dedup_id for one in traits):
            while not answer or again or any(result["status"] == "failed" for result in answer["results"]):
                if answer:
                    again = False
                    self.audit.publish_answered(publishes, [result["status"] for result in answer["results"]])
                for publish in publishes:
                    publish.requests += 1
                answer = await self.post(path, {"messages": entries})
        if answer is NOT_SENT:
            self.audit.not_published(publishes)
        elif answer is not None:
            self.audit.published(publishes, [result["status"] for result in answer["results"]])
        return publishes

    async def pop(
        self,
        name: str,
        *,
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        seconds: float = 30.0,
        attempt_id: str | None = None,
        color: str | None = None,
    ) -> list[Lease] | None:
        """Return the leases of one pop; None if there was no answer."""
        request: dict[str, object] = {
            "max_messages": max_messages,
            "wait_seconds": wait_seconds,
            "invisibility_seconds": seconds,
        }
        if attempt_id is not None:
            request["attempt_id"] = attempt_id
        if color is not None:
            request["filter"] = {"color": color}
        pop = self.audit.popping(name, seconds, attempt_id=attempt_id)
        answer = await self.post(f"{self._group_path}/pop", request)
        if answer is NOT_SENT:
            self.audit.not_popped(pop)
        if not answer:
            return None
        return self.audit.popped(pop, [_delivered(message) for message in answer["messages"]])

    async def settle(self, verb: Verb, leases: Sequence[Lease], seconds: float = 0.0) -> list[str] | None:
        """Return the statuses of one settlement request; None if there was no answer. `seconds` is the extension or
        the delay.
        """
        settlements = [lease.begin(verb, seconds) for lease in leases]
        handles = [lease.receipt_handle for lease in leases]
        body: dict[str, object]
        if verb is Verb.ACK:
            body = {"receipt_handles": handles}
        else:
            field = {Verb.EXTEND: {"invisibility_seconds": seconds}, Verb.RELEASE: {"delay_seconds": seconds}}
            body = {"entries": [{"receipt_handle": handle, **field.get(verb, {})} for handle in handles]}
        answer = await self.post(f"{self._group_path}/{verb}", body)
        if answer is NOT_SENT:
            self.audit.not_settled(leases, settlements)
        if not answer:
            return None
        statuses: list[str] = [result["status"] for result in answer["results"]]
        for lease, settlement, status in zip(leases, settlements, statuses, strict=True):
            # "unavailable" leaves open whether a rejection has begun.
            self.audit.settled(lease, settlement, "" if status == "unavailable" else status)
        return statuses

    async def settle_surely(self, verb: Verb, leases: Sequence[Lease], seconds: float = 0.0) -> list[str]:
        """Repeat the request until there is an answer, even while the proxy is down."""
        while (statuses := await self.settle(verb, leases, seconds)) is None:
            pass
        return statuses

    async def dead_letters(self) -> list[DeadLetter]:
        """Return all dead letters of the group in the order in which they died; repeat the request until it is
        answered.
        """
        path = f"{self._admin_path}/groups/{self._group}/dead-letters?max_messages={LETTERS_PER_PAGE}&body_bytes_max=0"
        letters: list[DeadLetter] = []
        after = ""
        while True:
            page = await self.request("GET", path + after)
            if not page:
                continue
            letters += [_dead_letter(letter) for letter in page["messages"]]
            if "next" not in page:
                return letters
            after = f"&after={quote(page['next'], safe='')}"

    async def redrive(self, target_topic: str, *, wait_seconds: float, rate: float | None = None) -> str:
        """Request one redrive of all dead letters; return its state, "conflict" while another one runs, "" if
        unknown.
        """
        asked = {"target_topic": target_topic, "wait_seconds": wait_seconds, "rate_per_second": rate}
        body = {name: value for name, value in asked.items() if value is not None}
        self.last_redrive = answer = await self.post(
            f"{self._admin_path}/groups/{self._group}/dead-letters/redrive", body
        )
        return answer["state"] if answer else ""

    async def note_dead_letters(self, *, looks_max: int, look_seconds: float) -> None:
        """Read the dead letters for the audit, once no more arrive."""
        last, seen = -1, await self.look()
        for _ in range(looks_max):
            if seen.dead == len(seen.letters) == last:
                break
            last = len(seen.letters)
            await asyncio.sleep(look_seconds)
            seen = await self.look()
        self.audit.dead_letters = seen.letters
        self.audit.seen.append(seen)

    async def look(self) -> Seen:
        """Return the current answers of `GET S` and of the list of dead letters."""
        sent = now()
        state = await self.state()
        letters = await self.dead_letters()
        return Seen(sent, now(), state["ready"], state["in_flight"], state["delayed"], state["dead"], letters)

    async def state(self) -> dict[str, Any]:
        """Return the answer of `GET S`; repeat the request until it is answered."""
        while not (state := await self.request("GET", self._group_path)):
            pass
        return state

    async def post(self, path: str, body: object) -> dict[str, Any] | None:
        return await self.request("POST", path, body)

    @abstractmethod
    async def request(self, method: str, path: str, body: object = None) -> dict[str, Any] | None:
        """Return the answer's content, or None after a short pause if there is no answer or popgate asks to retry
        later.

        Returns NOT_SENT if the request could not be sent, so that it certainly had no effect.
        """


class Client(AuditedClient):
    """Requests to one proxy. A context manager that closes its connections."""

    def __init__(self, url: str, audit: Audit, *, topic: str = "audit", group: str = "default") -> None:
        super().__init__(audit, topic=topic, group=group)
        self.on_success: Callable[[str], None] | None = None
        """Called with the path of each request that was answered with 200, before anything else happens."""
        self.http = http_client(url, timeout_seconds=REQUEST_TIMEOUT_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def create(self, *, queues: int = 3, **policy: object) -> None:
        """Create the topic and the group; unless told otherwise, the policy never dead-letters by delivery count."""
        for path, body in (
            (self._admin_path, {"queues": queues}),
            (f"{self._admin_path}/groups/{self._group}", {"max_deliveries": None, **policy}),
        ):
            answer = await self.http.put(path, json=body)
            assert answer.is_success, answer.text

    async def declare_again(self) -> None:
        """Create the group again, which declares queues that are missing."""
        answer = await self.http.put(f"{self._admin_path}/groups/{self._group}", json={})
        assert answer.is_success, answer.text

    async def request(self, method: str, path: str, body: object = None) -> dict[str, Any] | None:
        try:
            answer = await self._http().request(method, path, content=None if body is None else orjson.dumps(body))
        except httpx.ConnectError:
            await asyncio.sleep(RETRY_SECONDS)
            return NOT_SENT
        except httpx.HTTPError:
            await asyncio.sleep(RETRY_SECONDS)
            return None
        if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            if int(answer.headers.get("retry-after", 0)) < 1:
                self.audit.complain(f"{path}: 503 without Retry-After: {answer.text}")
            code = str(answer.json().get("code"))
            self.refusals[code] = self.refusals.get(code, 0) + 1
            await asyncio.sleep(RETRY_SECONDS)
            return None
        if answer.status_code == HTTPStatus.CONFLICT and path.endswith("/redrive"):
            return {"state": "conflict"}
        if answer.status_code not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            self.audit.complain(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
            await asyncio.sleep(RETRY_SECONDS)
            return None
        if self.on_success is not None:
            self.on_success(path)
        content: dict[str, Any] = orjson.loads(answer.content)
        return content

    def _http(self) -> httpx.AsyncClient:
        """Return the connection for the next request."""
        return self.http


class RoamingClient(Client):
    """Requests to several proxies; each goes to a random one, so a retry usually reaches a different proxy.

    A request gives up after `timeout_seconds` without an answer. A hanging proxy may still carry it out later.
    """

    def __init__(
        self,
        urls: Sequence[str],
        audit: Audit,
        chance: random.Random,
        *,
        timeout_seconds: float,
        topic: str = "audit",
    ) -> None:
        super().__init__(urls[0], audit, topic=topic)
        self._all = [http_client(url, timeout_seconds=timeout_seconds) for url in urls]
        self._chance = chance

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        for http in self._all:
            await http.aclose()

    def _http(self) -> httpx.AsyncClient:
        return self._chance.choice(self._all)


def http_client(url: str, *, timeout_seconds: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=timeout_seconds,
        trust_env=False,
        verify=False,  # plain http: reading the machine's certificates takes longer than most requests
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


def _entry(message_id: str, body: str, traits: Traits) -> dict[str, object]:
    entry: dict[str, object] = {"message_id": message_id, "body": body}
    if traits.color is not None:
        entry["headers"] = {"color": traits.color}
    for name in ("ordering_key", "delay_seconds", "dedup_id"):
        if value := getattr(traits, name):
            entry[name] = value
    if traits.ttl_seconds < float("inf"):
        entry["ttl_seconds"] = traits.ttl_seconds
    return entry


def message_body(message_id: str, body_bytes: int) -> str:
    """Return a body that repeats its message's id throughout, so that a wrong or truncated body is recognized."""
    return f"{message_id} {FILLER * (body_bytes // len(FILLER) + 1)}"[: max(body_bytes, len(message_id) + 1)]


def _dead_letter(letter: dict[str, Any]) -> DeadLetter:
    return DeadLetter(letter["message_id"], letter["id"], letter["cause"], letter["delivery_count"])


def _delivered(message: dict[str, Any]) -> Delivered:
    message_id, body = message["message_id"], message.get("body", "")
    is_whole = body == message_body(message_id, len(body))
    return Delivered(message_id, message["receipt_handle"], message["delivery_count"], len(body) if is_whole else -1)
