"""Clients that retry once with another proxy if one does not answer, and record everything they receive.

Unlike `audit_load`, they accept no failures: the disturbances of the proxies are planned, so no request may fail twice,
no message may be handed out twice or missing or out of order.
"""

import itertools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import httpx

from support.proxy import plain_client

Json: TypeAlias = Any
RETRIED = (502, 503, 504)
CONSUMERS = 3
KEYS = 5
REST_SECONDS = 0.005
LEASE_SECONDS = 60
"""Lease length in seconds; longer than any test, so no lease expires."""
WAITS_SECONDS = (0, 1, 5)
EXTENDED_SHARE = 0.3


def _no_headers() -> Mapping[str, str]:
    return {}


class _Retrying:
    """A client of all proxies; each request goes to the next one, with the present `headers`."""

    def __init__(self, urls: Sequence[str], first: int, headers: Callable[[], Mapping[str, str]]) -> None:
        self._headers = headers
        self._clients = [plain_client(url, timeout_seconds=30) for url in urls]
        self._turn = itertools.count(first)
        self.failures: list[str] = []

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def post(self, path: str, body: Json) -> Json | None:
        """Return the answer of the chosen proxy, or of the next one; None if neither answered."""
        why = ""
        for _ in range(2):
            client = self._clients[next(self._turn) % len(self._clients)]
            try:
                response = client.post(path, json=body, headers=self._headers())
            except httpx.TransportError as error:
                why += f" {client.base_url}{path}: {error!r}"
                continue
            if response.is_success:
                return response.json()
            why += f" {client.base_url}{path}: {response.status_code} {response.text}"
            if response.status_code not in RETRIED:
                break
        self.failures.append(why)
        return None


class RollingLoad:
    """One publisher and some consumers in separate threads; leaving `with` waits until everything is consumed.

    `headers` returns the headers of the next request.
    """

    def __init__(
        self, urls: Sequence[str], *, topic: str, group: str, headers: Callable[[], Mapping[str, str]] = _no_headers
    ) -> None:
        self._topic = f"/v1/topics/{topic}"
        self._group = f"{self._topic}/groups/{group}"
        self._clients = [_Retrying(urls, first, headers) for first in range(1 + CONSUMERS)]
        self._done = threading.Event()
        self._all_published = threading.Event()
        self._threads = [threading.Thread(target=self._produce, args=(self._clients[0],))]
        for number, client in enumerate(self._clients[1:]):
            self._threads.append(threading.Thread(target=self._consume, args=(client, number)))
        self.published: list[str] = []
        self.delivered: list[str] = []
        """Bodies, in the order in which clients received them."""
        self.settled: Counter[str] = Counter()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._threads[0].join()
        self._all_published.set()
        for thread in self._threads:
            thread.join()
        for client in self._clients:
            client.close()

    @property
    def failures(self) -> list[str]:
        """Return the requests that failed twice, and why."""
        return [failure for client in self._clients for failure in client.failures]

    def assert_kept(self) -> None:
        """Assert that no request failed, no message is missing or duplicated, and each key's messages came in order."""
        assert not self.failures
        times = Counter(self.delivered)
        assert {body: count for body, count in times.items() if count > 1} == {}, "handed out twice"
        missing, unknown = set(self.published) - times.keys(), times.keys() - set(self.published)
        assert (missing, unknown) == (set(), set()), f"lost {missing}, or from nowhere {unknown}"
        assert self.settled.keys() <= {"extended", "acked"}, self.settled
        by_key: defaultdict[int, list[int]] = defaultdict(list)
        for body in self.delivered:
            by_key[int(body) % KEYS].append(int(body))
        assert all(numbers == sorted(numbers) for numbers in by_key.values()), "out of order"

    def _produce(self, client: _Retrying) -> None:
        for number in itertools.count():
            body = str(number)
            entry = {"body": body, "ordering_key": f"k{number % KEYS}", "dedup_id": body}
            if client.post(f"{self._topic}/messages", {"messages": [entry]}) is not None:
                self.published.append(body)
            if self._done.wait(REST_SECONDS):
                return

    def _consume(self, client: _Retrying, number: int) -> None:
        chance = random.Random(number)
        for attempt in itertools.count():
            is_last = self._all_published.is_set()
            wait_seconds = 1 if is_last else chance.choice(WAITS_SECONDS)
            pop = {
                "max_messages": 16,
                "wait_seconds": wait_seconds,
                "invisibility_seconds": LEASE_SECONDS,
                "attempt_id": f"{number}-{attempt}",
            }
            given = client.post(f"{self._group}/pop", pop)
            messages: list[Json] = [] if given is None else given["messages"]
            if messages:
                self.delivered += [message["body"] for message in messages]
                self._settle(client, [message["receipt_handle"] for message in messages], chance)
            elif is_last:
                return

    def _settle(self, client: _Retrying, handles: list[str], chance: random.Random) -> None:
        if chance.random() < EXTENDED_SHARE:
            entries = [{"receipt_handle": handle, "invisibility_seconds": LEASE_SECONDS} for handle in handles]
            self._note(client.post(f"{self._group}/extend", {"entries": entries}))
        self._note(client.post(f"{self._group}/ack", {"receipt_handles": handles}))

    def _note(self, answer: Json | None) -> None:
        if answer is not None:
            self.settled.update(result["status"] for result in answer["results"])
