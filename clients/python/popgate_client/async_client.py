"""The asyncio client. Owns one httpx connection pool and drives the exchanges of `exchange` over it.

It decides nothing: `exchange` and `wire` decide what is sent, repeated and read. `client` is its synchronous twin, and
documents the shapes and units of each call.
"""

import asyncio
import json
import ssl
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from popgate_client import async_held_lock
from popgate_client.assignments import AsyncPullCalls
from popgate_client.async_administration import AsyncAdminCalls
from popgate_client.exchange import RETRY_SECONDS_MAX, Attempt, Exchange, Exchanges, Traces
from popgate_client.lease_groups import AsyncLeaseStream, list_exchange
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
from popgate_client.tokens import AsyncTokenSource
from popgate_client.transport import call_async, connection, refuse_compressed_async
from popgate_client.wire import (
    HeaderFilter,
    JsonObject,
    Reply,
    T,
    lock_path,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLeasedMessage(Message):
    """A message that can settle itself. Each verb raises LeaseLost if the lease has ended, RetryLater if the server
    could not decide, and otherwise what the call of the same name on `AsyncClient` raises."""

    client: "AsyncClient" = field(repr=False, compare=False)

    async def ack(self) -> None:
        """Acknowledge the message: it is never delivered again."""
        (await self.client.ack(self.topic, self.group, self))[0].raise_for_status()

    async def release(
        self, delay_seconds: float | None = None, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """Make the message visible again; see `Client.release`."""
        (result,) = await self.client.release(self.topic, self.group, self, delay_seconds, reason, error=error)
        result.raise_for_status()

    async def extend(self, invisibility_seconds: float) -> float | None:
        """Extend the lease to `invisibility_seconds` from now, or as far as the group's max_lease_seconds allows;
        return its new end (Unix seconds)."""
        result = (await self.client.extend(self.topic, self.group, self, invisibility_seconds))[0]
        result.raise_for_status()
        return result.invisible_until

    async def reject(self, reason: str | None = None, *, error: BaseException | None = None) -> None:
        """Move the message to the dead-letter queue; see `Client.reject`."""
        (await self.client.reject(self.topic, self.group, self, reason, error=error))[0].raise_for_status()


class AsyncClient(AsyncAdminCalls, AsyncPullCalls):
    """Talks to popgate over HTTP, for one event loop. The arguments, guarantees and errors are those of `Client`,
    but a function for the token may be `async`.

    If a call is cancelled, the server may still carry it out. A cancelled pop may have leased messages; they stay
    invisible until their leases end or the pop is repeated with its `attempt_id`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: AsyncTokenSource | None = None,
        retry_seconds_max: float = RETRY_SECONDS_MAX,
        ssl_context: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        tracing: Traces | None = None,
        serializer: Serializer = in_json,
        deserializer: Deserializer = json.loads,
    ) -> None:
        self._exchanges = Exchanges(retry_seconds_max=retry_seconds_max, tracing=tracing)
        self._leased = partial(AsyncLeasedMessage, client=self, deserializer=deserializer)
        self._serializer = serializer
        arguments = connection(base_url, token, ssl_context, transport)
        arguments["event_hooks"] = {"response": [refuse_compressed_async]}
        self._http = httpx.AsyncClient(**arguments)

    async def publish(
        self, topic: str, *messages: Any, raise_on_failure: bool = True, **options: Unpack[PublishOptions]
    ) -> list[PublishResult]:
        """Publish messages, and return one result for each, in order. `Client.publish` says what a message can be, what
        is raised, when a publish is repeated, and when messages may be stored twice."""
        whole = outgoing(messages, options, self._serializer)
        results = await self.perform(self._exchanges.publish(topic, whole))
        if raise_on_failure:
            raise_for_failures(results)
        return results

    async def pop(
        self,
        topic: str,
        group: str,
        max_messages: int = 1,
        wait_seconds: float = 0.0,
        invisibility_seconds: float | None = None,
        attempt_id: str | None = None,
        filter: HeaderFilter | None = None,
        client_id: str | None = None,
    ) -> list[AsyncLeasedMessage]:
        """Lease up to `max_messages`, waiting up to `wait_seconds` for the first one. See `Client.pop`."""
        return await self.perform(
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

    async def ack(self, topic: str, group: str, leases: Leases) -> list[SettleResult]:
        """Acknowledge messages. `leases` is one message or receipt handle, or several of them."""
        return await self.settle(topic, group, Verb.ACK, settle_entries(leases))

    async def release(
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
        return await self.settle(topic, group, Verb.RELEASE, entries)

    async def extend(self, topic: str, group: str, leases: Leases, invisibility_seconds: float) -> list[SettleResult]:
        """Make the leases end `invisibility_seconds` from now; the receipt handles stay the same."""
        entries = settle_entries(leases, invisibility_seconds=invisibility_seconds)
        return await self.settle(topic, group, Verb.EXTEND, entries)

    async def reject(
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
        return await self.settle(topic, group, Verb.REJECT, entries)

    async def settle(self, topic: str, group: str, verb: Verb, entries: Iterable[SettleEntry]) -> list[SettleResult]:
        """Apply one verb to many leases, each with its own options.

        Entries answered `unavailable` are repeated like an unanswered call, and stay `unavailable` if the repeats do
        not help. RetryLater is raised only if no entry was answered.
        """
        return await self.perform(self._exchanges.settle(topic, group, verb, list(entries)))

    def lease_stream(self, topic: str, group: str, stream: str) -> AsyncLeaseStream:
        """Return a stream of batches with a fixed membership, for batch engines: `lease` a batch, read its `messages`
        as often as needed, `ack` it."""
        return AsyncLeaseStream(self, self._exchanges, topic, group, stream)

    async def lease_groups(self, topic: str, group: str) -> list[JsonObject]:
        """Return the lease groups that are not acked, each with stream, epoch, state, count, slices, lost,
        remaining_seconds, age_seconds and held_seconds."""
        return await self.perform(list_exchange(self._exchanges, topic, group))

    def lock(
        self,
        name: str,
        *,
        holder: str | None = None,
        ttl_seconds: float = TTL_SECONDS,
        wait_seconds: float = 0.0,
        on_loss: async_held_lock.OnAsyncLoss | None = None,
    ) -> AbstractAsyncContextManager[async_held_lock.AsyncHeldLock]:
        """Hold a lock while an `async with` block runs; see `Client.lock`.

        on_loss: "cancel": when the lock is lost, the block's task is cancelled, and its `async with` raises LockLost.
            A function is called with the `AsyncHeldLock`.
        """
        return async_held_lock.hold(
            self,
            self._exchanges,
            name,
            holder=holder,
            ttl_seconds=ttl_seconds,
            wait_seconds=wait_seconds,
            on_loss=on_loss,
        )

    async def put_lock(
        self, name: str, kind: LockKind, slots: int | None = None, enabled: bool | None = None
    ) -> JsonObject:
        """Create or change a lock; see `Client.put_lock`."""
        return await self.perform(put_lock(self._exchanges, name, kind, slots, enabled))

    async def get_lock(self, name: str) -> JsonObject:
        """Read one lock; see `Client.get_lock`."""
        return await self.perform(self._exchanges.read(lock_path(name)))

    async def locks(self) -> list[JsonObject]:
        """Return all locks; see `Client.locks`."""
        return await self.perform(list_locks(self._exchanges))

    async def delete_lock(self, name: str) -> None:
        """Delete a lock; its holders lose it. Raises LockNotFound."""
        await self.perform(self._exchanges.delete(lock_path(name)))

    async def force_release(
        self, name: str, *, holder: str | None = None, fencing_token: int | None = None
    ) -> list[JsonObject]:
        """Take a lock away from its holders; see `Client.force_release`."""
        request = force_release_request(name, holder, fencing_token)
        return holders_of(await self.perform(self._exchanges.act(request)))

    async def perform(self, exchange: Exchange[T]) -> T:
        """Run one exchange to its result, or to the error that it raises."""
        try:
            attempt = next(exchange)
            while True:
                attempt = exchange.send(await self._attempt(attempt))
        except StopIteration as finished:
            result: T = finished.value
            return result

    async def close(self) -> None:
        """Close the connections; the client can't be used afterwards. A second call has no effect."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _attempt(self, attempt: Attempt) -> Reply:
        if attempt.delay_seconds:
            await asyncio.sleep(attempt.delay_seconds)
        try:
            return await call_async(self._http, attempt.request)
        except httpx.RequestError as error:
            return error
        except ssl.SSLError as error:  # httpx does not translate what arrives broken
            return httpx.ReadError(str(error))
