"""Decides what happens to each message of an active consumer: ack, another try, or dead letter; calls the handler.

Owns no channel: `place` passes deliveries in and acks them.
"""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from aiormq.abc import DeliveredMessage

from popgate_client.amqp import delivered as deliveries
from popgate_client.calling import Handler, HandlerCalls
from popgate_client.counters import Counters
from popgate_client.facts import FactLogger
from popgate_client.handling import Reject, Retry, RetryDelays, Settlement, settlement_for
from popgate_client.message import Message, Verb

logger = FactLogger(__name__)

MAX_DELIVERIES = "max_deliveries"


class Traces(Protocol):
    """What `popgate_client.tracing.Tracing` does. This module does not import it, because it needs an extra."""

    def processed(self, handler: Handler) -> Handler: ...

    def settling(self, message: Message, verb: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The settings of a run, the same for all queues. `slots` bounds the handlers that run at once, `workers` those of
    one queue. `tracing` None: nothing is traced."""

    calls: HandlerCalls
    slots: asyncio.Semaphore
    workers: int
    prefetch_count: int
    delays: RetryDelays
    max_deliveries: int | None
    counters: Counters
    error_texts: bool = True
    """Whether dead letters contain the texts of exceptions, and not only their types."""
    tracing: Traces | None = None

    def settling(self, message: Message, verb: str) -> AbstractContextManager[None]:
        """Return the context within which a message is settled."""
        return nullcontext() if self.tracing is None else self.tracing.settling(message, verb)


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """Why a message goes to the dead letters."""

    cause: str
    reason: str | None


def judge(work: Work, message: Message, settlement: Settlement) -> float | DeadLetterCause | None:
    """Return what a handler's result means. None: ack; a number: try again after this many seconds."""
    match settlement.verb:
        case Verb.ACK:
            return None
        case Verb.REJECT:
            return DeadLetterCause("rejected", settlement.entry.reason)
        case _:
            if work.max_deliveries is not None and message.delivery_count >= work.max_deliveries:
                return DeadLetterCause(MAX_DELIVERIES, MAX_DELIVERIES)
            return settlement.entry.delay_seconds or 0.0


def settlement_of(work: Work, message: Message, error: BaseException | None) -> Settlement:
    """Return the settlement for a handler's return (`error` is None) or exception."""
    try:
        return settlement_for(message, error, work.delays)
    except Exception as undecidable:  # a subclass of Retry or Reject with unusable fields: treat it as a failure
        return settlement_for(message, undecidable, work.delays)


def again(message: Message) -> Message:
    """Return the message for the next try."""
    return replace(message, delivery_count=message.delivery_count + 1)


async def call_handler(work: Work, message: Message) -> BaseException | None:
    """Call the handler, count the result, and return what it raised. Raises only the cancellation of this task."""
    error: BaseException | None = None
    try:
        await work.calls.call(message)
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            message.lease_lost.set()  # for a thread that runs on: its work will not be acked
            raise
        error = cancelled
    except (KeyboardInterrupt, GeneratorExit):  # this process is to end
        raise
    except BaseException as raised:  # a library's sys.exit or panic must not take the other messages with it
        error = raised
    if error is None:
        work.counters.handled += 1
    elif not isinstance(error, Retry | Reject):
        work.counters.failed += 1
        logger.error(
            "the handler failed",
            exc_info=error,
            extra={
                "topic": message.topic,
                "group": message.group,
                "message_id": message.message_id,
                "delivery_count": message.delivery_count,
                "cause": type(error).__name__,
            },
        )
    return error


def is_worth_handling(delivered: DeliveredMessage) -> bool:
    """Whether to handle the message: not if its time to live is over; then it ends here."""
    return not deliveries.is_expired(delivered)
