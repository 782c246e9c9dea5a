"""Publishing once: the same ``dedup_id`` of a topic within the window is one message.

Owns the way from a reservation to its confirm, and who waits for whom in this process. What is stored and told of an id
is ``ports.dedup``'s; what makes one message of a copy that was published twice are the lease records.

The client's answer does not wait for the confirm, for nothing that it says depends on it; whoever repeats an id does.

Every failure on the way leaves an id pending, and a repeat publishes the same copy again: nothing is lost, and nothing
comes twice. Only where the broker has surely stored nothing is the id given up. A refusal is not such a case: where a
topic has several groups, one queue may have taken what another one refused.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence

from popgate.domain.errors import BrokerUnavailable, StateUnavailable
from popgate.domain.names import BrokerQueue, TopicName
from popgate.domain.topics import TopicSpec
from popgate.engine.publishing import (
    NO_SUBSCRIBERS,
    NOT_CONFIRMED,
    NewMessage,
    Published,
    Publisher,
    Subject,
    publishers_of,
)
from popgate.engine.room import Room
from popgate.ports.dedup import DedupEntry, Reserved, ReserveStatus
from popgate.ports.journal import EventKind

_log = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 20.0
"""How long a publish waits for another one with the same id: longer than a broker may take, as a rule, and shorter than
clients wait for an answer."""
STORED = frozenset({"published", "duplicate"})

_Key = tuple[TopicName, str]
_Taken = tuple[list[_Key], "asyncio.Future[None]"]


class Deduplicator:
    """Publishes through ``publisher``, each id once."""

    def __init__(self, room: Room, publisher: Publisher) -> None:
        self._room = room
        self._publisher = publisher
        self._under_way: dict[_Key, asyncio.Future[None]] = {}

    async def publish(
        self, spec: TopicSpec, messages: Sequence[NewMessage], missing: Mapping[int, BrokerQueue]
    ) -> list[Published]:
        """One result a message, in order; see ``Publisher.publish``.

        Of equal ids in one call the first is published. Without the state store messages with an id fail, and the
        others are published. Raises: BrokerUnavailable; StateUnavailable, where every message has an id.
        """
        subjects = self._publisher.subjects(spec, messages)
        owners: dict[str, int] = {}
        for place, new in enumerate(messages):
            if new.dedup_id is not None:
                owners.setdefault(new.dedup_id, place)
        if not owners:
            return await self._publisher.publish(spec, subjects, missing)
        busy, mine = await self._take(spec.topic, owners)
        stored: list[DedupEntry] = []
        try:
            results = await self._publish_once(spec, messages, subjects, owners, busy, missing, stored)
        finally:
            self._end(spec.topic, mine, stored)
        duplicates = [subject for subject, one in zip(subjects, results, strict=True) if one.status == "duplicate"]
        self._room.journal.record(EventKind.DUPLICATE, publishers_of(spec.topic), duplicates, self._room.clock.wall())
        return results

    async def _publish_once(
        self,
        spec: TopicSpec,
        messages: Sequence[NewMessage],
        subjects: list[Subject],
        owners: Mapping[str, int],
        busy: set[str],
        missing: Mapping[int, BrokerQueue],
        stored: list[DedupEntry],
    ) -> list[Published]:
        """``owners``: the place of each id's first message. Makes ``subjects`` the copies that stand for the ids, and
        notes in ``stored`` what is to be confirmed."""
        results: dict[int, Published] = {}
        proposals: list[DedupEntry] = []
        for dedup_id, place in owners.items():
            message = subjects[place].message
            if dedup_id in busy:
                detail = f"another publish of dedup_id {dedup_id!r} is still under way; publish it again to learn more"
                results[place] = Published("failed", message.message_id, NOT_CONFIRMED, detail)
            else:
                index = subjects[place].queue_index
                proposals.append(DedupEntry(dedup_id, message.copy_id, message.message_id, index))
        begun: list[Reserved] = []
        try:
            answers = await self._reserve(spec.topic, proposals)
        except StateUnavailable as error:
            if all(new.dedup_id is not None for new in messages):
                raise
            for dedup_id, _, message_id, _ in proposals:
                results[owners[dedup_id]] = Published("failed", message_id, error.code, error.detail)
        else:
            for answer in answers:
                place = owners[answer.entry.dedup_id]
                if answer.status is not ReserveStatus.FIRST:
                    subjects[place] = subjects[place].as_copy(answer.entry, spec.queue_count)
                if answer.status is ReserveStatus.CONFIRMED:
                    results[place] = Published("duplicate", answer.entry.message_id)
                else:
                    begun.append(answer)
        places = [
            place
            for place, new in enumerate(messages)
            if place not in results and (new.dedup_id is None or owners[new.dedup_id] == place)
        ]
        stored += await self._publish_begun(spec, subjects, places, begun, owners, missing, results)
        for place, new in enumerate(messages):
            if place not in results:  # its id stood in this call before
                first = owners[new.dedup_id or ""]
                subjects[place], results[place] = subjects[first], _as_repeated(results[first])
        return [results[place] for place in range(len(messages))]

    async def _publish_begun(
        self,
        spec: TopicSpec,
        subjects: Sequence[Subject],
        places: Sequence[int],
        begun: Sequence[Reserved],
        owners: Mapping[str, int],
        missing: Mapping[int, BrokerQueue],
        results: dict[int, Published],
    ) -> list[DedupEntry]:
        """Publish what stands at ``places``; what of that which was ``begun`` is stored now."""
        if not places:
            return []
        try:
            published = await self._publisher.publish(spec, [subjects[place] for place in places], missing)
        except BrokerUnavailable as error:
            if not error.outcome_unknown:
                await self._cancel(spec.topic, [one.entry for one in begun if one.status is ReserveStatus.FIRST])
            raise
        results.update(zip(places, published, strict=True))
        stored: list[DedupEntry] = []
        unrouted: list[DedupEntry] = []
        for status, entry in begun:
            result = results[owners[entry.dedup_id]]
            if result.status == "published":
                stored.append(entry)
            elif status is ReserveStatus.FIRST and result.error_code == NO_SUBSCRIBERS:
                unrouted.append(entry)
        await self._cancel(spec.topic, unrouted)
        return stored

    # -- the store ------------------------------------------------------------------------------------------------

    async def _reserve(self, topic: TopicName, proposals: Sequence[DedupEntry]) -> list[Reserved]:
        if not proposals:
            return []
        return await self._room.dedup.reserve(topic, proposals, window_seconds=self._room.options.dedup_seconds)

    async def _cancel(self, topic: TopicName, entries: Sequence[DedupEntry]) -> None:
        if entries:
            try:
                await self._room.dedup.cancel(topic, entries)
            except StateUnavailable as error:
                _log.warning("refused ids stay pending", extra={"topic": topic, "error": error.detail})

    # -- who waits for whom ---------------------------------------------------------------------------------------

    async def _take(self, topic: TopicName, dedup_ids: Iterable[str]) -> tuple[set[str], _Taken]:
        """The ids that nobody else in this process publishes under from now on until their ``_end``; and before them
        those that were under way for too long. All are taken at once, so that no two calls wait for each other."""
        keys = [(topic, dedup_id) for dedup_id in dedup_ids]
        under_way = self._under_way
        if not under_way.keys().isdisjoint(keys):
            await self._wait_for(keys)
        busy = under_way.keys() & keys
        mine = [key for key in keys if key not in busy] if busy else keys
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        under_way.update(dict.fromkeys(mine, ended))
        return {dedup_id for _, dedup_id in busy}, (mine, ended)

    def _end(self, topic: TopicName, taken: _Taken, stored: Sequence[DedupEntry]) -> None:
        """Let others publish under what was ``taken``, once it is written that these are ``stored``."""
        if stored:
            confirming = self._confirm(topic, stored, taken)
            if self._room.background.spawn(confirming, name="confirm dedup_ids") is not None:
                return
        self._give_up(taken)

    async def _confirm(self, topic: TopicName, stored: Sequence[DedupEntry], taken: _Taken) -> None:
        try:
            await self._room.dedup.confirm(topic, stored)
        except StateUnavailable as error:  # they are published, and a repeat publishes the same copies
            _log.warning("published ids stay pending", extra={"topic": topic, "error": error.detail})
        finally:
            self._give_up(taken)

    def _give_up(self, taken: _Taken) -> None:
        mine, ended = taken
        for key in mine:
            del self._under_way[key]
        ended.set_result(None)

    async def _wait_for(self, keys: Sequence[_Key]) -> None:
        """Return when nobody publishes under any of ``keys``, or after a time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while others := {self._under_way[key] for key in keys if key in self._under_way}:
                    await asyncio.wait(others)


def _as_repeated(first: Published) -> Published:
    """The result of a message whose id stood in the same call before."""
    return Published("duplicate", first.message_id) if first.status in STORED else first
