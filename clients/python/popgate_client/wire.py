"""The HTTP interface, version 1, as values: requests as they are written, answers as they are read (design section 3).

This module owns paths, JSON shapes and the limits of one request. It does no I/O and repeats nothing: `exchange`
strings requests together and `transport` carries them.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

from popgate_client.errors import RequestInvalid, ServerFault, ServerUnreachable, error_from
from popgate_client.message import Message, OutgoingMessage, PublishResult, SettleEntry, SettleResult, Verb

ENTRIES_MAX = 256
REQUEST_BYTES_MAX = 60 * 1024 * 1024
"""Below the server's 64 MiB, so that what is around the entries always fits."""
ANSWER_SECONDS = 10.0
"""How long the server may be silent, beyond the wait that the request itself asks for."""
DETAIL_LENGTH_MAX = 200

Method: TypeAlias = Literal["GET", "PUT", "POST", "DELETE"]
JsonObject: TypeAlias = dict[str, Any]
T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request; `content` is JSON or None, `silence_seconds` the longest silence before it counts as lost."""

    method: Method
    path: str
    content: bytes | None = None
    silence_seconds: float = ANSWER_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP answer; `retry_after_seconds` is 0.0 where the header is absent."""

    status: int
    body: bytes
    retry_after_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """No answer; `sent` is False only where the request surely never left."""

    sent: bool
    cause: Exception


Reply: TypeAlias = Answer | Unanswered


def topic_path(topic: str) -> str:
    return f"/v1/topics/{_segment('topic', topic)}"


def subscription_path(topic: str, group: str) -> str:
    return f"{topic_path(topic)}/groups/{_segment('group', group)}"


def admin_path(topic: str, group: str | None = None) -> str:
    path = f"/v1/admin/topics/{_segment('topic', topic)}"
    return path if group is None else f"{path}/groups/{_segment('group', group)}"


def publish_request(topic: str, entries: Sequence[bytes]) -> Request:
    return Request(method="POST", path=f"{topic_path(topic)}/messages", content=_list_object("messages", entries))


def pop_request(
    topic: str,
    group: str,
    *,
    max_messages: int,
    wait_seconds: float,
    invisibility_seconds: float | None,
    attempt_id: str,
) -> Request:
    fields = {
        "max_messages": max_messages,
        "wait_seconds": wait_seconds,
        "invisibility_seconds": invisibility_seconds,
        "attempt_id": attempt_id,
    }
    return Request(
        method="POST",
        path=f"{subscription_path(topic, group)}/pop",
        content=encode(_without_none(fields)),
        silence_seconds=max(0.0, wait_seconds) + ANSWER_SECONDS,
    )


def settle_request(topic: str, group: str, verb: Verb, entries: Sequence[bytes]) -> Request:
    name = "receipt_handles" if verb is Verb.ACK else "entries"
    path = f"{subscription_path(topic, group)}/{verb}"
    return Request(method="POST", path=path, content=_list_object(name, entries))


def outgoing_entry(message: OutgoingMessage | str | bytes) -> bytes:
    """One message as it stands in a publish request.

    Raises: RequestInvalid when it can't be written as JSON.
    """
    if isinstance(message, str | bytes):
        message = OutgoingMessage(body=message)
    fields: JsonObject = {
        "headers": dict(message.headers) if message.headers is not None else None,
        "message_id": message.message_id,
        "ordering_key": message.ordering_key,
        "dedup_id": message.dedup_id,
        "delay_seconds": message.delay_seconds,
        "ttl_seconds": message.ttl_seconds,
    }
    if isinstance(message.body, str):
        fields["body"] = message.body
    else:
        fields["body_base64"] = base64.b64encode(message.body).decode("ascii")
    return encode(_without_none(fields))


def settle_entry(verb: Verb, entry: SettleEntry) -> bytes:
    """One lease as it stands in a settle request: a bare handle for ack, an object for the others."""
    if verb is Verb.ACK:
        return encode(entry.receipt_handle)
    fields = {
        "receipt_handle": entry.receipt_handle,
        "delay_seconds": entry.delay_seconds,
        "invisibility_seconds": entry.invisibility_seconds,
        "reason": entry.reason,
    }
    return encode(_without_none(fields))


def chunks(entries: Sequence[bytes]) -> Iterator[slice]:
    """Cut a list, in order, so that each part fits in one request. An entry too big for any goes alone."""
    start = size = 0
    for position, entry in enumerate(entries):
        full = position - start == ENTRIES_MAX or size + len(entry) > REQUEST_BYTES_MAX
        if full and position > start:
            yield slice(start, position)
            start, size = position, 0
        size += len(entry) + 1
    if start < len(entries):
        yield slice(start, len(entries))


def encode(value: object) -> bytes:
    """JSON.

    Raises: RequestInvalid for what JSON can't carry.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RequestInvalid("invalid_request", f"the request can't be written as JSON: {error}") from error


def accepted(reply: Reply) -> Answer:
    """The answer, if it is a success.

    Raises: the PopgateError of any other answer; ServerUnreachable for none.
    """
    if isinstance(reply, Unanswered):
        error = ServerUnreachable("server_unreachable", f"no answer: {reply.cause!r}")
        error.sent = reply.sent
        raise error from reply.cause
    if 200 <= reply.status < 300:
        return reply
    raise error_from(_problem(reply.body), status=reply.status, retry_after_seconds=reply.retry_after_seconds)


def read_answer(answer: Answer, reader: Callable[[JsonObject], T]) -> T:
    """What `reader` makes of the body.

    Raises: ServerFault when the body is not what this interface promises.
    """
    try:
        return reader(json.loads(answer.body) if answer.body else {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerFault("malformed_answer", f"the answer can't be read: {error!r}", answer.status) from error


def read_object(answer: Answer) -> JsonObject:
    return read_answer(answer, dict)


def read_topics(answer: Answer) -> list[JsonObject]:
    return read_answer(answer, lambda body: [dict(topic) for topic in body["topics"]])


def read_published(answer: Answer, count: int) -> list[PublishResult]:
    def read(entry: JsonObject) -> PublishResult:
        error: JsonObject | None = entry.get("error")
        return PublishResult(
            status=entry["status"],
            message_id=entry.get("message_id"),
            error=None if error is None else {name: str(value) for name, value in error.items()},
        )

    return read_answer(answer, lambda body: [read(entry) for entry in _results(body, count)])


def read_settled(answer: Answer, count: int) -> list[SettleResult]:
    def read(entry: JsonObject) -> SettleResult:
        return SettleResult(status=entry["status"], invisible_until=_seconds_or_none(entry.get("invisible_until")))

    return read_answer(answer, lambda body: [read(entry) for entry in _results(body, count)])


def read_messages(answer: Answer, topic: str, group: str, make: Callable[..., MessageT]) -> list[MessageT]:
    def read(entry: JsonObject) -> MessageT:
        text: str | None = entry.get("body")
        return make(
            topic=topic,
            group=group,
            receipt_handle=entry["receipt_handle"],
            body=base64.b64decode(entry["body_base64"]) if text is None else text.encode("utf-8"),
            headers=entry.get("headers") or {},
            message_id=entry.get("message_id"),
            ordering_key=entry.get("ordering_key"),
            queue=entry["queue"],
            delivery_count=entry["delivery_count"],
            published_at=_seconds_or_none(entry.get("published_at")),
            first_delivered_at=float(entry["first_delivered_at"]),
            invisible_until=float(entry["invisible_until"]),
        )

    return read_answer(answer, lambda body: [read(entry) for entry in body["messages"]])


def _results(body: JsonObject, count: int) -> list[JsonObject]:
    results: list[JsonObject] = body["results"]
    if len(results) != count:
        raise ValueError(f"{len(results)} results for {count} entries")
    return results


def _list_object(name: str, entries: Iterable[bytes]) -> bytes:
    return b'{"%s":[%s]}' % (name.encode("ascii"), b",".join(entries))


def _without_none(fields: Mapping[str, Any]) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _seconds_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def _segment(name: str, value: str) -> str:
    # An empty or dotted segment would be folded away on its way and address something else.
    if value in ("", ".", ".."):
        error = RequestInvalid("invalid_request", f"{value!r} is no name for a {name}")
        error.field = name
        raise error
    return quote(value, safe="")


def _problem(body: bytes) -> JsonObject:
    try:
        problem: Any = json.loads(body)
    except ValueError:
        problem = None
    if isinstance(problem, dict):
        return {str(name): value for name, value in problem.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # JSON
    return {"detail": body[:DETAIL_LENGTH_MAX].decode("utf-8", "replace").strip()}
