"""The synchronous client. Owns one httpx connection pool and drives the exchanges of `exchange` over it.

It decides nothing: `exchange` and `wire` decide what is sent, repeated and read. `async_client` is its twin.
"""

import json
import os
import ssl
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from popgate_client import held_lock
from popgate_client.administration import AdminCalls
from popgate_client.assignments import PullCalls
from popgate_client.exchange import RETRY_SECONDS_MAX, Attempt, Exchange, Exchanges, Traces
from popgate_client.lease_groups import LeaseStream, list_exchange
from popgate_client.locks import TTL_SECONDS, LockKind, force_release_request, holders_of, list_locks, put_lock
from popgate_client.message import (
    Leases,
    Message,
    PublishResult,
    SettleEntry,
    SettleResult,
    Verb,
    settle_entries,
)
from popgate_client.publishing import Deserializer, PublishOptions, Serializer, in_json, outgoing, raise_for_failures
from popgate_client.tokens import TokenSource
from popgate_client.transport import call, connection
from popgate_client.wire import (
    HeaderFilter,
    JsonObject,
    Reply,
    T,
    lock_path,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedMessage(Message):
    """A message that can settle itself. Each verb raises LeaseLost if the lease has ended, RetryLater if the server
    could not decide, and otherwise what the call of the same name on `Client` raises."""

    client: "Client" = field(repr=False, compare=False)

    def ack(self) -> None:
        """Acknowledge the message: it is never delivered again."""
        self.client.ack(self.topic, self.group, self)[0].raise_for_status()

    def release(
        self, delay_seconds: float | None = None, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """Make the message visible again; see `Client.release`."""
        self.client.release(self.topic, self.group, self, delay_seconds, reason, error=error)[0].raise_for_status()

    def extend(self, invisibility_seconds: float) -> float | None:
        """Extend the lease to `invisibility_seconds` from now, or as far as the group's max_lease_seconds allows;
        return its new end (Unix seconds)."""
        result = self.client.extend(self.topic, self.group, self, invisibility_seconds)[0]
        result.raise_for_status()
        return result.invisible_until

    def reject(self, reason: str | None = None, *, error: BaseException | None = None) -> None:
        """Move the message to the dead-letter queue; see `Client.reject`."""
        self.client.reject(self.topic, self.group, self, reason, error=error)[0].raise_for_status()


class Client(AdminCalls, PullCalls):
    """Talks to popgate over HTTP; may be used from several threads at once.

    base_url: the server. None: the environment variable POPGATE_URL, or http://127.0.0.1:8080 if that is not set.
    token: an API key or a token, sent as `Authorization: Bearer`; or a function that returns it, which is called for
        each request, so it must be fast (`token_in(path)` reads a file). None: the environment variable POPGATE_TOKEN,
        or the file that POPGATE_TOKEN_FILE names. "": no token.
    retry_seconds_max: how long a call that is safe to repeat is repeated while the server can't be reached, answers
        503, or answers that a limit is exceeded, counted from the first failure; 0 turns repeats off.
    ssl_context: how to verify the server, and the client's certificate. None: the machine's certificate authorities, or
        only those in the file that SSL_CERT_FILE names.
    transport: another httpx transport, for tests or for a proxy; it verifies the server itself, so it excludes
        `ssl_context`. No proxy of the environment (HTTP_PROXY) is used.
    tracing: `popgate_client.tracing.Tracing()` makes spans with OpenTelemetry. None: nothing is traced.
    serializer: returns the body for a published value that is neither text nor bytes. The default writes JSON.
    deserializer: returns `message.data` for a body. The default reads JSON.

    After a fork, the child makes connections of its own; with a `transport`, create the client after the fork.

    Every call may raise RequestInvalid (fix the request), Unauthorized or Forbidden, RetryLater (after the repeats)
    and ServerFault. Calls that take a list accept any length, split it into requests of at most 256 entries, and
    return one result per entry, in order.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: TokenSource | None = None,
        retry_seconds_max: float = RETRY_SECONDS_MAX,
        ssl_context: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
        tracing: Traces | None = None,
        serializer: Serializer = in_json,
        deserializer: Deserializer = json.loads,
    ) -> None:
        self._exchanges = Exchanges(retry_seconds_max=retry_seconds_max, tracing=tracing)
        self._leased = partial(LeasedMessage, client=self, deserializer=deserializer)
        self._serializer = serializer
        self._connect = partial(httpx.Client, **connection(base_url, token, ssl_context, transport))
        self._http = self._connect()
        self._process = os.getpid()

    def publish(
        self, topic: str, *messages: Any, raise_on_failure: bool = True, **options: Unpack[PublishOptions]
    ) -> list[PublishResult]:
        """Publish messages, and return one result for each, in order.

        A message is text, bytes, a JSON value (see `serializer`), or an `OutgoingMessage` with options of its own. The
        options of this call apply to all plain bodies: `headers`, `ordering_key`, `delay_seconds`, `ttl_seconds`, and,
        for a single message, `message_id` and `dedup_id`.

        Raises an error if a message is not stored: of a single message, its own one, such as NoSubscribers; of several,
        PublishFailed, whose `results` say which ones are stored. With `raise_on_failure` false, check the results.

        A publish is repeated only if that can't store a message twice: if nothing was sent, if popgate itself answered
        503 or `limit_exceeded`, or if every message has a `dedup_id`. A single message with a `dedup_id` is also
        published again while popgate answers that it does not know whether the message is stored.

        If RetryLater is raised with `outcome_unknown` true, the messages may or may not be stored. Publishing them
        again may store those without a `dedup_id` twice; the others are answered `duplicate`, or published for the
        first time. If a later chunk fails, its messages are reported as `failed`, with the same uncertainty, and the
        messages after it as `failed` with the code `not_sent`.
        """
        whole = outgoing(messages, options, self._serializer)
        results = self.perform(self._exchanges.publish(topic, whole))
        if raise_on_failure:
            raise_for_failures(results)
        return results

    def pop(
        self,
        topic: str,
        group: str,
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        invisibility_seconds: float | None = None,
        attempt_id: str | None = None,
        filter: HeaderFilter | None = None,
        client_id: str | None = None,
    ) -> list[LeasedMessage]:
        """Lease up to `max_messages` (1 to 256), waiting up to `wait_seconds` (0 to 30) for the first one.

        invisibility_seconds: the length of the lease, 1 to 43,200. None: as the group's policy says.
        attempt_id: a pop repeated with the same id gets the same leases. None: a random id.
        filter: maps a header to the value that it must have, or to a list of such values; None: the header must be
            absent. A number, a string and a boolean are never equal. Other messages stay for other pops.
        client_id: the name of this client in the journal, 1 to 64 of A-Z a-z 0-9 . _ -; a server without `client_id`
            among its features refuses it.

        Returns an empty list if no message arrives within the wait. If a call is interrupted, the messages that it had
        leased stay invisible until their leases end or the pop is repeated with its `attempt_id`.
        """
        return self.perform(
            self._exchanges.pop(
                topic,
                group,
                make=self._leased,
                max_messages=max_messages,
                wait_seconds=wait_seconds,
                invisibility_seconds=invisibility_seconds,
                attempt_id=attempt_id,
                client_id=client_id,
                filter=filter,
            )
        )

    def ack(self, topic: str, group: str, leases: Leases) -> list[SettleResult]:
        """Acknowledge messages. `leases` is one message or receipt handle, or several of them."""
        return self.settle(topic, group, Verb.ACK, settle_entries(leases))

    def release(
        self,
        topic: str,
        group: str,
        leases: Leases,
        delay_seconds: float | None = None,
        reason: str | None = None,
        *,
        error: BaseException | None = None,
        client_id: str | None = None,
    ) -> list[SettleResult]:
        """Make messages visible again after `delay_seconds` (0 to 43,200; None: the policy's retry back-off).

        `error`, `client_id`: see `reject`.
        """
        entries = settle_entries(leases, delay_seconds=delay_seconds, reason=reason, error=error, client_id=client_id)
        return self.settle(topic, group, Verb.RELEASE, entries)

    def extend(self, topic: str, group: str, leases: Leases, invisibility_seconds: float) -> list[SettleResult]:
        """Make the leases end `invisibility_seconds` from now; the receipt handles stay the same."""
        entries = settle_entries(leases, invisibility_seconds=invisibility_seconds)
        return self.settle(topic, group, Verb.EXTEND, entries)

    def reject(
        self,
        topic: str,
        group: str,
        leases: Leases,
        reason: str | None = None,
        *,
        error: BaseException | None = None,
        client_id: str | None = None,
    ) -> list[SettleResult]:
        """Move messages to the subscription's dead-letter queue, with the reason.

        `error`: the exception because of which the messages are given back; its type and text are kept for the dead
        letter. `client_id`: the name of this client there; by default that of the pop. Both need a server with `causes`
        among its features.
        """
        entries = settle_entries(leases, reason=reason, error=error, client_id=client_id)
        return self.settle(topic, group, Verb.REJECT, entries)

    def settle(self, topic: str, group: str, verb: Verb, entries: Iterable[SettleEntry]) -> list[SettleResult]:
        """Apply one verb to many leases, each with its own options.

        Entries answered `unavailable` are repeated like an unanswered call, and stay `unavailable` if the repeats do
        not help. RetryLater is raised only if no entry was answered.
        """
        return self.perform(self._exchanges.settle(topic, group, verb, list(entries)))

    def lease_stream(self, topic: str, group: str, stream: str) -> LeaseStream:
        """Return a stream of batches with a fixed membership, for batch engines: `lease` a batch, read its `messages`
        as often as needed, `ack` it."""
        return LeaseStream(self, self._exchanges, topic, group, stream)

    def lease_groups(self, topic: str, group: str) -> list[JsonObject]:
        """Return the lease groups that are not acked, each with stream, epoch, state, count, slices, lost,
        remaining_seconds, age_seconds and held_seconds."""
        return self.perform(list_exchange(self._exchanges, topic, group))

    def lock(
        self,
        name: str,
        *,
        holder: str | None = None,
        ttl_seconds: float = TTL_SECONDS,
        wait_seconds: float = 0.0,
        on_loss: held_lock.OnLoss | None = None,
    ) -> AbstractContextManager[held_lock.HeldLock]:
        """Hold a lock while a `with` block runs: renew it in the background, and release it at the end.

        holder: the name that is shown for this holder. None: the machine's name and the process ID.
        ttl_seconds: how long the lock stays held if this process dies, 1 to 43,200; it is renewed after a third of
            this. Failed renewals are repeated. The lock is lost this long after the last successful renewal was sent.
        wait_seconds: how long to wait if the lock is held by others; `math.inf`: without limit.
        on_loss: called once, with the `HeldLock` in another thread, if the lock is lost inside the block.

        The block is not interrupted: it checks `is_lost`, `raise_if_lost()` or `verify()`, or waits for `lost`. If the
        block ends without an exception, it held the lock all the time, as far as this process can know; otherwise
        LockLost is raised at its end. A failed release is only logged, because the lock then expires.

        Raises, at the beginning: LockNotAcquired, LockNotFound.
        """
        return held_lock.hold(
            self,
            self._exchanges,
            name,
            holder=holder,
            ttl_seconds=ttl_seconds,
            wait_seconds=wait_seconds,
            on_loss=on_loss,
        )

    def put_lock(self, name: str, kind: LockKind, slots: int | None = None, enabled: bool | None = None) -> JsonObject:
        """Create or change a lock. None keeps the current value; a new lock has one slot and is enabled. Raises
        Conflict if it exists with another kind."""
        return self.perform(put_lock(self._exchanges, name, kind, slots, enabled))

    def get_lock(self, name: str) -> JsonObject:
        """Return one lock: name, kind, slots, enabled, holders (each with holder, slot, fencing_token, acquired_at,
        expires_at), waiting. Raises LockNotFound."""
        return self.perform(self._exchanges.read(lock_path(name)))

    def locks(self) -> list[JsonObject]:
        """Return all locks by name, as they were defined, with the holders and the waiting clients that the answering
        proxy knows."""
        return self.perform(list_locks(self._exchanges))

    def delete_lock(self, name: str) -> None:
        """Delete a lock; its holders lose it. Raises LockNotFound."""
        self.perform(self._exchanges.delete(lock_path(name)))

    def force_release(
        self, name: str, *, holder: str | None = None, fencing_token: int | None = None
    ) -> list[JsonObject]:
        """Take a lock away from the holders that match all given arguments, or from all holders. Return the former
        holders. Raises LockNotFound."""
        request = force_release_request(name, holder, fencing_token)
        return holders_of(self.perform(self._exchanges.act(request)))

    def perform(self, exchange: Exchange[T]) -> T:
        """Run one exchange to its result, or to the error that it raises."""
        try:
            attempt = next(exchange)
            while True:
                attempt = exchange.send(self._attempt(attempt))
        except StopIteration as finished:
            result: T = finished.value
            return result

    def close(self) -> None:
        """Close the connections; the client can't be used afterwards. A second call has no effect."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, attempt: Attempt) -> Reply:
        if attempt.delay_seconds:
            time.sleep(attempt.delay_seconds)
        if self._process != os.getpid():  # forked: on the parent's connections each would get the other's answers
            self._http, self._process = self._connect(), os.getpid()
        try:
            return call(self._http, attempt.request)
        except httpx.RequestError as error:
            return error
