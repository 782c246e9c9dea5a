"""Builds the requests about dead letters and purges (the server's docs/dead-letters.md).

Owns their paths and fields; both clients have a method for each. Does no I/O.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from popgate_client.wire import ANSWER_SECONDS, Request, admin_path, encode

PURGE_SECONDS = 40.0
"""Seconds that the server may be silent during a purge: it purges for at most 20 s, then answers with the progress."""


def list_path(
    topic: str,
    group: str,
    *,
    max_messages: int | None,
    after: str | None,
    body_bytes_max: int | None,
    conditions: Mapping[str, Any] | None,
) -> str:
    query = {**(conditions or {}), "max_messages": max_messages, "after": after, "body_bytes_max": body_bytes_max}
    given = urlencode({name: value for name, value in query.items() if value is not None})
    return f"{admin_path(topic, group)}/dead-letters" + (f"?{given}" if given else "")


def letter_path(topic: str, group: str, letter_id: str) -> str:
    return f"{admin_path(topic, group)}/dead-letters/{quote(letter_id, safe='')}"


def redrive_path(topic: str, group: str) -> str:
    return f"{admin_path(topic, group)}/dead-letters/redrive"


def redrive_request(
    topic: str,
    group: str,
    *,
    ids: Sequence[str] | None,
    message_ids: Sequence[str] | None,
    conditions: Mapping[str, Any] | None,
    max_messages: int | None,
    target_topic: str | None,
    rate_per_second: float | None,
    wait_seconds: float,
) -> Request:
    fields = {
        "ids": None if ids is None else list(ids),
        "message_ids": None if message_ids is None else list(message_ids),
        "filter": None if conditions is None else dict(conditions),
        "max_messages": max_messages,
        "target_topic": target_topic,
        "rate_per_second": rate_per_second,
        "wait_seconds": wait_seconds or None,
    }
    return Request(
        method="POST",
        path=redrive_path(topic, group),
        content=encode({name: value for name, value in fields.items() if value is not None}),
        silence_seconds=max(0.0, wait_seconds) + ANSWER_SECONDS,
    )


def purge_letters_request(
    topic: str,
    group: str,
    *,
    ids: Sequence[str] | None,
    message_ids: Sequence[str] | None,
    conditions: Mapping[str, Any] | None,
    older_than_seconds: float | None,
) -> Request:
    fields = {
        "ids": None if ids is None else list(ids),
        "message_ids": None if message_ids is None else list(message_ids),
        "filter": None if conditions is None else dict(conditions),
        "older_than_seconds": older_than_seconds,
    }
    return Request(
        method="POST",
        path=f"{admin_path(topic, group)}/dead-letters/purge",
        content=encode({name: value for name, value in fields.items() if value is not None}),
        silence_seconds=PURGE_SECONDS,
    )


def purge_request(topic: str, group: str) -> Request:
    return Request(method="POST", path=f"{admin_path(topic, group)}/purge", silence_seconds=PURGE_SECONDS)
