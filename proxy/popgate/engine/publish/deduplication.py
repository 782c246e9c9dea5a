"""Deduplicates publishes: within the window, each ``dedup_id`` of a topic is published only once.

This module reserves an id, publishes the message and confirms the id. Publishes of the same id in this process wait for
each other. ``ports.dedup`` stores the ids. If a message copy is published twice, both have the same lease record, so
they are treated as one message.

If a step fails, the id stays pending, and a repeated publish publishes the same copy again. So no message is lost, and
none is duplicated. An id is released only if the broker has certainly stored nothing. A refusal does not prove this: if
a topic has several groups, one queue may have accepted the message when another queue refused it.

If the broker and the dedup store are one database, new ids need no reservation: they are confirmed in the transaction
that publishes their messages.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from popgate.domain.errors import BrokerUnavailable, StateUnavailable
from popgate.domain.names import BrokerQueue, TopicName
from popgate.domain.topics import TopicSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.publish.publishing import (
    NO_SUBSCRIBERS,
    NOT_CONFIRMED,
    NewMessage,
    OutgoingCopy,
    Published,
    Publisher,
    publishers_of,
)
from popgate.ports.dedup import DedupEntry, Reservation
from popgate.ports.journal import EventKind

_log = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 20.0
"""Maximum seconds that a publish waits for another publish of the same id. This is usually longer than the broker
takes, and shorter than clients wait for an answer."""
STORED = frozenset({"published", "duplicate"})


class Deduplicator:
    """Publishes through ``publisher``, each ``dedup_id`` only once."""

    def __init__(self, context: EngineContext, publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._under_way: defaultdict[TopicName, dict[str, asyncio.Future[None]]] = defaultdict(dict)
        """By topic and dedup id: the publishes in progress. Each future completes when its publish has ended."""

    async def publish(
        self, spec: TopicSpec, messages: Sequence[NewMessage], missing: Mapping[int, BrokerQueue]
    ) -> list[Published]:
        """Publish messages, and return one result for each message, in the same order (see ``Publisher.publish``).

        If several messages of a call have the same id, only the first one is published. If the state store is
        unavailable, messages with an id fail, and messages without an id are published. Raises: BrokerUnavailable;
        StateUnavailable if the store is unavailable and every message has an id.
        """
        subjects = self._publisher.subjects(spec, messages)
        owners: dict[str, int] = {}
        for place, new in enumerate(messages):
            if new.dedup_id is not None:
                owners.setdefault(new.dedup_id, place)
        if not owners:
            return await self._publisher.publish(spec, subjects, missing)
        async with self._alone(spec.topic, owners) as busy:
            if not busy and (published := await self._publish_new(spec, messages, subjects, owners, missing)):
                return published
            results = await self._publish_once(spec, messages, subjects, owners, busy, missing)
        duplicates = [subject for subject, one in zip(subjects, results, strict=True) if one.status == "duplicate"]
        self._context.journal.record(
            EventKind.DUPLICATE, publishers_of(spec.topic), duplicates, self._context.clock.wall()
        )
        return results

    async def _publish_new(
        self,
        spec: TopicSpec,
        messages: Sequence[NewMessage],
        subjects: Sequence[OutgoingCopy],
        owners: Mapping[str, int],
        missing: Mapping[int, BrokerQueue],
    ) -> list[Published] | None:
        """Publish all messages in one transaction, if that is possible. Otherwise publish nothing, and return None."""
        atomic = self._context.atomic
        if atomic is None or sum(new.dedup_id is not None for new in messages) != len(owners):
            return None
        entries = [_entry(dedup_id, subjects[place]) for dedup_id, place in owners.items()]
        return await self._publisher.publish_new(atomic, spec, subjects, missing, entries)

    async def _publish_once(
        self,
        spec: TopicSpec,
        messages: Sequence[NewMessage],
        subjects: list[OutgoingCopy],
        owners: Mapping[str, int],
        busy: Collection[str],
        missing: Mapping[int, BrokerQueue],
    ) -> list[Published]:
        """Reserve the ids, publish the messages, and confirm the ids.

        ``owners``: the index of the first message with each id. ``busy``: the ids that other calls are publishing. If
        an id was already reserved for a copy, that copy replaces the message's copy in ``subjects``.
        """
        results: dict[int, Published] = {}
        for dedup_id in busy:
            detail = f"another publish of dedup_id {dedup_id!r} is still under way; publish it again for its result"
            place = owners[dedup_id]
            results[place] = Published("failed", subjects[place].message.message_id, NOT_CONFIRMED, detail)
        begun = [_entry(dedup_id, subjects[place]) for dedup_id, place in owners.items() if dedup_id not in busy]
        earlier: dict[str, Reservation] = {}
        try:
            earlier = await self._reserve(spec.topic, begun)
        except StateUnavailable as error:
            if all(new.dedup_id is not None for new in messages):
                raise
            for dedup_id, _, message_id, _ in begun:
                results[owners[dedup_id]] = Published("failed", message_id, error.code, error.detail)
            begun = []
        for dedup_id, (entry, is_confirmed) in earlier.items():
            place = owners[dedup_id]
            subjects[place] = subjects[place].as_copy(entry, spec.queue_count)
            if is_confirmed:
                results[place] = Published("duplicate", entry.message_id)
        if earlier:
            begun = [
                one if (other := earlier.get(one.dedup_id)) is None else other.entry
                for one in begun
                if owners[one.dedup_id] not in results
            ]
        places = [
            place
            for place, new in enumerate(messages)
            if place not in results and (new.dedup_id is None or owners[new.dedup_id] == place)
        ]
        await self._publish_begun(spec, subjects, places, begun, owners, missing, results)
        for place, new in enumerate(messages):
            if place not in results:  # an earlier message of this call has the same id
                first = owners[new.dedup_id or ""]
                subjects[place], results[place] = subjects[first], _as_repeated(results[first])
        return [results[place] for place in range(len(messages))]

    async def _publish_begun(
        self,
        spec: TopicSpec,
        subjects: Sequence[OutgoingCopy],
        places: Sequence[int],
        begun: Sequence[DedupEntry],
        owners: Mapping[str, int],
        missing: Mapping[int, BrokerQueue],
        results: dict[int, Published],
    ) -> None:
        """Publish the messages at the indexes ``places``, and confirm or cancel the reservations in ``begun``."""
        if not places:
            return
        try:
            published = await self._publisher.publish(spec, [subjects[place] for place in places], missing)
        except BrokerUnavailable as error:
            if not error.outcome_unknown:
                await self._cancel(spec.topic, begun)
            raise
        results.update(zip(places, published, strict=True))
        await self._confirm(spec.topic, [one for one in begun if results[owners[one.dedup_id]].status == "published"])
        unrouted = [one for one in begun if results[owners[one.dedup_id]].error_code == NO_SUBSCRIBERS]
        await self._cancel(spec.topic, unrouted)

    # -- the store ------------------------------------------------------------------------------------------------

    async def _reserve(self, topic: TopicName, entries: Sequence[DedupEntry]) -> dict[str, Reservation]:
        if not entries:
            return {}
        return await self._context.dedup.reserve(topic, entries, window_seconds=self._context.options.dedup_seconds)

    async def _confirm(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        if entries:
            try:
                await self._context.dedup.confirm(topic, entries)
            except StateUnavailable as error:  # the messages are published; a repeat publishes the same copies
                _log.warning("published dedup ids stay pending", extra={"topic": topic, "error": error.detail})

    async def _cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Release ids whose copies this call did not store.

        The store keeps ids that an earlier publish had reserved.
        """
        if entries:
            try:
                await self._context.dedup.cancel(topic, entries)
            except StateUnavailable as error:
                _log.warning("refused dedup ids stay pending", extra={"topic": topic, "error": error.detail})

    # -- waits ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self, topic: TopicName, dedup_ids: Collection[str]) -> AsyncGenerator[Collection[str]]:
        """Block other publishes of these ids in this process until the context exits.

        First wait for publishes of these ids that are in progress. Yield the ids that are still in progress after
        ``WAIT_SECONDS_MAX``. All ids are blocked in one step, so that no two calls wait for each other.
        """
        under_way = self._under_way[topic]
        busy: Collection[str] = ()
        mine = dedup_ids
        if not under_way.keys().isdisjoint(dedup_ids):
            await self._wait_for(topic, dedup_ids)
            under_way = self._under_way[topic]
            busy = under_way.keys() & dedup_ids
            mine = [one for one in dedup_ids if one not in busy]
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        under_way.update(dict.fromkeys(mine, ended))
        try:
            yield busy
        finally:
            for one in mine:
                del under_way[one]
            if not under_way:
                del self._under_way[topic]
            ended.set_result(None)

    async def _wait_for(self, topic: TopicName, dedup_ids: Collection[str]) -> None:
        """Wait until no other call publishes any of these ids, but for at most ``WAIT_SECONDS_MAX``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while others := {future for one in dedup_ids if (future := self._under_way[topic].get(one))}:
                    await asyncio.wait(others)


def _entry(dedup_id: str, subject: OutgoingCopy) -> DedupEntry:
    message = subject.message
    return DedupEntry(dedup_id, message.copy_id, message.message_id, subject.queue_index)


def _as_repeated(first: Published) -> Published:
    """Return the result of a message that has the same id as an earlier message (``first``) of the same call."""
    return Published("duplicate", first.message_id) if first.status in STORED else first
