"""The id of a request, and what the log takes from the bytes of an answer."""

import msgspec
import pytest

from popgate.api.request_ids import REQUEST_ID_LENGTH_MAX, given_request_id, new_request_id
from popgate.api.request_log import ObservedAnswer, request_facts


class Sink:
    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True


def head(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, content_type, len(body))


@pytest.mark.parametrize("value", [b"a", b"7f3c-11", b"Root=1-67891233-abcdef012345678912345678", b"x" * 128])
def test_a_usual_id_is_taken(value: bytes) -> None:
    assert given_request_id([(b"host", b"h"), (b"x-request-id", value)]) == value.decode()


@pytest.mark.parametrize(
    "values",
    [[], [b""], [b"a b"], [b'a"b'], [b"a\x1b[2J"], ["ä".encode()], [b"x" * (REQUEST_ID_LENGTH_MAX + 1)], [b"a", b"a"]],
)
def test_any_other_id_is_not(values: list[bytes]) -> None:
    assert given_request_id([(b"x-request-id", value) for value in values]) is None


def test_new_ids_are_valid_and_different() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(given_request_id([(b"x-request-id", one.encode())]) == one for one in ids)


@pytest.mark.parametrize("is_joined", [True, False])
def test_the_id_is_added_to_the_head_and_the_status_is_noted(is_joined: bool) -> None:
    sink, body = Sink(), b'{"messages":[{"a":1},{"b":"x\\r\\n\\r\\n"}]}'
    answer = ObservedAnswer(sink, "r-1", is_counted=True)
    for part in (head(body) + body,) if is_joined else (head(body), body[:9], body[9:]):
        answer.write(part)
    assert sink.written == (head(body) + body).replace(b"200 OK\r\n", b"200 OK\r\nx-request-id: r-1\r\n")
    assert (answer.status, answer.count()) == (200, 2)
    answer.close()
    assert sink.is_closed


def test_the_head_that_asks_for_a_body_is_not_the_answer() -> None:
    sink = Sink()
    answer = ObservedAnswer(sink, "r-1", is_counted=True)
    answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert (sink.written, answer.status) == (b"HTTP/1.1 100 Continue\r\n\r\n", None)
    body = b'{"results":[{"status":"acked"}]}'
    answer.write(head(body, status=b"201 Created") + body)
    assert (answer.status, answer.count()) == (201, 1)
    assert sink.written.count(b"x-request-id") == 1


@pytest.mark.parametrize(
    ("content_type", "body", "count"),
    [
        (b"application/json", b'{"results":[{"status":"acked"},{"status":"expired"}]}', 2),
        (b"application/msgpack", msgspec.msgpack.encode({"messages": [{"body": b"\r\n\r\n"}] * 3, "ack": []}), 3),
        (b"application/problem+json", b'{"code":"not_found"}', None),
        (b"text/plain", b"popgate_ready_buffered 0\n", None),
        (b"application/json", b"", None),
    ],
)
def test_the_messages_of_an_answer_are_counted(content_type: bytes, body: bytes, count: int | None) -> None:
    answer = ObservedAnswer(Sink(), "r-1", is_counted=True)
    answer.write(head(body, content_type) + body)
    assert answer.count() == count


def test_a_request_is_named_by_its_operation_and_resource() -> None:
    scope: dict[str, object] = {
        "method": "PUT",
        "path": "/v1/admin/topics/orders/groups/billing",
        "client": ("10.0.0.7", 1),
        "headers": [],
    }
    assert request_facts(scope) == {
        "method": "PUT",
        "operation": "group_put",
        "topic": "orders",
        "group": "billing",
        "address": "10.0.0.7",
    }


def test_an_unknown_path_is_shown_as_far_as_it_is_short() -> None:
    scope: dict[str, object] = {"method": "GET", "path": "/" + "x" * 1_000, "client": None, "headers": []}
    assert request_facts(scope) == {"method": "GET", "path": "/" + "x" * 199}
