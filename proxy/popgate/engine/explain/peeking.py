"""Shows the messages of a group that this proxy has in memory, without leasing them.

Theory of operation. A peek walks through the messages of the queues that this proxy owns, a slice at a time, and keeps
the first ones behind a cursor, in order of rank. A second walk counts their places among the visible messages, and
finds the messages that block them. Nothing is changed. But a proxy reads messages from the broker only while clients
ask for them. So a peek with ``fetch`` first asks the broker for messages, as a pop does, if none are in memory.
"""

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice
from math import isfinite

from popgate.domain.dead_letter import publisher_headers
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.message import HeaderValue, Message
from popgate.domain.peeked import (
    FIRST,
    PREVIEW_BYTES_MAX,
    BlockedBy,
    Peek,
    PeekedLease,
    PeekedMessage,
    PeekState,
    Place,
    cursor_of,
)
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.explain.fetching import fetch
from popgate.engine.explain.slices import slices
from popgate.engine.explain.standing import STATE_NAMES, end_of, not_shown
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription

AHEAD_MAX = 1_000
"""Maximum number of messages of an ordering key that are counted in front of a blocked message."""
HEADERS_MAX, HEADER_LENGTH_MAX = 32, 256
"""Maximum number of headers that a peek shows of a message, and maximum number of characters of each value."""
VISIBLE = frozenset({MessageState.READY, MessageState.GRANTING, MessageState.REQUEUED})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekRequest:
    """What a peek selects. ``key``: only messages of this ordering key. ``after``: only messages behind this place.

    ``fetches``: whether messages are first read from the broker, if fewer than ``count_max`` are in memory.
    """

    state: PeekState = PeekState.ANY
    key: str | None = None
    count_max: int = 20
    after: Place = FIRST
    fetches: bool = False


async def peek(context: EngineContext, served: ServedSubscription, request: PeekRequest) -> Peek:
    """Return the first messages that ``request`` selects in the queues of this proxy."""
    if request.fetches:
        with suppress(BrokerUnavailable):
            await fetch(context, served, request.count_max)
    found: list[tuple[Place, BufferedMessage]] = []
    undelivered: dict[QueueHost, int] = {}
    is_pulled = served.group.is_pulled
    for host in served.hosts:
        if not host.is_owned:
            continue
        undelivered[host] = 0
        async for messages in slices(host):
            undelivered[host] += sum(message.tag is None for message in messages)
            chosen = _chosen(messages, request, is_pulled=is_pulled)
            if chosen:
                found = nsmallest(request.count_max + 1, [*found, *chosen], key=lambda one: one[0])
    is_cut = len(found) > request.count_max
    shown = await Showing(context, served, [message for _, message in found[: request.count_max]]).all()
    return Peek(
        messages=shown,
        next=cursor_of(found[request.count_max - 1][0]) if is_cut else None,
        not_shown=await not_shown_here(context, undelivered),
    )


def _chosen(
    messages: Iterable[BufferedMessage], request: PeekRequest, *, is_pulled: bool
) -> list[tuple[Place, BufferedMessage]]:
    chosen: list[tuple[Place, BufferedMessage]] = []
    for message in messages:
        if request.state is not PeekState.ANY and state_of(message, is_pulled=is_pulled) != request.state:
            continue
        if request.key is not None and ordering_key_of(message) != request.key:
            continue
        place = place_of(message)
        if place > request.after:
            chosen.append((place, message))
    return chosen


def place_of(message: BufferedMessage) -> Place:
    """Return the place of a message among all messages of its group."""
    return message.rank, message.queue_index, message.copy_id


def state_of(message: BufferedMessage, *, is_pulled: bool) -> str:
    """Return the name of a message's state. In pull mode no message is blocked, because a client gets a whole queue."""
    if message.state in VISIBLE and not message.is_head and not is_pulled:
        return PeekState.BLOCKED
    return STATE_NAMES[message.state]


def ordering_key_of(message: BufferedMessage) -> str | None:
    """Return the publisher's ordering key, as far as it is in memory."""
    return message.key or None if message.message is None else message.message.ordering_key


async def not_shown_here(context: EngineContext, undelivered: Mapping[QueueHost, int]) -> int | None:
    """Count the messages at the broker, in the given queues, that this proxy has not read.

    ``undelivered``: see ``standing.not_shown``. Return None if the broker does not answer.
    """
    try:
        depths = await context.broker.depth([host.broker_queue for host in undelivered])
    except BrokerUnavailable:
        return None
    return sum(
        (not_shown(host, depth, count) or 0) + depth.delayed
        for (host, count), depth in zip(undelivered.items(), depths, strict=True)
    )


class Showing:
    """Describes some messages of one group. ``all`` walks through their queues once more."""

    def __init__(self, context: EngineContext, served: ServedSubscription, messages: Sequence[BufferedMessage]) -> None:
        self._hosts = served.hosts
        self._is_pulled = served.group.is_pulled
        self._messages = messages
        self._wall_from = context.clock.wall() - context.clock.monotonic()
        self._heads: dict[tuple[int, str], BufferedMessage] = {}
        self._places: dict[BufferedMessage, int] = {}

    async def all(self) -> list[PeekedMessage]:
        """Return the descriptions, in the order of the messages. Messages that are settled meanwhile are left out."""
        for index in {message.queue_index for message in self._messages if message.state in VISIBLE}:
            await self._look_through(index)
        return [self._shown(one) for one in self._messages if one.state is not MessageState.DROPPED]

    async def _look_through(self, index: int) -> None:
        """Count the places of the visible messages of one queue, and find the heads of their ordering keys."""
        wanted = sorted((one for one in self._messages if one.queue_index == index and one.state in VISIBLE), key=_rank)
        ranks = [message.rank for message in wanted]
        keys = {message.key for message in wanted if not message.is_head}
        in_front = [0] * (len(wanted) + 1)  # for each wanted message: the visible ones since the wanted one before
        async for messages in slices(self._hosts[index]):
            for message in messages:
                if message.state in VISIBLE:
                    in_front[bisect_left(ranks, message.rank)] += 1
                if message.key is not None and message.is_head and message.key in keys:
                    self._heads[index, message.key] = message
        place = 0
        for message, count in zip(wanted, in_front, strict=False):
            place += count  # the message itself is counted, too
            self._places[message] = place

    def _shown(self, message: BufferedMessage) -> PeekedMessage:
        state = state_of(message, is_pulled=self._is_pulled)
        content = message.message
        is_leased = message.state is MessageState.LEASED
        ends_at = end_of(message, self._wall_from)
        lease = PeekedLease(client=message.client, leased_at=message.leased_at, deadline=ends_at)
        is_delayed = message.state is MessageState.DELAYED
        described = PeekedMessage(
            id=message.copy_id,
            message_id=None if content is None else content.message_id or message.copy_id,
            queue=message.queue_index,
            state=state,
            place=self._places.get(message),
            attempt=message.delivery_count,
            first_delivered_at=message.first_delivered_at or None,
            visible_at=ends_at if is_delayed else None,
            lease=lease if is_leased else None,
            blocked_by=self._blocked_by(message) if state == PeekState.BLOCKED else None,
            ordering_key=ordering_key_of(message),
            cursor=cursor_of(place_of(message)),
        )
        return described if content is None else _with_content(described, content)

    def _blocked_by(self, message: BufferedMessage) -> BlockedBy | None:
        head = None if message.key is None else self._heads.get((message.queue_index, message.key))
        if head is None or head.state is MessageState.DROPPED:
            return None
        ahead, one = 0, head
        while one is not message and ahead < AHEAD_MAX:
            ahead += 1
            following = one.next_of_key()
            if following is None:
                break
            one = following
        is_timed = head.state in (MessageState.LEASED, MessageState.DELAYED)
        return BlockedBy(
            id=head.copy_id,
            message_id=None if head.message is None else head.message.message_id or head.copy_id,
            state=STATE_NAMES[head.state],
            client=head.client if head.state is MessageState.LEASED else None,
            until=end_of(head, self._wall_from) if is_timed else None,
            ahead=ahead,
        )


def _with_content(described: PeekedMessage, content: Message) -> PeekedMessage:
    body = content.body[:PREVIEW_BYTES_MAX]
    text = _text(body, is_cut=len(body) < len(content.body))
    return replace(
        described,
        published_at=content.published_at or None,
        expires_at=content.expires_at,
        headers=_plain_headers(content.headers),
        body_preview=text,
        body_preview_base64=b64encode(body).decode() if text is None else None,
        body_bytes=len(content.body),
    )


def _plain_headers(headers: Mapping[str, HeaderValue]) -> dict[str, HeaderValue]:
    """Return the publisher's first headers, with values that every JSON reader accepts. Long values are cut."""
    shown = islice(publisher_headers(headers).items(), HEADERS_MAX)
    return {name: _plain(value) for name, value in shown}


def _plain(value: HeaderValue) -> HeaderValue:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= HEADER_LENGTH_MAX else text[:HEADER_LENGTH_MAX] + "..."


def _text(body: bytes, *, is_cut: bool) -> str | None:
    """Return the body as text, or None if it is no text. A cut may have split its last character."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        is_split = is_cut and error.reason == "unexpected end of data"
        return body[: error.start].decode() if is_split else None


def _rank(message: BufferedMessage) -> int:
    return message.rank
