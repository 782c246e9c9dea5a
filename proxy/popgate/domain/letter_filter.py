"""Decides whether a dead letter meets the conditions of a search.

``dead_letters`` uses the same conditions to list, redrive and purge letters, so that an operation affects exactly the
letters that the list has shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from popgate.domain.dead_letter import DeadLetterDetails, dead_letter_details, publisher_headers
from popgate.domain.message import Message
from popgate.domain.names import CopyId

BODY_BYTES_SEARCHED = 4_096
"""Maximum number of bytes at the beginning of a body in which ``text`` is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Conditions that a dead letter must all meet. None: no such condition. Texts are found in upper and lower case.

    ``text`` occurs in any of the letter's texts, or in the first ``BODY_BYTES_SEARCHED`` bytes of its body. ``reason``
    occurs in its reason or its last error, ``header`` in the name or value of one of the publisher's headers.
    ``cause``, ``client`` (that had it last), ``ordering_key`` and ``message_id`` are equal to the letter's. The message
    was dead-lettered at ``dead_after`` or later, and before ``dead_before`` (Unix seconds).
    """

    text: str | None = None
    cause: str | None = None
    reason: str | None = None
    client: str | None = None
    ordering_key: str | None = None
    message_id: str | None = None
    header: str | None = None
    dead_after: float | None = None
    dead_before: float | None = None

    def takes(self, letter: Message, copy_id: CopyId, dead_lettered_at: float) -> bool:
        """Return whether the dead letter ``copy_id`` meets all conditions."""
        if self.dead_after is not None and dead_lettered_at < self.dead_after:
            return False
        if self.dead_before is not None and dead_lettered_at >= self.dead_before:
            return False
        if self.message_id is not None and letter.message_id != self.message_id:
            return False
        if self.ordering_key is not None and letter.ordering_key != self.ordering_key:
            return False
        note = dead_letter_details(letter.headers)
        if self.cause is not None and note.cause != self.cause:
            return False
        if self.client is not None and note.last_client != self.client:
            return False
        return (
            _is_in(self.reason, _reasons(note))
            and _is_in(self.header, _headers(letter))
            and _is_in(self.text, _texts(letter, copy_id, note))
        )


def _is_in(wanted: str | None, texts: Iterator[str | None]) -> bool:
    if wanted is None:
        return True
    folded = wanted.casefold()
    return any(text is not None and folded in text.casefold() for text in texts)


def _reasons(note: DeadLetterDetails) -> Iterator[str | None]:
    yield note.reason
    if (error := note.last_error) is not None:
        yield f"{error.error_type}: {error.error_text}"


def _headers(letter: Message) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in publisher_headers(letter.headers).items())


def _texts(letter: Message, copy_id: CopyId, note: DeadLetterDetails) -> Iterator[str | None]:
    yield from (copy_id, letter.message_id, letter.ordering_key, note.cause, note.last_client)
    yield from _reasons(note)
    yield from _headers(letter)
    yield letter.body[:BODY_BYTES_SEARCHED].decode(errors="replace")
