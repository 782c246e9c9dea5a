"""Records the attempts on a message in its lease record: who had it, when, how the attempt ended, and the error.

Theory of operation. The text ``reason`` of a lease record has two parts: the reason of a move to the dead letters, and
after it the latest attempts, each behind a separator. The proxy that settles a lease describes the attempt, as far as
it knows it: its end, the client, the error. The store adds what only the record knows: the number of the attempt, and
its times. This happens in the same atomic step as the settlement, so that no attempt is recorded twice. When a message
is leased again, its record keeps the attempts. A dead letter carries them in one of its headers.

An attempt in a record is ``NUMBER,LEASED_AT,ENDED_AT,END{JSON}``: the times are Unix milliseconds, the end is one
letter, and the JSON object has short names. ``scripts/records.lua`` does the same as ``noted``.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, cast

ATTEMPTS_MAX = 8
"""Maximum number of attempts that a record keeps: the latest ones."""
ERROR_TYPE_LENGTH_MAX, ERROR_TEXT_LENGTH_MAX = 128, 500
"""Maximum number of characters of an error's type and text in a record."""
SEPARATOR = "\x1f"


class AttemptEnd(StrEnum):
    """How an attempt ended."""

    RELEASED = "released"
    REJECTED = "rejected"
    EXPIRED = "expired"


_LETTERS = {AttemptEnd.RELEASED: "r", AttemptEnd.REJECTED: "x", AttemptEnd.EXPIRED: "e"}
_ENDS = {letter: end for end, letter in _LETTERS.items()}
EXPIRED_MARK = _LETTERS[AttemptEnd.EXPIRED]


class Cause(NamedTuple):
    """Why a client gives a message back: the type and the text of its error, and the client's name."""

    error_type: str = ""
    error_text: str = ""
    client: str = ""


class Attempt(NamedTuple):
    """One attempt. ``attempt`` counts from 1; the times are Unix seconds. An unknown text is empty."""

    attempt: int
    leased_at: float
    ended_at: float
    outcome: str
    client: str = ""
    error_type: str = ""
    error_text: str = ""
    reason: str = ""


def described(reason: str, end: AttemptEnd, cause: Cause | None, *, attempt_reason: str = "") -> str:
    """Return the ``reason`` of a settlement that ends an attempt.

    ``reason``: why the message moves to the dead letters, or empty. ``attempt_reason``: the client's reason for a
    release.
    """
    fields = {"r": attempt_reason}
    if cause is not None:
        fields |= {
            "c": cause.client,
            "t": cause.error_type[:ERROR_TYPE_LENGTH_MAX],
            "m": cause.error_text[:ERROR_TEXT_LENGTH_MAX],
        }
    given = {name: value for name, value in fields.items() if value}
    details = json.dumps(given, ensure_ascii=False, separators=(",", ":")) if given else ""
    return f"{reason.replace(SEPARATOR, ' ')}{SEPARATOR}{_LETTERS[end]}{details}"


def noted(earlier: str, new: str, number: int, leased_at: float, ended_at: float) -> str:
    """Return the new ``reason`` of a record.

    ``earlier``: the present one. ``new``: that of the settlement. ``number``, ``leased_at`` and ``ended_at`` (Unix
    seconds) describe the attempt that ``new`` describes, if it describes one.
    """
    head, separator, attempt = new.partition(SEPARATOR)
    old_head, *attempts = earlier.split(SEPARATOR)
    if separator:
        attempts.append(f"{number},{_milliseconds(leased_at)},{_milliseconds(ended_at)},{attempt}")
    return SEPARATOR.join([head or old_head, *attempts[-ATTEMPTS_MAX:]])


def without_attempt(new: str) -> str:
    """Return the ``reason`` of a settlement without the attempt that it describes."""
    return new.partition(SEPARATOR)[0]


def read(reason: str) -> tuple[str, list[Attempt]]:
    """Return the two parts of a record's ``reason``. What can't be read is left out.

    If an attempt was recorded twice, because its lease expired before its client released it, the later one counts.
    """
    head, *texts = reason.split(SEPARATOR)
    attempts: dict[int, Attempt] = {}
    for text in texts:
        attempt = _read(text)
        if attempt is not None:
            attempts[attempt.attempt] = attempt
    return head, list(attempts.values())


def _read(text: str) -> Attempt | None:
    try:
        number, leased_at, ended_at, rest = text.split(",", 3)
        fields = _object(rest[1:]) if rest[1:] else {}
        return Attempt(
            attempt=int(number),
            leased_at=int(leased_at) / 1000,
            ended_at=int(ended_at) / 1000,
            outcome=_ENDS[rest[0]],
            client=str(fields.get("c", "")),
            error_type=str(fields.get("t", "")),
            error_text=str(fields.get("m", "")),
            reason=str(fields.get("r", "")),
        )
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None


def _object(text: str) -> dict[str, Any]:
    found: object = json.loads(text)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def header_of(attempts: Sequence[Attempt]) -> str:
    """Return the attempts as the JSON text of a dead letter's header."""
    rows = [{name: value for name, value in one._asdict().items() if value != ""} for one in attempts]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


def read_header(value: object) -> list[Attempt]:
    """Return the attempts in a dead letter's header. What popgate would not write is left out."""
    if not isinstance(value, str):
        return []
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError):
        return []
    rows = cast("list[object]", found)[:ATTEMPTS_MAX] if isinstance(found, list) else []
    return [attempt for row in rows if isinstance(row, dict) and (attempt := _of_row(cast("dict[str, Any]", row)))]


def _of_row(row: dict[str, Any]) -> Attempt | None:
    numbers = {name: row.get(name) for name in ("attempt", "leased_at", "ended_at")}
    texts = {name: row.get(name, "") for name in Attempt._fields[3:]}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers.values()):
        return None
    if not all(isinstance(value, str) for value in texts.values()):
        return None
    return Attempt(**numbers, **texts)  # type: ignore[arg-type]  # checked above


def _milliseconds(at: float) -> int:
    """Return Unix milliseconds. A record's times are whole microseconds."""
    return round(at * 1_000_000) // 1000
