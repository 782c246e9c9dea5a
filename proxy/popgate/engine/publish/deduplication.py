"""Deduplicates publishes: messages of a topic with the same ``dedup_id`` within the window are one message.

Owns the steps from a reservation to its confirm, and the waits between publishes of the same id in this process.
``ports.dedup`` stores the ids. If a copy was published twice, the lease records treat both as one message.

Every failure between the steps leaves an id pending, and a repeat publishes the same copy again: no message is lost,
and none is duplicated. The id is released only if the broker has certainly stored nothing. A refusal does not prove
this: if a topic has several groups, one queue may have accepted what another one refused.

If the broker and the store are one database, new ids need no reservation: they are confirmed with their messages in one
transaction.
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
"""Maximum seconds that a publish waits for another one with the same id: usually longer than the broker takes, and
shorter than clients wait for an answer."""
STORED = frozenset({"published", "duplicate"})


class Deduplicator:
    """Publishes through ``publisher``, each id once."""

    def __init__(self, context: EngineContext, publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._under_way: defaultdict[TopicName, dict[str, asyncio.Future[None]]] = defaultdict(dict)
        """The publishes under way, by dedup id."""

    async def publish(
        self, spec: TopicSpec, messages: Sequence[NewMessage], missing: Mapping[int, BrokerQueue]
    ) -> list[Published]:
        """Publish, and return one result for each message, in order; see ``Publisher.publish``.

        If several messages of a call have the same id, the first is published. Without the state store, messages with
        an id fail, and the others are published. Raises: BrokerUnavailable; StateUnavailable, if every message has an
        id.
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
        """Publish in one transaction, if that is possible. None: nothing was published."""
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
        """Reserve the ids, publish, and confirm. ``owners``: the place of each id's first message. ``subjects`` become
        the copies that were reserved for the ids."""
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
        """Publish the messages at ``places``, and confirm or cancel the reservations in ``begun``."""
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
            except StateUnavailable as error:  # they are published, and a repeat publishes the same copies
                _log.warning("published dedup ids stay pending", extra={"topic": topic, "error": error.detail})

    async def _cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        """Release ids whose copies were not stored this time. The store keeps ids that an earlier publish reserved."""
        if entries:
            try:
                await self._context.dedup.cancel(topic, entries)
            except StateUnavailable as error:
                _log.warning("refused dedup ids stay pending", extra={"topic": topic, "error": error.detail})

    # -- waits ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self, topic: TopicName, dedup_ids: Collection[str]) -> AsyncGenerator[Collection[str]]:
        """Exclude other calls in this process from these ids until the context exits.

        Yield the ids that other calls still use after the maximum wait. All ids are reserved at once, so that no two
        calls wait for each other.
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
        """Return when no other call publishes under any of these ids, or after ``WAIT_SECONDS_MAX``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while others := {future for one in dedup_ids if (future := self._under_way[topic].get(one))}:
                    await asyncio.wait(others)


def _entry(dedup_id: str, subject: OutgoingCopy) -> DedupEntry:
    message = subject.message
    return DedupEntry(dedup_id, message.copy_id, message.message_id, subject.queue_index)


def _as_repeated(first: Published) -> Published:
    """Return the result for a message whose id an earlier message of the same call has."""
    return Published("duplicate", first.message_id) if first.status in STORED else first
