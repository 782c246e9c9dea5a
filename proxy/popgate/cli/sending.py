"""Sends batches of messages to the server, several of them at the same time. The results are in the order of the
batches.

This module starts the threads that send batches. They are daemon threads, so the process can end without waiting for a
server that does not answer.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from popgate_client import OutgoingMessage, PopgateError, PublishResult, RequestInvalid, RetryLater

WIDTH_MAX = 4

_FIELD = re.compile(r"^messages\[(\d+)\]")


class Numbered(NamedTuple):
    """A message and its position in the input. The first position is 1."""

    number: int
    message: OutgoingMessage


class Refusal(NamedTuple):
    """A message that was not published, and the reason. ``number`` is the message's position in the input."""

    number: int
    message_id: str | None
    code: str
    detail: str


@dataclass(slots=True)
class BatchResult:
    """The result of sending one batch. ``error`` is set if further batches would fail for the same reason."""

    published: int = 0
    """Number of published messages, including duplicates."""
    latest_id: str | None = None
    """The message id of the last one of them."""
    duplicates: int = 0
    refused: list[Refusal] = field(default_factory=list[Refusal])
    error: PopgateError | None = None


def send(publish: Callable[..., list[PublishResult]], topic: str, batch: Sequence[Numbered]) -> BatchResult:
    """Publish a batch. If the server refuses the whole batch because of one message, send the batch again without this
    message.

    Errors of the client library are not raised, but returned in the result.
    """
    batch_result = BatchResult()
    rest = list(batch)
    while rest:
        try:
            results = publish(topic, *(one.message for one in rest), raise_on_failure=False)
        except RequestInvalid as error:
            culprit = _FIELD.match(error.field or "")
            if culprit is None or int(culprit[1]) >= len(rest):
                return _none_of(rest, error, batch_result)
            numbered = rest.pop(int(culprit[1]))
            batch_result.refused.append(_refusal(numbered, error.code, error.detail))
        except PopgateError as error:
            return _none_of(rest, error, batch_result)
        else:
            for numbered, result in zip(rest, results, strict=True):
                if result.ok:
                    batch_result.published += 1
                    batch_result.latest_id = result.message_id
                    batch_result.duplicates += result.status == "duplicate"
                else:
                    reason = result.error or {}
                    code, detail = reason.get("code", result.status), reason.get("detail", "the server gave no reason")
                    batch_result.refused.append(_refusal(numbered, code, detail, result.message_id))
            break
    return batch_result


def _none_of(batch: Sequence[Numbered], error: PopgateError, batch_result: BatchResult) -> BatchResult:
    batch_result.error = error
    in_doubt = isinstance(error, RetryLater) and error.outcome_unknown
    detail = f"{error.detail}; the message may or may not be published" if in_doubt else error.detail
    batch_result.refused += [_refusal(one, error.code, detail) for one in batch]
    return batch_result


def _refusal(numbered: Numbered, code: str, detail: str, message_id: str | None = None) -> Refusal:
    # Omit the position in the request, which the user does not know. The message's position in the input is shown.
    reason = _FIELD.sub("", detail, count=1).lstrip(".")
    return Refusal(numbered.number, message_id or numbered.message.message_id, code, reason)


class Pipeline:
    """Sends at most ``WIDTH_MAX`` batches at the same time, in background threads. All calls must come from one
    thread."""

    def __init__(self, send_one: Callable[[Sequence[Numbered]], BatchResult]) -> None:
        self._send_one = send_one
        self._waiting: SimpleQueue[tuple[Future[BatchResult], Sequence[Numbered]]] = SimpleQueue()
        self._pending: deque[tuple[Future[BatchResult], int]] = deque()
        self._threads = 0

    @property
    def unanswered(self) -> int:
        """Number of messages that were submitted and whose result has not been read yet."""
        return sum(count for _, count in self._pending)

    def submit(self, batch: Sequence[Numbered]) -> None:
        """Send this batch in the background. The caller must call ``make_room`` first."""
        future: Future[BatchResult] = Future()
        self._pending.append((future, len(batch)))
        self._waiting.put((future, batch))
        if self._threads < min(WIDTH_MAX, len(self._pending)):
            self._threads += 1
            threading.Thread(target=self._work, name="popgate-publish", daemon=True).start()

    def make_room(self, *, alone: bool = False) -> Iterator[BatchResult]:
        """Yield the results of answered batches, and wait until another batch may be submitted.

        If ``alone``, wait until all submitted batches are answered. Otherwise wait until fewer than ``WIDTH_MAX``
        batches are unanswered.
        """
        limit = 1 if alone else WIDTH_MAX
        while self._pending and (len(self._pending) >= limit or self._pending[0][0].done()):
            yield self._first(None)

    def drain(self, patience_seconds: float | None = None) -> Iterator[BatchResult]:
        """Yield the results of all submitted batches. If ``patience_seconds`` is given, stop when the wait for the next
        result takes longer."""
        while self._pending:
            try:
                yield self._first(patience_seconds)
            except FutureTimeout:
                return

    def _first(self, patience_seconds: float | None) -> BatchResult:
        batch_result = self._pending[0][0].result(patience_seconds)
        self._pending.popleft()
        return batch_result

    def _work(self) -> None:
        while True:
            future, batch = self._waiting.get()
            try:
                future.set_result(self._send_one(batch))
            except BaseException as error:  # a bug of popgate: raise the error in the thread that waits
                future.set_exception(error)
