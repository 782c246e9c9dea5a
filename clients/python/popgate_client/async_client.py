"""The asyncio client. Owns one httpx connection pool and drives the exchanges of `exchange` over it.

It decides nothing: `exchange` and `wire` decide what is sent, repeated and read. `client` is its synchronous twin, and
documents the shapes and units of each call.
"""

import asyncio
import ssl
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from popgate_client import async_held_lock
from popgate_client.assignments import AsyncPullCalls
from popgate_client.dead_letters import (
    letter_path,
    list_path,
    purge_letters_request,
    purge_request,
    redrive_path,
    redrive_request,
)
from popgate_client.exchange import RETRY_SECONDS_MAX, Attempt, Exchange, Exchanges, Traces
from popgate_client.inspecting import explain_path, message_path, peek_path
from popgate_client.lease_groups import AsyncLeaseStream, list_exchange
from popgate_client.locks import TTL_SECONDS, LockKind, force_release_request, holders_of, list_locks, put_lock
from popgate_client.message import (
    Leases,
    Message,
    OutgoingMessage,
    PublishResult,
    SettleEntry,
    SettleResult,
    Verb,
    settle_entries,
)
from popgate_client.tokens import AsyncTokenSource
from popgate_client.transport import call_async, connection, refuse_compressed_async
from popgate_client.wire import (
    HeaderFilter,
    JsonObject,
    Reply,
    T,
    admin_path,
    lock_path,
    mode_change,
    mode_path,
    subscription_path,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLeasedMessage(Message):
    """A message that can settle itself. Each verb raises LeaseLost if the lease has ended, RetryLater if the server
    could not decide, and otherwise what the call of the same name on `AsyncClient` raises."""

    client: "AsyncClient" = field(repr=False, compare=False)

    async def ack(self) -> None:
        """Acknowledge the message: it is never delivered again."""
        (await self.client.ack(self.topic, self.group, self))[0].raise_for_status()

    async def release(self, delay_seconds: float | None = None, reason: str | None = None) -> None:
        """Make the message visible again; see `Client.release`."""
        (await self.client.release(self.topic, self.group, self, delay_seconds, reason))[0].raise_for_status()

    async def extend(self, invisibility_seconds: float) -> float | None:
        """Extend the lease to `invisibility_seconds` from now, or as far as the group's max_lease_seconds allows;
        return its new end (Unix seconds)."""
        result = (await self.client.extend(self.topic, self.group, self, invisibility_seconds))[0]
        result.raise_for_status()
        return result.invisible_until

    async def reject(self, reason: str | None = None) -> None:
        """Move the message to the dead-letter queue."""
        (await self.client.reject(self.topic, self.group, self, reason))[0].raise_for_status()


class AsyncClient(AsyncPullCalls):
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
    ) -> None:
        self._exchanges = Exchanges(retry_seconds_max=retry_seconds_max, tracing=tracing)
        self._leased = partial(AsyncLeasedMessage, client=self)
        arguments = connection(base_url, token, ssl_context, transport)
        arguments["event_hooks"] = {"response": [refuse_compressed_async]}
        self._http = httpx.AsyncClient(**arguments)

    async def publish(self, topic: str, *messages: OutgoingMessage | str | bytes) -> list[PublishResult]:
        """Publish messages, and return a result for each; check them. `Client.publish` says when a publish is repeated
        and when messages may be stored twice."""
        return await self.perform(self._exchanges.publish(topic, messages))

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
        self, topic: str, group: str, leases: Leases, delay_seconds: float | None = None, reason: str | None = None
    ) -> list[SettleResult]:
        """Make messages visible again after `delay_seconds` (0 to 43,200; None: the policy's retry back-off)."""
        entries = settle_entries(leases, delay_seconds=delay_seconds, reason=reason)
        return await self.settle(topic, group, Verb.RELEASE, entries)

    async def extend(self, topic: str, group: str, leases: Leases, invisibility_seconds: float) -> list[SettleResult]:
        """Make the leases end `invisibility_seconds` from now; the receipt handles stay the same."""
        entries = settle_entries(leases, invisibility_seconds=invisibility_seconds)
        return await self.settle(topic, group, Verb.EXTEND, entries)

    async def reject(self, topic: str, group: str, leases: Leases, reason: str | None = None) -> list[SettleResult]:
        """Move messages to the subscription's dead-letter queue, with the reason."""
        return await self.settle(topic, group, Verb.REJECT, settle_entries(leases, reason=reason))

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

    async def stats(self, topic: str, group: str) -> JsonObject:
        """Return a subscription's mode, counts, age, queues and policy. See `Client.stats`."""
        return await self.perform(self._exchanges.read(subscription_path(topic, group)))

    async def info(self) -> JsonObject:
        """Return the server's service, version, protocol {min, max} and features."""
        return await self.perform(self._exchanges.read("/v1"))

    async def cluster(self) -> JsonObject:
        """Return the proxies and the queues that each of them owns, as seen by the proxy that answers."""
        return await self.perform(self._exchanges.read("/v1/admin/cluster"))

    async def list_topics(self) -> list[JsonObject]:
        """Return all topics, each with at least `topic`."""
        return await self.perform(self._exchanges.topics())

    async def put_topic(self, topic: str, **settings: Any) -> JsonObject:
        """Create or change a topic: `queues=N`, or `adopt=[names of existing RabbitMQ queues]`."""
        return await self.perform(self._exchanges.put(admin_path(topic), settings))

    async def get_topic(self, topic: str) -> JsonObject:
        """Read a topic. Raises TopicNotFound."""
        return await self.perform(self._exchanges.read(admin_path(topic)))

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with its groups and messages. Raises TopicNotFound."""
        await self.perform(self._exchanges.delete(admin_path(topic)))

    async def put_group(self, topic: str, group: str, **policy: Any) -> JsonObject:
        """Create or change a group. The policy: invisibility_seconds, max_lease_seconds, max_deliveries, max_in_flight,
        paused, min_replicas, retry {initial_seconds, multiplier, max_seconds}. A setting that is not given keeps
        its value; a new group has the server's defaults."""
        return await self.perform(self._exchanges.put(admin_path(topic, group), policy))

    async def get_group(self, topic: str, group: str) -> JsonObject:
        """Read a group's policy. Raises TopicNotFound, GroupNotFound."""
        return await self.perform(self._exchanges.read(admin_path(topic, group)))

    async def pause_group(self, topic: str, group: str) -> JsonObject:
        """Deliver no more messages; existing leases can be settled. Raises TopicNotFound, GroupNotFound."""
        return await self.perform(self._exchanges.post(f"{admin_path(topic, group)}/pause"))

    async def resume_group(self, topic: str, group: str) -> JsonObject:
        """Deliver messages again. Raises TopicNotFound, GroupNotFound."""
        return await self.perform(self._exchanges.post(f"{admin_path(topic, group)}/resume"))

    async def consume_mode(self, topic: str, group: str) -> JsonObject:
        """Return how a group is consumed: mode (pop, draining or pull), generation, wanted, converged, drain
        {leases_left, seconds_left}, proxies. Raises TopicNotFound, GroupNotFound."""
        return await self.perform(self._exchanges.read(mode_path(topic, group)))

    async def set_consume_mode(
        self, topic: str, group: str, mode: str, *, drain_timeout_seconds: float | None = None, dry_run: bool = False
    ) -> JsonObject:
        """Switch a group to "pop" or "pull"; return what `consume_mode` returns as soon as the switch has begun. Before
        a switch to pull, leases have `drain_timeout_seconds` to end (None: the server's default). If it is given, pull
        clients have the same time before a switch to pop. `dry_run` changes nothing; `preview` says what would happen.
        Raises TopicNotFound, GroupNotFound."""
        change = mode_change(mode, drain_timeout_seconds, dry_run=dry_run)
        return await self.perform(self._exchanges.put(mode_path(topic, group), change))

    async def delete_group(self, topic: str, group: str) -> None:
        """Delete a group with its messages. Raises TopicNotFound, GroupNotFound."""
        await self.perform(self._exchanges.delete(admin_path(topic, group)))

    async def explain(self, topic: str, group: str) -> JsonObject:
        """Say why a pop of a group gets no message: `would_get`, `summary`, `reasons` (each with `code`, `detail`,
        `remedy`), and the facts (`standing`). Raises TopicNotFound, GroupNotFound."""
        return await self.perform(self._exchanges.read(explain_path(topic, group)))

    async def peek(
        self,
        topic: str,
        group: str,
        *,
        state: str | None = None,
        key: str | None = None,
        limit: int | None = None,
        after: str | None = None,
        fetch: bool = False,
    ) -> JsonObject:
        """Return `messages` of a group, the oldest first, without leasing them: those in the memory of the proxies.

        `state` is "ready", "leased", "delayed", "blocked" or "any", and `key` an ordering key. `next`, if it is not
        None, is the `after` of the next page. `fetch` first reads messages from the broker, as a pop does. Raises
        TopicNotFound, GroupNotFound.
        """
        path = peek_path(topic, group, state=state, key=key, limit=limit, after=after, fetch=fetch)
        return await self.perform(self._exchanges.read(path))

    async def find_message(self, topic: str, message_id: str) -> JsonObject:
        """Say where a message is in each group of its topic: its `state`, its `copies`, and if it is unknown, what this
        can mean (`because`). Raises TopicNotFound."""
        return await self.perform(self._exchanges.read(message_path(topic, message_id)))

    async def dead_letters(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int | None = None,
        after: str | None = None,
        body_bytes_max: int | None = None,
    ) -> JsonObject:
        """Return one page of a group's dead letters, in the order in which they were dead-lettered: `messages`, the
        total number (`dead`), and, if there are more, `next`, which is the `after` of the next page. Changes
        nothing."""
        path = list_path(topic, group, max_messages=max_messages, after=after, body_bytes_max=body_bytes_max)
        return await self.perform(self._exchanges.read(path))

    async def get_dead_letter(self, topic: str, group: str, letter_id: str) -> JsonObject:
        """Return one dead letter with its full body. Raises DeadLetterNotFound."""
        return await self.perform(self._exchanges.read(letter_path(topic, group, letter_id)))

    async def redrive(
        self,
        topic: str,
        group: str,
        *,
        ids: Sequence[str] | None = None,
        message_ids: Sequence[str] | None = None,
        max_messages: int | None = None,
        target_topic: str | None = None,
        rate_per_second: float | None = None,
        wait_seconds: float = 0.0,
    ) -> JsonObject:
        """Start to redrive dead letters, and return the progress: id, state, total, moved, failed, ...

        The redrive moves the dead letters with these `ids` or `message_ids`, or all of them, back to their queues, or
        publishes them to `target_topic`. This call waits up to `wait_seconds` (0 to 30) for its end. Raises Conflict
        while another redrive of the group runs.
        """
        request = redrive_request(
            topic,
            group,
            ids=ids,
            message_ids=message_ids,
            max_messages=max_messages,
            target_topic=target_topic,
            rate_per_second=rate_per_second,
            wait_seconds=wait_seconds,
        )
        return await self.perform(self._exchanges.act(request))

    async def get_redrive(self, topic: str, group: str) -> JsonObject:
        """Return the progress of the running redrive, or of the latest one. Raises RedriveNotFound."""
        return await self.perform(self._exchanges.read(redrive_path(topic, group)))

    async def cancel_redrive(self, topic: str, group: str) -> JsonObject:
        """Stop the running redrive; messages that it has moved stay moved. Raises RedriveNotFound."""
        return await self.perform(self._exchanges.cancel(redrive_path(topic, group)))

    async def purge_dead_letters(
        self,
        topic: str,
        group: str,
        *,
        ids: Sequence[str] | None = None,
        message_ids: Sequence[str] | None = None,
        older_than_seconds: float | None = None,
    ) -> JsonObject:
        """Delete dead letters permanently: the given ones, the older ones, or all. Return how many were `purged`, how
        many are left (`dead`), and whether the purge is `complete`; if not, call this again."""
        request = purge_letters_request(
            topic, group, ids=ids, message_ids=message_ids, older_than_seconds=older_than_seconds
        )
        return await self.perform(self._exchanges.act(request))

    async def purge(self, topic: str, group: str) -> JsonObject:
        """Delete the group's visible messages permanently; leased messages stay. Return how many were `purged`, and
        whether the purge is `complete`; if not, call this again."""
        return await self.perform(self._exchanges.act(purge_request(topic, group)))

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
