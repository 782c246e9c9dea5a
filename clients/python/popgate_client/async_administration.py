"""The calls of `AsyncClient` for topics, groups, consume modes and dead letters: the twin of `administration`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Unpack

from popgate_client.dead_letters import (
    letter_path,
    list_path,
    purge_letters_request,
    purge_request,
    redrive_path,
    redrive_request,
)
from popgate_client.exchange import Exchange, Exchanges
from popgate_client.inspecting import explain_path, message_path, peek_path
from popgate_client.keywords import GroupSettings, TopicSettings, check_keywords
from popgate_client.wire import JsonObject, T, admin_path, mode_change, mode_path, subscription_path


class AsyncAdminCalls(ABC):
    """The calls for topics, groups and dead letters; see `AdminCalls`."""

    _exchanges: Exchanges

    @abstractmethod
    def perform(self, exchange: Exchange[T]) -> Awaitable[T]: ...

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

    async def put_topic(self, topic: str, **settings: Unpack[TopicSettings]) -> JsonObject:
        """Create or change a topic: `queues=N`, or `adopt=[names of existing RabbitMQ queues]`. Raises TypeError for an
        unknown setting."""
        check_keywords("put_topic", settings, TopicSettings.__optional_keys__)
        return await self.perform(self._exchanges.put(admin_path(topic), {**settings}))

    async def get_topic(self, topic: str) -> JsonObject:
        """Read a topic. Raises TopicNotFound."""
        return await self.perform(self._exchanges.read(admin_path(topic)))

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with its groups and messages. Raises TopicNotFound."""
        await self.perform(self._exchanges.delete(admin_path(topic)))

    async def put_group(self, topic: str, group: str, **policy: Unpack[GroupSettings]) -> JsonObject:
        """Create or change a group. The policy: invisibility_seconds, max_lease_seconds, max_deliveries, max_in_flight,
        paused, min_replicas, retry {initial_seconds, multiplier, max_seconds}. A setting that is not given keeps
        its value; a new group has the server's defaults. Raises TypeError for an unknown setting."""
        check_keywords("put_group", policy, GroupSettings.__optional_keys__)
        return await self.perform(self._exchanges.put(admin_path(topic, group), {**policy}))

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
        """Return `messages` of a group, the oldest first, without leasing them. See `Client.peek`."""
        path = peek_path(topic, group, state=state, key=key, limit=limit, after=after, fetch=fetch)
        return await self.perform(self._exchanges.read(path))

    async def find_message(self, topic: str, message_id: str, *, fetch: bool = False) -> JsonObject:
        """Say where a message is in each group of its topic: its `state`, its `copies`, and if it is unknown, what this
        can mean (`because`). `fetch`: first read messages from the broker, as a pop does. Raises TopicNotFound."""
        return await self.perform(self._exchanges.read(message_path(topic, message_id, fetch=fetch)))

    async def dead_letters(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int | None = None,
        after: str | None = None,
        body_bytes_max: int | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> JsonObject:
        """Return one page of a group's dead letters: `messages`, `dead`, and, if there are more, `next`. See
        `Client.dead_letters`."""
        path = list_path(
            topic, group, max_messages=max_messages, after=after, body_bytes_max=body_bytes_max, conditions=filter
        )
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
        filter: Mapping[str, Any] | None = None,
        max_messages: int | None = None,
        target_topic: str | None = None,
        rate_per_second: float | None = None,
        wait_seconds: float = 0.0,
    ) -> JsonObject:
        """Start to redrive dead letters, and return the progress: id, state, total, moved, failed, ...

        The redrive moves all dead letters, or those with these `ids` or `message_ids` that meet the conditions of
        `filter` (see `dead_letters`), back to their queues, or publishes them to `target_topic`. This call waits up to
        `wait_seconds` (0 to 30) for its end. Raises Conflict while another redrive of the group runs.
        """
        request = redrive_request(
            topic,
            group,
            ids=ids,
            message_ids=message_ids,
            conditions=filter,
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
        filter: Mapping[str, Any] | None = None,
        older_than_seconds: float | None = None,
    ) -> JsonObject:
        """Delete dead letters permanently: those that meet all given conditions, or all. Return how many were `purged`,
        how many are left (`dead`), and whether the purge is `complete`; if not, call this again."""
        request = purge_letters_request(
            topic, group, ids=ids, message_ids=message_ids, conditions=filter, older_than_seconds=older_than_seconds
        )
        return await self.perform(self._exchanges.act(request))

    async def purge(self, topic: str, group: str) -> JsonObject:
        """Delete the group's visible messages permanently; leased messages stay. Return how many were `purged`, and
        whether the purge is `complete`; if not, call this again."""
        return await self.perform(self._exchanges.act(purge_request(topic, group)))
