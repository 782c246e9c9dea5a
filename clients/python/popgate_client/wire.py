"""Writes the requests and reads the answers of the HTTP interface, version 1 (decision 1).

Owns paths, JSON shapes and the limits of one request. Does no I/O and repeats nothing: `exchange` combines requests,
and the two clients send them.
"""

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import httpx

from popgate_client.errors import RequestInvalid, ServerFault, ServerUnreachable, error_from
from popgate_client.message import Message, OutgoingMessage, PublishResult, SettleEntry, SettleResult, Verb

ENTRIES_MAX = 256
REQUEST_BYTES_MAX = 60 * 1024 * 1024
"""Maximum bytes of the entries of one request; below the server's 64 MiB to leave room for the JSON around them."""
ANSWER_SECONDS = 10.0
"""Seconds that the server may be silent, in addition to the wait that the request asks for."""
PUBLISH_SECONDS = 30.0
"""Seconds that the server may be silent during a publish. This is longer than a proxy waits for RabbitMQ's confirm,
because a slow confirm would otherwise look like a lost answer, which leaves the outcome unknown."""
CALL_SECONDS_MAX = 300.0
"""Maximum seconds of one request, however small the parts are in which its answer arrives."""
BYTES_PER_SECOND_MIN = 16 * 1024
"""Lowest rate at which a request and its answer may be transferred. The time that they take is added to the maximum."""
DETAIL_LENGTH_MAX = 200
PROBLEM_CONTENT_TYPE = "application/problem+json"
PROBLEM_TYPE_PREFIX = "urn:popgate:problem:"
RETRY_AFTER_SECONDS_MAX = 60.0
"""Maximum seconds of a Retry-After that a client follows. popgate asks for less, but a gateway may ask for a day."""
LENGTH_SECONDS_MIN, LENGTH_SECONDS_MAX = 0.1, 86_400.0
"""Bounds of a length that a server reports; outside of them a client would call without a pause, or never."""
_OF_ANY_SERVER = frozenset({401, 403, 407, 408, 413, 429})
"""Statuses below 500 that mean the same if a gateway answers; its other ones say nothing about the request."""
_PUBLISHED = frozenset({"published", "duplicate", "failed"})
_SETTLED = frozenset(
    {"acked", "already_acked", "released", "extended", "rejected", "expired", "invalid", "unavailable"}
)
# After these errors nothing was sent: no connection was made, or none was free.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

JsonObject: TypeAlias = dict[str, Any]
HeaderValue: TypeAlias = str | int | float | bool | None
HeaderFilter: TypeAlias = Mapping[str, HeaderValue | Sequence[HeaderValue]]
"""Maps a header to the value that it must have, or to the values that it may have; None: it must be absent."""
T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request. `content` is JSON or None. An answer counts as lost after `silence_seconds` without data, or
    if it is not complete after `seconds_max`, to which the time to send a large content is added. `headers` are further
    ones."""

    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str
    content: bytes | None = None
    silence_seconds: float = ANSWER_SECONDS
    seconds_max: float = CALL_SECONDS_MAX
    headers: Mapping[str, str] | None = None

    @property
    def call_seconds_max(self) -> float:
        """Maximum seconds of the call. A slow network may take minutes to send what one request may contain."""
        return self.seconds_max + len(self.content or b"") / BYTES_PER_SECOND_MIN


Reply: TypeAlias = httpx.Response | httpx.RequestError
"""The result of a request: an answer that has been read, or the error if there is none."""


def topic_path(topic: str) -> str:
    return f"/v1/topics/{path_segment('topic', topic)}"


def subscription_path(topic: str, group: str) -> str:
    return f"{topic_path(topic)}/groups/{path_segment('group', group)}"


def lease_group_path(topic: str, group: str, stream: str | None = None, *parts: str) -> str:
    """Return the path of a subscription's lease groups, of one stream, or of a resource below it."""
    path = f"{subscription_path(topic, group)}/lease-groups"
    return path if stream is None else "/".join([path, path_segment("stream", stream), *parts])


def admin_path(topic: str, group: str | None = None) -> str:
    path = f"/v1/admin/topics/{path_segment('topic', topic)}"
    return path if group is None else f"{path}/groups/{path_segment('group', group)}"


def mode_path(topic: str, group: str) -> str:
    return f"{admin_path(topic, group)}/consume-mode"


def mode_change(mode: str, drain_timeout_seconds: float | None, *, dry_run: bool) -> JsonObject:
    """Return the body of a request to switch the consume mode."""
    return without_none({"mode": mode, "drain_timeout_seconds": drain_timeout_seconds, "dry_run": dry_run or None})


def lock_path(name: str, verb: str | None = None) -> str:
    path = f"/v1/locks/{path_segment('lock', name)}"
    return path if verb is None else f"{path}/{verb}"


def publish_request(topic: str, entries: Sequence[bytes]) -> Request:
    return Request(
        method="POST",
        path=f"{topic_path(topic)}/messages",
        content=_list_object("messages", entries),
        silence_seconds=PUBLISH_SECONDS,
    )


def pop_request(
    topic: str,
    group: str,
    *,
    max_messages: int,
    wait_seconds: float,
    invisibility_seconds: float | None,
    attempt_id: str,
    client_id: str | None,
    filter: HeaderFilter | None,
    ack: Sequence[str] = (),
) -> Request:
    fields = {
        "max_messages": max_messages,
        "wait_seconds": wait_seconds,
        "invisibility_seconds": invisibility_seconds,
        "attempt_id": attempt_id,
        "client_id": client_id,
        "filter": filter,
        "ack": list(ack) or None,
    }
    return Request(
        method="POST",
        path=f"{subscription_path(topic, group)}/pop",
        content=encode(without_none(fields)),
        silence_seconds=max(0.0, wait_seconds) + ANSWER_SECONDS,
    )


def settle_request(topic: str, group: str, verb: Verb, entries: Sequence[bytes]) -> Request:
    name = "receipt_handles" if verb is Verb.ACK else "entries"
    path = f"{subscription_path(topic, group)}/{verb}"
    return Request(method="POST", path=path, content=_list_object(name, entries))


def outgoing_entry(message: OutgoingMessage | str | bytes) -> bytes:
    """Return one message as it is written in a publish request.

    Raises: RequestInvalid if it can't be written as JSON.
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
    return encode(without_none(fields))


def settle_entry(verb: Verb, entry: SettleEntry) -> bytes:
    """Return one lease as it is written in a settle request: a plain handle for ack, an object for other verbs."""
    if verb is Verb.ACK:
        return encode(entry.receipt_handle)
    fields = {
        "receipt_handle": entry.receipt_handle,
        "delay_seconds": entry.delay_seconds,
        "invisibility_seconds": entry.invisibility_seconds,
        "reason": entry.reason,
        "error": without_none({"type": entry.error_type, "text": entry.error_text}) or None,
        "client_id": entry.client_id,
    }
    return encode(without_none(fields))


def chunks(entries: Sequence[bytes]) -> Iterator[slice]:
    """Split a list, in order, so that each part fits in one request. An entry that is too big for any goes alone."""
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
    """Encode a value as JSON.

    Raises: RequestInvalid if JSON can't represent it.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RequestInvalid("invalid_request", f"the request can't be written as JSON: {error}") from error


def accepted(reply: Reply) -> httpx.Response:
    """Return the answer if it is a success.

    Raises: the PopgateError of any other answer; ServerUnreachable if there is none.
    """
    if isinstance(reply, httpx.RequestError):
        error = ServerUnreachable("server_unreachable", f"no answer{_from(reply)}: {reply!r}")
        error.sent = error.outcome_unknown = not isinstance(reply, _UNSENT)
        raise error from reply
    if reply.is_success:
        return reply
    problem, status = _problem(reply.content), reply.status_code
    if not _is_popgates(reply, problem):
        if status == 503:
            problem.pop("code", None)  # a gateway does not know what popgate did
        elif 300 <= status < 500 and status not in _OF_ANY_SERVER:
            raise ServerFault(
                f"http_{status}", f"a server that is not popgate answered: {problem.get('detail')}", status
            )
    raise error_from(problem, status=status, retry_after_seconds=retry_after_seconds(reply))


def _from(error: httpx.RequestError) -> str:
    """Return the place at which there was no answer, or an empty text if the error does not know it."""
    try:
        url = error.request.url
    except RuntimeError:
        return ""
    return f" from {url.copy_with(userinfo=b'', query=None)}"


def retry_after_seconds(answer: httpx.Response) -> float:
    """Return the seconds of the Retry-After header, at most RETRY_AFTER_SECONDS_MAX; 0.0 if there is none."""
    try:
        return min(RETRY_AFTER_SECONDS_MAX, max(0.0, float(answer.headers.get("retry-after", "0"))))
    except ValueError:  # the header's other form is a date; popgate never sends it
        return 0.0


def read_answer(answer: httpx.Response, reader: Callable[[JsonObject], T]) -> T:
    """Read the body with `reader`.

    Raises: ServerFault if the body does not have the shape of this interface.
    """
    try:
        return reader(json.loads(answer.content) if answer.content else {})
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ServerFault("malformed_answer", f"the answer can't be read: {error!r}", answer.status_code) from error


def read_object(answer: httpx.Response) -> JsonObject:
    return read_answer(answer, dict)


def read_invisibility_seconds(answer: httpx.Response) -> float:
    return read_answer(answer, lambda body: length_seconds(body["policy"]["invisibility_seconds"]))


def read_topics(answer: httpx.Response) -> list[JsonObject]:
    return read_answer(answer, lambda body: [dict(topic) for topic in body["topics"]])


def read_published(answer: httpx.Response, count: int) -> list[PublishResult]:
    def read(entry: JsonObject) -> PublishResult:
        error: JsonObject | None = entry.get("error")
        return PublishResult(
            status=_one_of(_PUBLISHED, entry["status"]),
            message_id=entry.get("message_id"),
            error=None if error is None else {name: str(value) for name, value in error.items()},
        )

    return read_answer(answer, lambda body: [read(entry) for entry in _results(body, count)])


def read_settled(answer: httpx.Response, count: int, *, field: str = "results") -> list[SettleResult]:
    def read(entry: JsonObject) -> SettleResult:
        until = _seconds_or_none(entry.get("invisible_until"))
        return SettleResult(status=_one_of(_SETTLED, entry["status"]), invisible_until=until)

    return read_answer(answer, lambda body: [read(entry) for entry in _results(body, count, field)])


def read_messages(answer: httpx.Response, topic: str, group: str, make: Callable[..., MessageT]) -> list[MessageT]:
    def read(entry: JsonObject) -> MessageT:
        text: str | None = entry.get("body")
        return make(
            topic=topic,
            group=group,
            receipt_handle=_text(entry["receipt_handle"]),
            body=base64.b64decode(entry["body_base64"], validate=True) if text is None else text.encode("utf-8"),
            headers=entry.get("headers") or {},
            message_id=entry.get("message_id"),
            ordering_key=None if (key := entry.get("ordering_key")) is None else _text(key),
            queue=int(entry["queue"]),
            delivery_count=int(entry["delivery_count"]),
            published_at=_seconds_or_none(entry.get("published_at")),
            first_delivered_at=float(entry["first_delivered_at"]),
            invisible_until=float(entry.get("invisible_until", math.inf)),  # a pulled message has no lease that ends
        )

    return read_answer(answer, lambda body: [read(entry) for entry in body["messages"]])


def _results(body: JsonObject, count: int, field: str = "results") -> list[JsonObject]:
    results: list[JsonObject] = body[field]
    if len(results) != count:
        raise ValueError(f"{len(results)} results for {count} entries")
    return results


def _list_object(name: str, entries: Iterable[bytes]) -> bytes:
    return b'{"%s":[%s]}' % (name.encode("ascii"), b",".join(entries))


def without_none(fields: Mapping[str, Any]) -> JsonObject:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def length_seconds(value: Any) -> float:
    """Return a length that a server reports, within the bounds that a client can work with."""
    return min(LENGTH_SECONDS_MAX, max(LENGTH_SECONDS_MIN, float(value)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _one_of(known: frozenset[str], status: str) -> str:
    """Return a known status. An unknown one belongs to another request, whose answer came twice or late."""
    if status not in known:
        raise ValueError(f"{status!r} is not a result of this call")
    return status


def _seconds_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def path_segment(name: str, value: str) -> str:
    # An empty or dotted segment would be removed on the way, and the path would name something else.
    if value in ("", ".", ".."):
        error = RequestInvalid("invalid_request", f"{value!r} is not a valid name for a {name}")
        error.field = name
        raise error
    return quote(value, safe="")


def _is_popgates(answer: httpx.Response, problem: JsonObject) -> bool:
    content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return content_type == PROBLEM_CONTENT_TYPE and problem.get("type") == f"{PROBLEM_TYPE_PREFIX}{problem.get('code')}"


def _problem(body: bytes) -> JsonObject:
    try:
        problem: Any = json.loads(body)
    except (ValueError, RecursionError):
        problem = None
    if isinstance(problem, dict):
        return {str(name): value for name, value in problem.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # JSON
    return {"detail": body[:DETAIL_LENGTH_MAX].decode("utf-8", "replace").strip()}
