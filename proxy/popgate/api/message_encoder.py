"""Encodes messages in answers: one that can't be encoded is shown without its contents, so that the others can be
shown.

The formats can express every header that the brokers' adapters let through. This handles headers that they overlook:
otherwise one message would fail each pop that takes it, and with it the leases of all messages in the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from popgate.domain.dead_letter import bare
from popgate.domain.message import Message

Failed = Callable[[int, Message, Exception], None]
"""Called with the number of the queue, the message, and the error."""


class _HasMessage(Protocol):
    @property
    def message(self) -> Message: ...
    @property
    def queue(self) -> int: ...
    def _replace(self, *, message: Message) -> Any: ...


OneT = TypeVar("OneT", bound=_HasMessage)


class MessageEncoder:
    """Encodes messages. ``show`` converts a message for ``encode``; ``failed`` is called for messages that fail."""

    def __init__(self, show: Callable[[Any], Any], encode: Callable[[Any], bytes], failed: Failed) -> None:
        self._show = show
        self._encode = encode
        self._failed = failed

    def many(self, found: Sequence[_HasMessage], answer: Callable[[list[Any]], Any]) -> bytes:
        """Return the encoded answer that ``answer`` makes of all messages."""
        try:
            return self._encode(answer([self._show(one) for one in found]))
        except Exception:
            return self._encode(answer([self._show(self.readable(one)) for one in found]))

    def one(self, one: _HasMessage) -> bytes:
        """Return a message, encoded."""
        try:
            return self._encode(self._show(one))
        except Exception as error:
            return self._encode(self._show(self._bared(one, error)))

    def readable(self, one: OneT) -> OneT:
        """Return ``one``, without its contents if it can't be encoded."""
        try:
            self._encode(self._show(one))
        except Exception as error:
            return self._bared(one, error)
        return one

    def _bared(self, one: OneT, error: Exception) -> OneT:
        self._failed(one.queue, one.message, error)
        bared: OneT = one._replace(message=bare(one.message))  # pyright: ignore[reportPrivateUsage]  # a NamedTuple's
        return bared
