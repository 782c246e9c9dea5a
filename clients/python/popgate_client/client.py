"""The synchronous client. Owns one httpx connection pool and drives the exchanges of `exchange` over it.

It decides nothing: what is sent, repeated and read is in `exchange` and `wire`. `async_client` is its twin.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from popgate_client import held_lock
from popgate_client.assignments import PullCalls
from popgate_client.dead_letters import (
    letter_path,
    list_path,
    purge_letters_request,
    purge_request,
    redrive_path,
    redrive_request,
)
from popgate_client.exchange import RETRY_SECONDS_MAX, Attempt, Exchange, Exchanges
from popgate_client.lease_groups import LeaseStream, list_exchange
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
from popgate_client.transport import call_arguments, connection
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
class LeasedMessage(Message):
    """A message that can settle itself. Each verb raises LeaseLost when the lease has ended, RetryLater when nothing
    could be decided, and otherwise what the call of the same name on `Client` raises."""

    client: "Client" = field(repr=False, compare=False)

    def ack(self) -> None:
        """Done: never delivered again."""
        self.client.ack(self.topic, self.group, self)[0].raise_for_status()

    def release(self, delay_seconds: float | None = None, reason: str | None = None) -> None:
        """Give back; see `Client.release`."""
        self.client.release(self.topic, self.group, self, delay_seconds, reason)[0].raise_for_status()

    def extend(self, invisibility_seconds: float) -> float | None:
        """Lengthen the lease to `invisibility_seconds` from now, or as far as the group's max_lease_seconds allows;
        returns its new end (Unix seconds)."""
        result = self.client.extend(self.topic, self.group, self, invisibility_seconds)[0]
        result.raise_for_status()
        return result.invisible_until

    def reject(self, reason: str | None = None) -> None:
        """Move to the dead-letter queue."""
        self.client.reject(self.topic, self.group, self, reason)[0].raise_for_status()


class Client(PullCalls):
    """Talks to popgate over HTTP; may be used from several threads at once.

    base_url: else the environment's POPGATE_URL, else http://127.0.0.1:8080.
    token: sent as `Authorization: Bearer`.
    retry_seconds_max: for how long a call that can be repeated unharmed is repeated while the server can't be reached
        or answers 503, counted from the first failure; 0 turns it off.
    transport: another httpx transport, for tests.

    Every call may raise RequestInvalid (fix the request), Unauthorized or Forbidden, RetryLater (after the repeats)
    and ServerFault. List calls take any length, are cut into requests of 256 entries, and answer per entry, in order.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        retry_seconds_max: float = RETRY_SECONDS_MAX,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._exchanges = Exchanges(retry_seconds_max=retry_seconds_max)
        self._leased = partial(LeasedMessage, client=self)
        self._http = httpx.Client(**connection(base_url, token), transport=transport)

    def publish(self, topic: str, *messages: OutgoingMessage | str | bytes) -> list[PublishResult]:
        """Store messages. Look at the results, or call `raise_for_status()` on them: one may have failed.

        Repeated only where that can't double a message: when nothing was sent, when popgate itself answered 503, or
        when every message has a `dedup_id`. A single message with one is also published again while popgate answers
        that it does not know what became of it. When RetryLater is raised with `outcome_unknown` true, the messages may
        or may not be stored, and publishing them again may double those without a `dedup_id`; the repeat of the others
        is their `duplicate`, or their first publish. When a later chunk fails, its messages come back
        as `failed` with the same doubt, and those after it as `failed`, `not_sent`.
        """
        return self.perform(self._exchanges.publish(topic, messages))

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

        invisibility_seconds: the length of the lease, 1 to 43,200; the subscription's policy where None.
        attempt_id: a pop repeated with the same id gets the same leases; made at random where None.
        filter: header: the value it must have, or a list of values; None where it must be absent. Numbers, texts and
            truth values differ. Other messages stay for other pops.
        client_id: what the journal calls this client, 1 to 64 of A-Z a-z 0-9 . _ -; a server without `client_id` among
            its features refuses it.

        Returns an empty list when the wait ends without a message. When a call is interrupted, what it had leased
        stays invisible until the leases end or the pop is repeated with its `attempt_id`.
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
        """Settle. `leases` is one message or receipt handle, or many of them."""
        return self.settle(topic, group, Verb.ACK, settle_entries(leases))

    def release(
        self, topic: str, group: str, leases: Leases, delay_seconds: float | None = None, reason: str | None = None
    ) -> list[SettleResult]:
        """Give back: visible again after `delay_seconds` (0 to 43,200; the policy's retry back-off where None)."""
        entries = settle_entries(leases, delay_seconds=delay_seconds, reason=reason)
        return self.settle(topic, group, Verb.RELEASE, entries)

    def extend(self, topic: str, group: str, leases: Leases, invisibility_seconds: float) -> list[SettleResult]:
        """Make the leases end `invisibility_seconds` from now; the receipt handles stay the same."""
        entries = settle_entries(leases, invisibility_seconds=invisibility_seconds)
        return self.settle(topic, group, Verb.EXTEND, entries)

    def reject(self, topic: str, group: str, leases: Leases, reason: str | None = None) -> list[SettleResult]:
        """Move to the subscription's dead-letter queue, with the reason."""
        return self.settle(topic, group, Verb.REJECT, settle_entries(leases, reason=reason))

    def settle(self, topic: str, group: str, verb: Verb, entries: Iterable[SettleEntry]) -> list[SettleResult]:
        """One verb over many leases, each with its own options.

        Entries answered `unavailable` are repeated like an unanswered call, and stay `unavailable` when that did not
        help; RetryLater is raised only when not one entry was answered.
        """
        return self.perform(self._exchanges.settle(topic, group, verb, list(entries)))

    def lease_stream(self, topic: str, group: str, stream: str) -> LeaseStream:
        """Batches with a frozen membership, for batch engines: `lease`, read `messages` again and again, `ack`."""
        return LeaseStream(self, self._exchanges, topic, group, stream)

    def lease_groups(self, topic: str, group: str) -> list[JsonObject]:
        """The lease groups that are not acked, each with stream, epoch, state, count, slices, lost, remaining_seconds,
        age_seconds and held_seconds."""
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
        """Hold a lock while a `with` block runs, renewed in the background, and release it.

        holder: who it is, for whoever looks; the machine and the process where None.
        ttl_seconds: 1 to 43,200; how long it stays held when this process vanishes, renewed at a third of it. Renewals
            go on whatever fails, until that long after the last good one was sent: then it is lost.
        wait_seconds: how long to wait where others hold it; `math.inf` for as long as it takes.
        on_loss: called with the `HeldLock` in another thread, once, when the lock is lost inside of the block.

        The block is not interrupted: it asks `is_lost`, `raise_if_lost()` or `verify()`, or waits for `lost`. A block
        that has ended without an exception held the lock all the time, as far as this process can know: else LockLost
        is raised at its end. A release that fails is not told; the lock then ends by itself.

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
        """Create or change a lock. What is None stays as it is; a new one has one slot and is enabled. Raises Conflict
        where it is of another kind."""
        return self.perform(put_lock(self._exchanges, name, kind, slots, enabled))

    def get_lock(self, name: str) -> JsonObject:
        """Of one lock: name, kind, slots, enabled, holders (each with holder, slot, fencing_token, acquired_at,
        expires_at), waiting. Raises LockNotFound."""
        return self.perform(self._exchanges.read(lock_path(name)))

    def locks(self) -> list[JsonObject]:
        """All locks by name, as they were defined, with the holders and the waiting of this proxy."""
        return self.perform(list_locks(self._exchanges))

    def delete_lock(self, name: str) -> None:
        """Delete a lock: who holds it loses it. Raises LockNotFound."""
        self.perform(self._exchanges.delete(lock_path(name)))

    def force_release(
        self, name: str, *, holder: str | None = None, fencing_token: int | None = None
    ) -> list[JsonObject]:
        """Take a lock away from those holders of whom all that is given is true, or from all. Returns who they were.
        Raises LockNotFound."""
        request = force_release_request(name, holder, fencing_token)
        return holders_of(self.perform(self._exchanges.act(request)))

    def stats(self, topic: str, group: str) -> JsonObject:
        """Of one subscription: mode, ready, in_flight, delayed, blocked (of the ready ones, those behind an earlier one
        of their ordering key), dead, oldest_age_seconds, queues, policy."""
        return self.perform(self._exchanges.read(subscription_path(topic, group)))

    def info(self) -> JsonObject:
        """Of the server: service, version, protocol {min, max}, features."""
        return self.perform(self._exchanges.read("/v1"))

    def cluster(self) -> JsonObject:
        """The proxies, and which queues each of them owns, as the asked one sees it."""
        return self.perform(self._exchanges.read("/v1/admin/cluster"))

    def list_topics(self) -> list[JsonObject]:
        """All topics, each with at least `topic`."""
        return self.perform(self._exchanges.topics())

    def put_topic(self, topic: str, **settings: Any) -> JsonObject:
        """Create or change a topic: `queues=N`, or `adopt=[names of existing RabbitMQ queues]`."""
        return self.perform(self._exchanges.put(admin_path(topic), settings))

    def get_topic(self, topic: str) -> JsonObject:
        """Read a topic. Raises TopicNotFound."""
        return self.perform(self._exchanges.read(admin_path(topic)))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its groups and messages. Raises TopicNotFound."""
        self.perform(self._exchanges.delete(admin_path(topic)))

    def put_group(self, topic: str, group: str, **policy: Any) -> JsonObject:
        """Create or change a group. The policy: invisibility_seconds, max_lease_seconds, max_deliveries, max_in_flight,
        paused, min_replicas, retry {initial_seconds, multiplier, max_seconds}. What is not named keeps its value; a new
        group has the server's defaults."""
        return self.perform(self._exchanges.put(admin_path(topic, group), policy))

    def get_group(self, topic: str, group: str) -> JsonObject:
        """Read a group's policy. Raises TopicNotFound, GroupNotFound."""
        return self.perform(self._exchanges.read(admin_path(topic, group)))

    def pause_group(self, topic: str, group: str) -> JsonObject:
        """Hand out nothing more; what is leased can be settled. Raises TopicNotFound, GroupNotFound."""
        return self.perform(self._exchanges.post(f"{admin_path(topic, group)}/pause"))

    def resume_group(self, topic: str, group: str) -> JsonObject:
        """Hand out messages again. Raises TopicNotFound, GroupNotFound."""
        return self.perform(self._exchanges.post(f"{admin_path(topic, group)}/resume"))

    def consume_mode(self, topic: str, group: str) -> JsonObject:
        """How a group is consumed: mode (pop, draining or pull), generation, wanted, converged, drain {leases_left,
        seconds_left}, proxies. Raises TopicNotFound, GroupNotFound."""
        return self.perform(self._exchanges.read(mode_path(topic, group)))

    def set_consume_mode(
        self, topic: str, group: str, mode: str, *, drain_timeout_seconds: float | None = None, dry_run: bool = False
    ) -> JsonObject:
        """Switch a group to "pop" or "pull"; returns as soon as that has begun, as `consume_mode` does. On the way to
        pull leases have `drain_timeout_seconds` to end (without it as long as the server thinks); so have pull clients
        on the way to pop, where it is given. `dry_run` changes nothing and tells in `preview` what would happen. Raises
        TopicNotFound, GroupNotFound."""
        change = mode_change(mode, drain_timeout_seconds, dry_run=dry_run)
        return self.perform(self._exchanges.put(mode_path(topic, group), change))

    def delete_group(self, topic: str, group: str) -> None:
        """Delete a group with its messages. Raises TopicNotFound, GroupNotFound."""
        self.perform(self._exchanges.delete(admin_path(topic, group)))

    def dead_letters(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int | None = None,
        after: str | None = None,
        body_bytes_max: int | None = None,
    ) -> JsonObject:
        """One page of a group's dead letters, in the order in which they died: `messages`, how many are `dead` in all,
        and `next` where there are more, to be given as `after`. Changes nothing."""
        path = list_path(topic, group, max_messages=max_messages, after=after, body_bytes_max=body_bytes_max)
        return self.perform(self._exchanges.read(path))

    def get_dead_letter(self, topic: str, group: str, letter_id: str) -> JsonObject:
        """One dead letter, whole. Raises DeadLetterNotFound."""
        return self.perform(self._exchanges.read(letter_path(topic, group, letter_id)))

    def redrive(
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
        """Start to move dead letters back to work, and return the progress: id, state, total, moved, failed, ...

        Those with these `ids` or `message_ids`, or all; back to their queues, or published to `target_topic`. Waits up
        to `wait_seconds` (0 to 30) for the end. Raises Conflict while another redrive of the group runs.
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
        return self.perform(self._exchanges.act(request))

    def get_redrive(self, topic: str, group: str) -> JsonObject:
        """The progress of the running redrive, or of the latest one. Raises RedriveNotFound."""
        return self.perform(self._exchanges.read(redrive_path(topic, group)))

    def cancel_redrive(self, topic: str, group: str) -> JsonObject:
        """End the running redrive; what it has moved stays moved. Raises RedriveNotFound."""
        return self.perform(self._exchanges.cancel(redrive_path(topic, group)))

    def purge_dead_letters(
        self,
        topic: str,
        group: str,
        *,
        ids: Sequence[str] | None = None,
        message_ids: Sequence[str] | None = None,
        older_than_seconds: float | None = None,
    ) -> JsonObject:
        """Delete dead letters for good: those named, those older, or all. Returns how many were `purged`, how many are
        left (`dead`), and whether it is `complete`: else ask again."""
        request = purge_letters_request(
            topic, group, ids=ids, message_ids=message_ids, older_than_seconds=older_than_seconds
        )
        return self.perform(self._exchanges.act(request))

    def purge(self, topic: str, group: str) -> JsonObject:
        """Delete the group's visible messages for good; leases stay. Returns how many were `purged`, and whether it is
        `complete`: else ask again."""
        return self.perform(self._exchanges.act(purge_request(topic, group)))

    def perform(self, exchange: Exchange[T]) -> T:
        """Drive one exchange to its result, or to the error that it raises."""
        try:
            attempt = next(exchange)
            while True:
                attempt = exchange.send(self._attempt(attempt))
        except StopIteration as finished:
            result: T = finished.value
            return result

    def close(self) -> None:
        """Close the connections; the client can't be used afterwards. A second call changes nothing."""
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
        try:
            return self._http.request(**call_arguments(attempt.request))
        except httpx.RequestError as error:
            return error
