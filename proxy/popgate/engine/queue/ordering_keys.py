"""Orders the messages of each ordering key in one queue: only the head of a key may be handed out.

The messages of a key form a linked list: each message links to the next. So a key costs one table entry, however many
messages it has. A message stays in its chain from its delivery until it is dropped, whatever its state. A message that
is dropped before it is the head is skipped when the chain is followed.

A redelivered message has no place in its chain at first, because the broker may deliver redelivered messages in another
order: if a channel ends before all of them were delivered on it, RabbitMQ puts the delivered messages behind the rest.
The message waits until all redelivered messages have arrived, and then gets its place by its position in the queue.

RabbitMQ delivers redelivered messages ahead of others. But a message that was sent to a consumer during the consumer's
cancellation can arrive behind messages that were published later. So a redelivered message is also inserted in front of
messages that no client has had, if they have later positions.
"""

from collections.abc import Iterable

from popgate.domain.message import Message, place_of
from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState


class OrderingKeys:
    """The chains of one queue. ``append`` must be called in queue order."""

    def __init__(self) -> None:
        self._last: dict[str, BufferedMessage] = {}
        self._deferred: list[tuple[tuple[int, CopyId], str, BufferedMessage]] = []

    @property
    def is_ordered(self) -> bool:
        """Whether no message waits for its place."""
        return not self._deferred

    def append(self, message: BufferedMessage, key: str) -> None:
        """Put a message behind all others of its key."""
        last = self._last.get(key)
        message.key = key
        message.is_head = last is None
        if last is not None:
            last.next = message
        self._last[key] = message

    def defer(self, message: BufferedMessage, key: str, delivered: Message) -> None:
        """Let a redelivered message wait until all redelivered messages have arrived."""
        message.is_head = False
        self._deferred.append((place_of(delivered), key, message))

    def order_deferred(self, known: Iterable[BufferedMessage]) -> list[BufferedMessage]:
        """Give each deferred message its place, and ranks in the same order. Return the messages that become heads.

        ``known`` are all messages of the queue.
        """
        deferred = [one for one in self._deferred if one[2].state is not MessageState.DROPPED]
        deferred.sort(key=lambda one: (_is_new(one[2]), one[0]))
        self._deferred = []
        ranks = sorted(message.rank for _, _, message in deferred)
        overtaken = {key for _, key, _ in deferred} & self._last.keys()
        heads = {message.key: message for message in known if message.is_head and message.key in overtaken}
        for (place, key, message), rank in zip(deferred, ranks, strict=True):
            message.rank = rank
            if (head := heads.get(key)) is None:
                self.append(message, key)
            elif self._insert(message, key, place, head):
                heads[key] = message
        return [message for _, _, message in deferred if message.is_head]

    def _insert(self, message: BufferedMessage, key: str, place: tuple[int, CopyId], head: BufferedMessage) -> bool:
        """Insert a message in front of the first message that no client has had and that has a later ``place``.

        Return whether the inserted message is the new head.
        """
        before: BufferedMessage | None = None
        following: BufferedMessage | None = head
        while following is not None and not _is_behind(following, place):
            before, following = following, following.next_of_key()
        if following is None:
            self.append(message, key)
            return False
        message.key, message.next = key, following
        message.rank = min(message.rank, following.rank)
        message.is_head = before is None
        if before is None:
            following.is_head = False
        else:
            before.next = message
        return message.is_head

    def remove(self, message: BufferedMessage) -> BufferedMessage | None:
        """Remove a dropped message. Return the message that becomes the head in its place, if any."""
        if message.key is None or not message.is_head:
            return None
        key, following = message.key, message.next_of_key()
        message.key = message.next = None
        if following is None:
            del self._last[key]
        else:
            following.is_head = True
        return following

    def clear(self) -> bool:
        """Forget all chains, because the queue delivers every message again. Return whether there were any."""
        were_any = bool(self._last or self._deferred)
        self._last.clear()
        self._deferred.clear()
        return were_any


def _is_behind(message: BufferedMessage, place: tuple[int, CopyId]) -> bool:
    """Whether no client has had ``message``, and it is behind ``place`` in the queue."""
    return _is_new(message) and message.message is not None and place_of(message.message) > place


def _is_new(message: BufferedMessage) -> bool:
    """Whether no client has ever had ``message``. Messages that clients have had stay in front of all others."""
    return message.state in UNSEEN and not message.delivery_count
