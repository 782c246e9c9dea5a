"""Traces lease groups: a PUT is a ``lease`` span, a read slice a ``receive`` span, and a settlement a span of its verb.

The conventions have no operation for a lease without messages, so a ``lease`` span has no type of operation. The read
of a slice links to the creation of its first messages and to the ``lease`` span, and the settlements link to the
``lease`` spans of the epochs that they settle. Any proxy serves any request for a lease group. So if this proxy does
not remember the group, it asks all others.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from time import time_ns

from opentelemetry.trace import Link, Span, SpanKind

from popgate.adapters.tracing.attributes import Attributes, attributes_of, note_error, note_failure
from popgate.adapters.tracing.contexts import LeaseContexts, context_in
from popgate.adapters.tracing.other_leases import OtherLeases
from popgate.adapters.tracing.spans import Spans, add_links, created_link, links_to
from popgate.domain.errors import PopgateError
from popgate.domain.names import StreamName
from popgate.domain.permissions import Permit, permit_all
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease_groups.group_settling import AckedGroups
from popgate.engine.lease_groups.lease_groups import ExtendedGroup, FormedGroup, LeaseGroups
from popgate.engine.lease_groups.slices import GroupMessage, Slice

LINKS_MAX = 256
"""Maximum number of messages to which the span of a read slice links."""
STREAMS_MAX = 1_000
"""Maximum number of streams whose latest lease groups are remembered."""
STREAM, EPOCH, LOST = "popgate.lease_group.stream", "popgate.lease_group.epoch", "popgate.lease_group.lost"
_SEPARATOR = "\0"
"""Separates the parts of a key. Names don't contain it."""


class TracedLeaseGroups(LeaseGroups):
    """Lease groups whose requests are traced."""

    def __init__(self, spans: Spans, others: OtherLeases, context: EngineContext, topics: Topics) -> None:
        super().__init__(context, topics)
        self._spans = spans
        self._others = others
        self._latest: OrderedDict[str, str] = OrderedDict()
        """The key of the latest lease group of each stream. Each remembered group names the one before it."""

    async def put(
        self,
        topic: str,
        group: str,
        stream: StreamName,
        epoch: int,
        *,
        max_messages: int,
        slices: int,
        invisibility_seconds: float | None,
        permit: Permit = permit_all,
    ) -> FormedGroup:
        began = time_ns()
        attributes = {**attributes_of("lease", None, topic, group, count=0), STREAM: stream, EPOCH: epoch}
        try:
            formed = await super().put(
                topic,
                group,
                stream,
                epoch,
                max_messages=max_messages,
                slices=slices,
                invisibility_seconds=invisibility_seconds,
                permit=permit,
            )
        except PopgateError as error:
            self._spans.record(f"lease {topic}", attributes, began, error=error)
            raise
        if formed.message_count or formed.existing:  # otherwise nothing was ready: clients poll
            attributes |= _counts(formed.message_count, formed.lost)
            self._leased(topic, group, stream, epoch, attributes, began)
        return formed

    def _leased(
        self, topic: str, group: str, stream: StreamName, epoch: int, attributes: Attributes, began: int
    ) -> None:
        """Make the span of a PUT. One that renews a lease group links to the span that has formed it."""
        key, leases = _key(topic, group, stream, epoch), self._spans.leases
        earlier = leases.get(key)
        links = [] if earlier is None else links_to([earlier])
        leased = self._spans.record(f"lease {topic}", attributes, began, links=links)
        if earlier is None:
            stream_key = _key(topic, group, stream)
            leases.remember(key, LeaseContexts("", None, leased, self._latest.get(stream_key)))
            self._latest[stream_key] = key
            self._latest.move_to_end(stream_key)
            while len(self._latest) > STREAMS_MAX:
                self._latest.popitem(last=False)

    async def read(self, topic: str, group: str, stream: StreamName, epoch: int, number: int) -> Slice:
        span = self._spans.receive(topic, time_ns())
        span.set_attributes(
            {**attributes_of("receive", "receive", topic, group, count=0), STREAM: stream, EPOCH: epoch}
        )
        try:
            found = await super().read(topic, group, stream, epoch, number)
        except PopgateError as error:
            note_error(span, error)
            self._end(span, _key(topic, group, stream, epoch))
            raise
        return found._replace(parts=self._parts(found, span, _key(topic, group, stream, epoch)))

    async def _parts(self, found: Slice, span: Span, key: str) -> AsyncGenerator[Sequence[GroupMessage]]:
        """Yield the parts of a slice, and end its span after the last one."""
        count, links = 0, list[Link]()
        try:
            async with aclosing(found.parts):
                async for part in found.parts:
                    count += len(part)
                    for one in part[: LINKS_MAX - len(links)]:
                        created = context_in(one.message.headers)
                        if created is not None:
                            links.append(created_link(created, one.message.message_id))
                    yield part
        except PopgateError as error:
            note_error(span, error)
            raise
        except BaseException:  # the client has left, or the proxy stops
            note_failure(span, "cancelled")
            raise
        finally:
            span.set_attributes(_counts(count))
            add_links(span, links)
            self._end(span, key)

    async def ack(self, topic: str, group: str, stream: StreamName, through: int) -> AckedGroups:
        key = _key(topic, group, stream, through)
        known = self._spans.leases.through(key)
        with self._settling("ack", topic, group, stream, known, key) as span:
            span.set_attribute(EPOCH, through)
            acked = await super().ack(topic, group, stream, through)
            span.set_attributes(_counts(acked.acked, acked.lost))
        self._forget(known)
        return acked

    async def release(self, topic: str, group: str, stream: StreamName, after: int) -> int:
        known = {key: lease for key, lease in self._known(topic, group, stream).items() if _epoch(key) > after}
        with self._settling("release", topic, group, stream, known) as span:
            released = await super().release(topic, group, stream, after)
            span.set_attributes(_counts(released))
        self._forget(known)
        return released

    async def extend(self, topic: str, group: str, stream: StreamName, seconds: float) -> list[ExtendedGroup]:
        with self._settling("extend", topic, group, stream, self._known(topic, group, stream)) as span:
            extended = await super().extend(topic, group, stream, seconds)
            span.set_attributes(_counts(sum(one.group.message_count for one in extended if one.is_held)))
            if any(not one.is_held for one in extended):
                note_failure(span, "expired")
            return extended

    # -- links ------------------------------------------------------------------------------------------------------

    def _known(self, topic: str, group: str, stream: StreamName) -> dict[str, LeaseContexts]:
        """Return the lease groups of a stream that this proxy remembers, the latest one first."""
        latest = self._latest.get(_key(topic, group, stream))
        return {} if latest is None else self._spans.leases.through(latest)

    def _forget(self, known: Iterable[str]) -> None:
        for key in known:
            self._spans.leases.forget(key)

    @contextmanager
    def _settling(
        self,
        verb: str,
        topic: str,
        group: str,
        stream: StreamName,
        known: Mapping[str, LeaseContexts],
        key: str | None = None,
    ) -> Generator[Span]:
        """Make the span of a settlement, with links to the ``known`` lease groups. If there are none, ask the other
        proxies for the one with this ``key``."""
        attributes = attributes_of(verb, None if verb == "extend" else "settle", topic, group, count=0)
        attributes[STREAM] = stream
        links = links_to(reversed([*known.values()]))
        with self._spans.span(f"{verb} {topic}", SpanKind.CLIENT, attributes, links, ends=False) as span:
            try:
                yield span
            finally:
                self._others.end_after_asking_all(span, [] if known or key is None else [key])

    def _end(self, span: Span, key: str) -> None:
        """End the span of a slice, with a link to the span that has leased the group."""
        known = self._spans.leases.get(key)
        add_links(span, [] if known is None else links_to([known]))
        self._others.end_after_asking_all(span, [key] if known is None else [])


def _key(topic: str, group: str, stream: StreamName, epoch: int | None = None) -> str:
    """Return under which key a lease group is remembered, or a stream if ``epoch`` is None."""
    return _SEPARATOR.join((topic, group, stream, *(() if epoch is None else (str(epoch),))))


def _epoch(key: str) -> int:
    return int(key.rpartition(_SEPARATOR)[2])


def _counts(count: int, lost: int = 0) -> Attributes:
    return {"messaging.batch.message_count": count, **({LOST: lost} if lost else {})}
