"""Publishes messages: creates the copy and its id, chooses the queue, and publishes the copy to the broker.

This module does not depend on the consumers of the messages.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import count
from math import ceil
from typing import Literal, NamedTuple

from popgate.domain.message import HeaderValue, Message
from popgate.domain.names import (
    DEFAULT_GROUP,
    BrokerQueue,
    CopyId,
    GroupName,
    Subscription,
    TopicName,
    queue_index,
)
from popgate.domain.topics import TopicSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.ports.broker import Outgoing, PublishStatus
from popgate.ports.dedup import AtomicPublisher, DedupEntry
from popgate.ports.journal import EventKind

NO_SUBSCRIBERS = "no_subscribers"
NOT_CONFIRMED = "not_confirmed"
QUEUE_GONE = "a queue of one of the topic's groups does not exist on the broker; create the group again to declare it"
"""Does not name the group, which the publisher may not see. The log names the queue."""
NO_GROUP = "the topic has no group that would get it: create a group first"


class NewMessage(NamedTuple):
    """A message from a publisher. If ``message_id`` is None, popgate creates an id.

    ``ttl_seconds`` is measured from the end of the delay.
    """

    body: bytes
    headers: Mapping[str, HeaderValue]
    message_id: str | None = None
    ordering_key: str | None = None
    dedup_id: str | None = None
    delay_seconds: float = 0.0
    ttl_seconds: float | None = None


class Published(NamedTuple):
    """The result of publishing one message. ``status``: published, duplicate or failed.

    For a duplicate, ``message_id`` is the id of the message that was published first. ``error_code`` and
    ``error_detail`` are empty unless the message has failed.
    """

    status: Literal["published", "duplicate", "failed"]
    message_id: str
    error_code: str = ""
    error_detail: str = ""


class OutgoingCopy(NamedTuple):
    """A message copy that is to be published to a queue. It is also the subject of the journal event of its publish."""

    message: Message
    queue_index: int
    delay_seconds: float = 0.0
    delivery_count: int = 0
    leased_at: float = 0.0
    client: str | None = None
    invisibility_seconds: float = 0.0

    @property
    def copy_id(self) -> CopyId:
        return self.message.copy_id

    def as_copy(self, entry: DedupEntry, queue_count: int) -> "OutgoingCopy":
        """Return this message as the copy that was reserved for its ``dedup_id``.

        The result is for the queue of the reserved copy, if that queue still exists.
        """
        message = self.message._replace(copy_id=entry.copy_id, message_id=entry.message_id)
        index = entry.queue_index if entry.queue_index < queue_count else self.queue_index
        return self._replace(message=message, queue_index=index)


class Publisher:
    """Publishes messages to topics. ``groups_of`` returns the groups of a topic."""

    def __init__(self, context: EngineContext, groups_of: Callable[[TopicName], Sequence[GroupName]]) -> None:
        self._context = context
        self._groups_of = groups_of
        self._round_robin = count()

    def subjects(self, spec: TopicSpec, messages: Sequence[NewMessage]) -> list[OutgoingCopy]:
        """Return a new copy of each message, and choose the queue of each copy."""
        now = self._context.clock.wall()
        return [self._outgoing_copy(spec, new, now) for new in messages]

    async def publish(
        self, spec: TopicSpec, subjects: Sequence[OutgoingCopy], missing: Mapping[int, BrokerQueue]
    ) -> list[Published]:
        """Publish copies, and return one result for each copy, in the same order.

        A copy for one of the ``missing`` queues is not published at all, because it would not reach every group. A
        delayed copy is not published if the topic has no group now. Raises: BrokerUnavailable if no copy was stored.
        """
        groups = self._groups_of(spec.topic)
        if missing or not groups:
            refusals = [_refusal(subject, missing, has_groups=bool(groups)) for subject in subjects]
        else:
            refusals = [""] * len(subjects)
        outgoing = [
            _outgoing(spec, subject) for subject, refusal in zip(subjects, refusals, strict=True) if not refusal
        ]
        outcomes = iter(await self._context.broker.publish(outgoing))
        results: list[Published] = []
        stored: list[OutgoingCopy] = []
        for subject, refusal in zip(subjects, refusals, strict=True):
            message_id = subject.message.message_id
            if refusal:
                results.append(Published("failed", message_id, NO_SUBSCRIBERS, refusal))
                continue
            outcome = next(outcomes)
            if outcome.status is PublishStatus.PUBLISHED:
                stored.append(subject)
                results.append(Published("published", message_id))
            elif outcome.status is PublishStatus.UNROUTED:
                detail = outcome.detail or NO_GROUP
                results.append(Published("failed", message_id, NO_SUBSCRIBERS, detail))
            elif outcome.status is PublishStatus.REFUSED:
                results.append(Published("failed", message_id, "refused", outcome.detail))
            else:
                results.append(Published("failed", message_id, NOT_CONFIRMED, outcome.detail))
        # The time of the confirm. A later publish has a later time: the audit compares the two times.
        at = self._context.clock.wall()
        self._context.journal.record(EventKind.PUBLISHED, publishers_of(spec.topic), stored, at, groups=groups)
        return results

    async def publish_new(
        self,
        atomic: AtomicPublisher,
        spec: TopicSpec,
        subjects: Sequence[OutgoingCopy],
        missing: Mapping[int, BrokerQueue],
        entries: Sequence[DedupEntry],
    ) -> list[Published] | None:
        """Publish copies with new dedup ids in one transaction: all of them, or none.

        Return None if nothing was published, because an id was already used or a copy can't be published. Raises:
        BrokerUnavailable.
        """
        groups = self._groups_of(spec.topic)
        if any(_refusal(subject, missing, has_groups=bool(groups)) for subject in subjects):
            return None
        if not await atomic.publish_new(spec.topic, [_outgoing(spec, subject) for subject in subjects], entries):
            return None
        at = self._context.clock.wall()
        self._context.journal.record(EventKind.PUBLISHED, publishers_of(spec.topic), subjects, at, groups=groups)
        return [Published("published", subject.message.message_id) for subject in subjects]

    def _outgoing_copy(self, spec: TopicSpec, new: NewMessage, now: float) -> OutgoingCopy:
        copy_id = self._context.mint_copy_id()
        key = new.ordering_key
        index = queue_index(key, spec.queue_count) if key is not None else next(self._round_robin) % spec.queue_count
        delay_seconds = self._rounded(new.delay_seconds) if new.delay_seconds > 0 else 0.0
        message = Message(
            copy_id=copy_id,
            message_id=new.message_id or copy_id,
            body=new.body,
            headers=new.headers,
            ordering_key=key,
            published_at=now,
            visible_at=now + delay_seconds if delay_seconds else None,
            expires_at=now + delay_seconds + new.ttl_seconds if new.ttl_seconds is not None else None,
        )
        return OutgoingCopy(message, index, delay_seconds)

    def _rounded(self, delay_seconds: float) -> float:
        """Round a delay up to the broker's resolution, because a ttl begins when the message really becomes visible."""
        resolution = self._context.broker.capabilities.delay_resolution_seconds
        return ceil(delay_seconds / resolution) * resolution if resolution else delay_seconds


def _outgoing(spec: TopicSpec, subject: OutgoingCopy) -> Outgoing:
    message, index, delay_seconds = subject[:3]
    if not spec.adopted:
        return Outgoing(message=message, topic=spec.topic, index=index, delay_seconds=delay_seconds)
    queue = spec.adopted[index]
    if not delay_seconds:
        return Outgoing(message=message, queue=queue)
    return Outgoing(message=message, topic=spec.topic, index=index, queue=queue, delay_seconds=delay_seconds)


def _refusal(subject: OutgoingCopy, missing: Mapping[int, BrokerQueue], *, has_groups: bool) -> str:
    """Return why a message can't be published, or an empty string.

    If there is no group, the broker itself refuses messages without a delay.
    """
    if subject.queue_index in missing:
        return QUEUE_GONE
    return NO_GROUP if subject.delay_seconds and not has_groups else ""


class PublisherGate:
    """Blocks publishes to a topic while its queues change.

    Otherwise a message could be published to an empty queue that is about to be deleted, and would be lost.
    """

    def __init__(self) -> None:
        self._inside: dict[TopicName, int] = {}
        self._closed: dict[TopicName, asyncio.Event] = {}
        self._left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def entered(self, topic: TopicName) -> AsyncGenerator[None]:
        """Prevent changes of the topic's queues until the context exits.

        If the queues are being changed, first wait until the change is done.
        """
        while (opened := self._closed.get(topic)) is not None:
            await opened.wait()
        self._inside[topic] = self._inside.get(topic, 0) + 1
        try:
            yield
        finally:
            self._inside[topic] -= 1
            if not self._inside[topic]:
                del self._inside[topic]
                self._left.set()

    @contextlib.asynccontextmanager
    async def kept_out(self, topic: TopicName) -> AsyncGenerator[None]:
        """Wait until running publishes to the topic have ended, and block new ones until the context exits.

        Only one topic may be blocked at a time.
        """
        opened = self._closed[topic] = asyncio.Event()
        try:
            while topic in self._inside:
                self._left.clear()
                await self._left.wait()
            yield
        finally:
            del self._closed[topic]
            opened.set()


def publishers_of(topic: TopicName) -> Subscription:
    """Return the subscription for journal events of publishes: the given topic with the default group."""
    return Subscription(topic, DEFAULT_GROUP)
