"""Decides what a handler's result means for its message: acked, released with a delay, or rejected. Does no I/O."""

from dataclasses import dataclass, replace

from popgate_client.causes import REASON_LENGTH_MAX, error_texts, shortened
from popgate_client.message import Message, SettleEntry, Verb

DELAY_SECONDS_MAX = 43_200.0


class Reject(Exception):  # a decision of the handler, not an error
    """A handler raises this if the message can never be handled: it moves to the dead-letter queue with the reason."""

    def __init__(self, reason: object = "") -> None:
        self.reason = str(reason)  # usually an exception
        self.error = reason if isinstance(reason, BaseException) else None
        super().__init__(self.reason)


class Retry(Exception):  # a decision of the handler, not an error
    """A handler raises this to retry later: the message becomes visible again after `delay_seconds` (0 to 43,200)."""

    def __init__(self, delay_seconds: float, reason: object = "") -> None:
        if not 0 <= delay_seconds <= DELAY_SECONDS_MAX:
            raise ValueError(f"delay_seconds must be 0 to {DELAY_SECONDS_MAX:.0f}, not {delay_seconds}")
        self.delay_seconds = float(delay_seconds)  # a Decimal passes the check above, but JSON can't encode it
        self.reason = str(reason)
        self.error = reason if isinstance(reason, BaseException) else None
        super().__init__(self.delay_seconds, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDelays:
    """The delay of a failed message: `initial_seconds * multiplier ** (delivery_count - 1)`, at most `seconds_max`.

    Raises: ValueError for values that make no delay.
    """

    initial_seconds: float = 1.0
    multiplier: float = 2.0
    seconds_max: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.initial_seconds <= self.seconds_max <= DELAY_SECONDS_MAX:
            raise ValueError(f"the retry delays must satisfy 0 <= initial <= max <= {DELAY_SECONDS_MAX:.0f} seconds")
        if not 1 <= self.multiplier <= 100:
            raise ValueError(f"the retry multiplier must be 1 to 100, not {self.multiplier}")

    def delay_seconds(self, delivery_count: int) -> float:
        """Return the delay after the delivery with this count (1 for the first)."""
        # The exponent is bounded, because a message delivered a thousand times would overflow a float.
        exponent = min(max(delivery_count - 1, 0), 64)
        return min(self.initial_seconds * self.multiplier**exponent, self.seconds_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """The part of a group's policy that applies to failed messages. `max_deliveries` None: no limit."""

    max_deliveries: int | None = None
    retry: RetryDelays = RetryDelays()


@dataclass(frozen=True, slots=True)
class Settlement:
    """A verb and the entry that goes with it. `message_id`: of the message, for the log."""

    verb: Verb
    entry: SettleEntry
    message_id: str | None = None


def settlement_for(message: Message, error: BaseException | None, delays: RetryDelays | None) -> Settlement:
    """Return the settlement for a handler's return (`error` is None) or exception. Without `delays` the group's retry
    policy sets the delay of a failed message.

    The reason of a failure is only the exception's type, because the journal keeps the reason, and the exception's text
    may contain parts of the body. The text is sent separately, for the dead letter.
    """
    handle, message_id = message.receipt_handle, message.message_id
    match error:
        case None:
            return Settlement(Verb.ACK, SettleEntry(receipt_handle=handle), message_id)
        case Reject():
            entry = SettleEntry(receipt_handle=handle, reason=_reason(error.reason))
            return Settlement(Verb.REJECT, _with_error(entry, _inner(error)), message_id)
        case Retry():
            entry = SettleEntry(receipt_handle=handle, delay_seconds=error.delay_seconds, reason=_reason(error.reason))
            return Settlement(Verb.RELEASE, _with_error(entry, _inner(error)), message_id)
        case _:
            entry = SettleEntry(
                receipt_handle=handle,
                delay_seconds=delays.delay_seconds(message.delivery_count) if delays else None,
                reason=_reason(type(error).__name__),
            )
            return Settlement(Verb.RELEASE, _with_error(entry, error), message_id)


def settlement_in_place(
    message: Message, error: BaseException, delays: RetryDelays | None, policy: GroupPolicy
) -> Settlement | float:
    """Return what to do with a failed message of a queue whose order is kept: the seconds after which it is handled
    again, before all messages behind it, or its rejection. `delivery_count` counts the tries so far."""
    if isinstance(error, Reject):
        return settlement_for(message, error, delays)
    count = message.delivery_count
    if policy.max_deliveries is not None and count >= policy.max_deliveries:
        reason = _reason(f"max_deliveries: {error.reason if isinstance(error, Retry) else type(error).__name__}")
        entry = SettleEntry(receipt_handle=message.receipt_handle, reason=reason)
        return Settlement(Verb.REJECT, _with_error(entry, _inner(error) if isinstance(error, Retry) else error))
    return error.delay_seconds if isinstance(error, Retry) else (delays or policy.retry).delay_seconds(count)


def give_back(message: Message) -> Settlement:
    """Return a release without delay, for a message whose handler has not started or may not end."""
    # The delay is explicit, because a release without one gets the group's retry back-off.
    entry = SettleEntry(receipt_handle=message.receipt_handle, delay_seconds=0.0)
    return Settlement(Verb.RELEASE, entry, message.message_id)


def _inner(error: Reject | Retry) -> BaseException | None:
    """Return the exception that a handler's decision is about: its reason, or the one that it was raised from."""
    # A subclass may not call __init__.
    return getattr(error, "error", None) or error.__cause__


def _with_error(entry: SettleEntry, error: BaseException | None) -> SettleEntry:
    """Return the entry with the type and the text of an exception."""
    texts = error_texts(error)
    return replace(entry, error_type=texts.type, error_text=texts.text)


def _reason(text: str) -> str | None:
    return shortened(text, REASON_LENGTH_MAX)
