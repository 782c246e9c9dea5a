"""The calls of the client, without I/O: what to send, when to repeat it, and how the answers become a result.

Theory of operation. A call is a generator, an *exchange*: it yields an `Attempt`, receives the reply, and returns the
result. A driver with a socket runs it: wait `delay_seconds`, send, pass the reply back. The synchronous and the asyncio
client are two such drivers of ten lines each, and share everything here: chunking, repeats, parsing.

Calls that are safe to repeat are repeated for at most `retry_seconds_max` from the first failure, after a pause of at
least Retry-After:

- pop: always has an `attempt_id`; a repeat gets the same leases;
- ack, release, extend, reject, GET, PUT: idempotent; only the entries answered `unavailable` are sent again;
- publish and DELETE: only if the request certainly did not arrive, or if popgate itself answered 503 or 429
  (`limit_exceeded`) and knows that it did nothing. A 503 from a gateway proves nothing: Envoy also sends one if the
  connection broke after it had forwarded the request. A publish in which every message has a `dedup_id` is repeated
  like a pop. Single messages with a `dedup_id` are also repeated if popgate answers that their outcome is unknown.
"""

import math
import random
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import httpx

from popgate_client.calling import Handler
from popgate_client.errors import PopgateError, RetryLater, ServerUnreachable
from popgate_client.facts import FactLogger, cause_of
from popgate_client.message import OutgoingMessage, PublishResult, SettleEntry, SettleResult, Verb
from popgate_client.outages import Outage
from popgate_client.retrying import Patience
from popgate_client.wire import (
    HeaderFilter,
    JsonObject,
    MessageT,
    Reply,
    Request,
    T,
    accepted,
    chunks,
    encode,
    outgoing_entry,
    pop_request,
    publish_request,
    read_answer,
    read_invisibility_seconds,
    read_messages,
    read_object,
    read_published,
    read_settled,
    read_topics,
    retry_after_seconds,
    settle_entry,
    settle_request,
    subscription_path,
)

logger = FactLogger(__name__)

RETRY_SECONDS_MAX = 30.0
UNAVAILABLE = SettleResult(status="unavailable")
_UNDECIDED = frozenset({"not_confirmed", "state_unavailable"})
"""Codes of messages that may be stored, or that can be stored soon; if they have a `dedup_id`, they are published
again."""
_LIMITED = "limit_exceeded"
_REFUSALS = frozenset({"broker_unavailable", "state_unavailable", "unavailable", "not_ready", "lock_held", _LIMITED})
"""Codes of popgate's 503 and 429 answers to requests that it did not begin."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to send after a delay. The exchange that yielded it receives the reply."""

    request: Request
    delay_seconds: float = 0.0


Exchange: TypeAlias = Generator[Attempt, Reply, T]


class Traces(Protocol):
    """What `popgate_client.tracing.Tracing` does. This module does not import it, because it needs an extra."""

    def headers(self) -> Mapping[str, str]: ...

    def sending(
        self, topic: str, messages: Sequence[OutgoingMessage | str | bytes]
    ) -> AbstractContextManager[
        tuple[Sequence[OutgoingMessage | str | bytes], Callable[[Sequence[PublishResult]], None]]
    ]: ...

    def processed(self, handler: Handler) -> Handler: ...


def new_attempt_id() -> str:
    """Return an ID that no other pop has."""
    return secrets.token_hex(16)


class Exchanges:
    """Makes the exchanges of one client. Holds no connection, and no state between calls."""

    def __init__(
        self,
        *,
        retry_seconds_max: float = RETRY_SECONDS_MAX,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        tracing: "Traces | None" = None,
    ) -> None:
        self._tracing = tracing
        self._outage = Outage(logger, clock)
        self._retry_seconds_max = retry_seconds_max
        self._clock = clock
        self._chance = chance or random.Random()

    def publish(self, topic: str, messages: Sequence[OutgoingMessage | str | bytes]) -> Exchange[list[PublishResult]]:
        """Publish messages; return one result per message, in order."""
        if self._tracing is None:
            return (yield from self._publish(topic, messages))
        with self._tracing.sending(topic, messages) as (traced, took):
            results = yield from self._publish(topic, traced)
            took(results)
            return results

    def _publish(self, topic: str, messages: Sequence[OutgoingMessage | str | bytes]) -> Exchange[list[PublishResult]]:
        """Publish messages.

        If a chunk fails after an earlier one is stored, its failure is reported in the results and not raised,
        because the caller would publish the stored messages again. Later chunks are not sent, to keep the order.
        """
        entries = [outgoing_entry(message) for message in messages]
        results: list[PublishResult] = []
        for chunk in chunks(entries):
            deduplicated = [
                isinstance(message, OutgoingMessage) and bool(message.dedup_id) for message in messages[chunk]
            ]
            try:
                results += yield from self._publish_chunk(topic, entries[chunk], deduplicated)
            except PopgateError as error:
                if not results:
                    raise
                results += [_unpublished(_chunk_code(error), error.detail)] * len(entries[chunk])
                results += [_unpublished("not_sent", "an earlier part failed")] * (len(entries) - len(results))
                break
        return results

    def pop(
        self,
        topic: str,
        group: str,
        *,
        make: Callable[..., MessageT],
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        invisibility_seconds: float | None = None,
        attempt_id: str | None = None,
        client_id: str | None = None,
        filter: HeaderFilter | None = None,
    ) -> Exchange[list[MessageT]]:
        """Return the leased messages, each made by `make` (`Message` or a subclass)."""
        messages, _ = yield from self.ack_and_pop(
            topic,
            group,
            (),
            make=make,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            invisibility_seconds=invisibility_seconds,
            attempt_id=attempt_id or new_attempt_id(),
            client_id=client_id,
            filter=filter,
        )
        return messages

    def ack_and_pop(
        self,
        topic: str,
        group: str,
        receipt_handles: Sequence[str],
        *,
        make: Callable[..., MessageT],
        max_messages: int,
        wait_seconds: float,
        invisibility_seconds: float | None,
        attempt_id: str,
        client_id: str | None,
        filter: HeaderFilter | None,
    ) -> Exchange[tuple[list[MessageT], list[SettleResult]]]:
        """Return the leased messages, and one result for each of the acks, which the server makes first.

        With `receipt_handles`, the server must have the feature `settle_on_pop`.
        """
        request = pop_request(
            topic,
            group,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            invisibility_seconds=invisibility_seconds,
            attempt_id=attempt_id,
            client_id=client_id,
            filter=filter,
            ack=receipt_handles,
        )
        answer = yield from self._send(request, is_passing)
        acked = read_settled(answer, len(receipt_handles), field="ack") if receipt_handles else []
        return read_messages(answer, topic, group, make), acked

    def settle(self, topic: str, group: str, verb: Verb, leases: Sequence[SettleEntry]) -> Exchange[list[SettleResult]]:
        """Apply the verb; return one result per lease, in order. RetryLater is raised only if no entry was answered."""
        entries = [settle_entry(verb, lease) for lease in leases]
        results: list[SettleResult] = []
        for chunk in chunks(entries):
            try:
                results += yield from self._settle_chunk(topic, group, verb, entries[chunk])
            except RetryLater:
                if not results:
                    raise
                results += [UNAVAILABLE] * (len(entries) - len(results))
                break
        return results

    def repeatable(self, request: Request, *, retry_seconds_max: float = math.inf) -> Exchange[httpx.Response]:
        """Send a request that is safe to repeat, for at most this long, and return the answer."""
        return self._send(request, is_passing, self.patience(retry_seconds_max))

    def read(self, path: str) -> Exchange[JsonObject]:
        """Send a GET; return the JSON object of the answer."""
        return (yield from self.read_as(path, dict))

    def read_as(self, path: str, reader: Callable[[JsonObject], T]) -> Exchange[T]:
        """Send a GET; return what `reader` finds in the JSON object of the answer."""
        return read_answer((yield from self._send(Request(method="GET", path=path), is_passing)), reader)

    def invisibility_seconds(self, topic: str, group: str) -> Exchange[float]:
        """Return the length of a lease if a pop does not specify it."""
        request = Request(method="GET", path=subscription_path(topic, group))
        return read_invisibility_seconds((yield from self._send(request, is_passing)))

    def topics(self) -> Exchange[list[JsonObject]]:
        """Return the list of topics."""
        return read_topics((yield from self._send(Request(method="GET", path="/v1/admin/topics"), is_passing)))

    def post(self, path: str) -> Exchange[JsonObject]:
        """Send a POST without a body to an idempotent path; return the JSON object of the answer."""
        return read_object((yield from self._send(Request(method="POST", path=path), is_passing)))

    def put(self, path: str, settings: JsonObject) -> Exchange[JsonObject]:
        """Send a PUT; return the JSON object as the server stored it."""
        request = Request(method="PUT", path=path, content=encode(settings))
        return read_object((yield from self._send(request, is_passing)))

    def delete(self, path: str) -> Exchange[None]:
        """Send a DELETE. It is repeated only if it was not carried out, because a second one would find nothing."""
        yield from self._send(Request(method="DELETE", path=path), _did_not_act)

    def _publish_chunk(
        self, topic: str, entries: Sequence[bytes], deduplicated: Sequence[bool]
    ) -> Exchange[list[PublishResult]]:
        """Publish a chunk. Messages without a known outcome are published again if they are `deduplicated`: that can't
        store them twice."""
        patience = self.patience()
        repeatable = is_passing if all(deduplicated) else _did_not_act
        answer = yield from self._send(publish_request(topic, entries), repeatable, patience)
        results = read_published(answer, len(entries))
        while undecided := [index for index, one in enumerate(results) if deduplicated[index] and _is_undecided(one)]:
            pause = patience.pause_seconds(retry_after_seconds(answer))
            if pause is None:
                break
            request = publish_request(topic, [entries[index] for index in undecided])
            try:
                answer = yield from self._send(request, is_passing, patience, delay_seconds=pause)
            except PopgateError:  # the first answer is still valid
                break
            for index, result in zip(undecided, read_published(answer, len(undecided)), strict=True):
                results[index] = result
        return results

    def act(self, request: Request) -> Exchange[JsonObject]:
        """Send a POST that is not idempotent; return the JSON object of the answer. It is repeated only if it was not
        carried out."""
        return read_object((yield from self._send(request, _did_not_act)))

    def cancel(self, path: str) -> Exchange[JsonObject]:
        """Send an idempotent DELETE; return the JSON object of the answer, which describes what remains."""
        return read_object((yield from self._send(Request(method="DELETE", path=path), is_passing)))

    def _settle_chunk(
        self, topic: str, group: str, verb: Verb, entries: Sequence[bytes]
    ) -> Exchange[list[SettleResult]]:
        results = [UNAVAILABLE] * len(entries)
        undecided = list(range(len(entries)))
        patience = self.patience()
        pause: float | None = 0.0
        while undecided and pause is not None:
            request = settle_request(topic, group, verb, [entries[index] for index in undecided])
            try:
                answer = yield from self._send(request, is_passing, patience, delay_seconds=pause)
            except RetryLater:
                if len(undecided) == len(entries):
                    raise
                break
            for index, result in zip(undecided, read_settled(answer, len(undecided)), strict=True):
                results[index] = result
            undecided = [index for index in undecided if results[index].status == UNAVAILABLE.status]
            pause = patience.pause_seconds(retry_after_seconds(answer)) if undecided else None
        return results

    def _send(
        self,
        request: Request,
        is_repeatable: Callable[[PopgateError], bool],
        patience: Patience | None = None,
        *,
        delay_seconds: float = 0.0,
    ) -> Exchange[httpx.Response]:
        patience, attempt = patience or self.patience(), 0
        if self._tracing is not None:
            request = replace(request, headers=self._tracing.headers())
        while True:
            reply = yield Attempt(request, delay_seconds)
            try:
                answer = accepted(reply)
            except PopgateError as error:
                if not is_repeatable(error):
                    raise
                asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
                pause = patience.pause_seconds(asked_for)
                if pause is None:
                    raise
                delay_seconds, attempt = pause, attempt + 1
                facts = {"method": request.method, "path": request.path, "attempt": attempt}
                facts |= {"again_in_seconds": round(pause, 2), "cause": cause_of(error)}
                self._outage.failed("a call failed and will be repeated", facts)
            else:
                self._outage.succeeded()
                return answer

    def patience(self, seconds_max: float = math.inf) -> Patience:
        """Return the patience for one call: at most `seconds_max`."""
        return Patience(seconds_max=min(self._retry_seconds_max, seconds_max), clock=self._clock, chance=self._chance)


def is_passing(error: PopgateError) -> bool:
    """Whether the same request may succeed soon."""
    return isinstance(error, ServerUnreachable) or error.status == 503 or error.code == _LIMITED


def _did_not_act(error: PopgateError) -> bool:
    """Whether the same request may succeed soon, and this one had no effect."""
    if not isinstance(error, RetryLater) or error.outcome_unknown:
        return False
    return isinstance(error, ServerUnreachable) or (error.status in (429, 503) and error.code in _REFUSALS)


def _chunk_code(error: PopgateError) -> str:
    """Return the code for the result of one message; it must not hide that the message may be stored."""
    if isinstance(error, ServerUnreachable):
        return "server_unreachable"
    return "not_confirmed" if isinstance(error, RetryLater) and error.outcome_unknown else error.code


def _is_undecided(result: PublishResult) -> bool:
    return result.error is not None and result.error.get("code") in _UNDECIDED


def _unpublished(code: str, detail: str) -> PublishResult:
    return PublishResult(status="failed", error={"code": code, "detail": detail})
