"""Adopting a team's existing queues: every message arrives as it was published, the queues stay unchanged, and
unsuitable queues are refused with a reason (decision 14).

`test_adoption_promises` covers the promises for their messages.
"""

import re
import secrets
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pika
import pytest
from pika.exceptions import ChannelClosedByBroker
from pika.spec import BasicProperties

from acceptance.adopting import GROUP, KINDS, BusyPublisher, Popped, Site
from acceptance.readme import PROJECT
from support.processes import wait_until
from support.rabbitmq import RabbitNode

MIB = 1024 * 1024
BODIES = (b"", b"plain", "ünïcödé ☕".encode(), b'{"json": true}', b"\x00", bytes(range(256)), b"\xff" * 1000)


def body_of(message: Popped) -> bytes:
    if "body" in message:
        return str(message["body"]).encode()
    return b64decode(message["body_base64"])


# ---------------------------------------------------------------- bodies, headers, properties


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_arrive_as_they_were_published(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    site.publish(queue, *BODIES)
    adopted = site.adopt(queue)
    messages = adopted.pop_count(len(BODIES))
    assert sorted(map(body_of, messages)) == sorted(BODIES)
    assert adopted.ack(*messages) == ["acked"] * len(BODIES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_16_mib_arrives_in_both_formats(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    body = secrets.token_bytes(4 * MIB) * 4
    site.publish(queue, body, body)
    adopted = site.adopt(queue)
    message = adopted.pop_one()
    assert body_of(message) == body
    packed = site.proxy.client.post(
        f"{adopted.path}/pop", json={"wait_seconds": 10}, headers={"accept": "application/msgpack"}
    )
    (other,) = msgspec.msgpack.decode(packed.content)["messages"]
    assert other["body"] == body
    assert adopted.ack(message, other) == ["acked", "acked"]


class RawHeaders(BasicProperties):
    """Properties with a header table of types that pika lacks: every field is its type, then the encoded value."""

    def __init__(self, fields: Sequence[tuple[str, bytes]]) -> None:
        super().__init__(delivery_mode=2)
        self._fields = fields

    def encode(self) -> list[bytes]:
        names = [name.encode() for name, _ in self._fields]
        table = b"".join(bytes([len(name)]) + name + raw for name, (_, raw) in zip(names, self._fields, strict=True))
        return [b"\x30\x00", struct.pack(">I", len(table)), table, b"\x02"]  # flags: headers and delivery mode


def long_text(kind: bytes, value: bytes) -> bytes:
    return kind + struct.pack(">I", len(value)) + value


AT = 1_709_208_000
HEADERS: Sequence[tuple[str, bytes, Any]] = [
    ("bool", b"t\x01", True),
    ("int8", struct.pack(">cb", b"b", -5), -5),
    ("uint8", struct.pack(">cB", b"B", 250), 250),
    ("int16", struct.pack(">ch", b"s", -300), -300),
    ("uint16", struct.pack(">cH", b"u", 60_000), 60_000),
    ("int32", struct.pack(">ci", b"I", -70_000), -70_000),
    ("uint32", struct.pack(">cI", b"i", 4_000_000_000), 4_000_000_000),
    ("int64", struct.pack(">cq", b"l", 2**60 + 1), 2**60 + 1),
    ("float", struct.pack(">cf", b"f", 0.5), 0.5),
    ("double", struct.pack(">cd", b"d", 2.5e-3), 2.5e-3),
    ("decimal", struct.pack(">cBi", b"D", 2, 1250), "12.50"),
    ("text", long_text(b"S", "açaí".encode()), "açaí"),
    ("no text", long_text(b"S", b"\xff\xfe"), b64encode(b"\xff\xfe").decode()),
    ("bytes", long_text(b"x", b"\x00\xfe"), b64encode(b"\x00\xfe").decode()),
    ("array", long_text(b"A", b"t\x00" + struct.pack(">ci", b"I", 7) + b"V"), [False, 7, None]),
    ("timestamp", struct.pack(">cQ", b"T", AT), "2024-02-29T12:00:00+00:00"),
    ("table", long_text(b"F", b"\x02in" + long_text(b"F", b"\x04deep" + b"t\x01")), {"in": {"deep": True}}),
    ("void", b"V", None),
    ("größe", b"t\x00", False),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_header_arrives_also_when_the_message_comes_again(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    properties = RawHeaders([(name, raw) for name, raw, _ in HEADERS])
    site.publish(queue, b"with headers", properties=properties)
    adopted = site.adopt(queue)
    expected = {name: value for name, _, value in HEADERS}
    first = adopted.pop_one()
    assert first["headers"] == expected
    adopted.release(first)
    again = adopted.pop_one()
    assert again["headers"] == expected
    assert again["delivery_count"] == 2
    adopted.ack(again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content_type", [None, "application/json", "image/png", "x/unheard-of", "no type at all", ""])
def test_any_content_type_is_taken_and_told(site: Site, kind: str, content_type: str | None) -> None:
    queue = site.declare(kind)
    site.publish(queue, b"{not json", properties=BasicProperties(content_type=content_type))
    message = site.adopt(queue).pop_one()
    assert message["body"] == "{not json"
    assert message["headers"] == ({} if content_type is None else {"amqp-content-type": content_type})


def test_every_other_property_is_told_too(site: Site) -> None:
    queue = site.declare("classic", {"x-max-priority": 10})
    properties = BasicProperties(
        content_encoding="gzip",
        priority=7,
        correlation_id="c-1",
        reply_to="answers",
        expiration="3600000",
        message_id="m-1",
        timestamp=AT,
        type="order",
        user_id="guest",
        app_id="shop",
        headers={"own": 1},
    )
    site.publish(queue, b"x", properties=properties)
    message = site.adopt(queue).pop_one()
    assert message["message_id"] == "m-1"
    assert message["published_at"] == AT
    assert message["headers"] == {
        "own": 1,
        "amqp-content-encoding": "gzip",
        "amqp-priority": 7,
        "amqp-correlation-id": "c-1",
        "amqp-reply-to": "answers",
        "amqp-expiration": "3600000",
        "amqp-type": "order",
        "amqp-user-id": "guest",
        "amqp-app-id": "shop",
    }


def test_what_the_publisher_did_not_say_is_not_made_up(site: Site) -> None:
    queue = site.declare("quorum")
    site.publish(queue, b"bare", b"bare")
    adopted = site.adopt(queue)
    message = adopted.pop_one()
    assert "message_id" not in message
    assert "published_at" not in message
    assert adopted.state()["oldest_age_seconds"] is None


# ---------------------------------------------------------------- what is refused


def refusal(answer: tuple[int, dict[str, Any]]) -> str:
    """Return the text of a refusal that contradicts the existing queue."""
    status, problem = answer
    assert status == 409, problem
    assert problem["code"] == "conflict"
    return str(problem["detail"])


def test_a_missing_queue_is_refused(site: Site) -> None:
    assert "'nowhere' does not exist" in refusal(site.put_topic("lost", "nowhere"))
    assert site.proxy.client.get("/v1/admin/topics/lost").status_code == 404


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_with_foreign_consumers_is_refused_and_they_are_counted(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    with site.foreign_consumers(queue, 2):
        words = refusal(site.put_topic(f"of-{queue}", queue))
        assert f"queue {queue!r} has 2 consumer(s);" in words
    wait_until(
        lambda: site.put_topic(f"of-{queue}", queue)[0] == 201, timeout_seconds=10, what="the consumers to be gone"
    )


def test_a_stream_is_refused(site: Site) -> None:
    assert "is a stream" in refusal(site.put_topic("flow", site.declare("stream")))


def test_an_exclusive_queue_of_somebody_else_is_refused(site: Site) -> None:
    with site.channel() as channel:
        queue = channel.queue_declare("", exclusive=True).method.queue
        assert "exclusive to another connection" in refusal(site.put_topic("private", queue))


def test_a_second_group_is_refused(site: Site) -> None:
    adopted = site.adopt(site.declare("quorum"))
    answer = site.proxy.client.put(f"/v1/admin/topics/{adopted.topic}/groups/second")
    assert "can't be copied to a second group" in refusal((answer.status_code, answer.json()))
    assert "already has a group" in answer.json()["detail"]


def test_a_queue_is_adopted_once(site: Site) -> None:
    queue, other = site.declare("classic"), site.declare("classic")
    first = site.adopt(queue)
    assert "is already adopted by another topic" in refusal(site.put_topic("second", other, queue))
    status, problem = site.put_topic("twice", other, other)
    assert (status, problem["field"]) == (400, "adopt[1]")
    status, problem = site.put_topic("own", f"popgate:{first.topic}:{GROUP}:dead")
    assert (status, problem["field"]) == (400, "adopt[0]")


def test_a_classic_queue_that_is_consumed_by_popgate_takes_no_other_consumer(site: Site) -> None:
    """RabbitMQ does not enforce it on quorum queues (decision 14)."""
    queue = site.declare("classic")
    assert site.adopt(queue).pop(wait=0) == []
    with pytest.raises(ChannelClosedByBroker, match="exclusive"), site.foreign_consumers(queue):
        raise AssertionError("it was let in")


def test_a_pop_says_so_when_a_consumer_has_come_before_it(site: Site) -> None:
    queue = site.declare("classic")
    adopted = site.adopt(queue)
    with site.foreign_consumers(queue):
        answer = site.proxy.client.post(f"{adopted.path}/pop", json={})
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        assert queue in answer.json()["detail"]


# ---------------------------------------------------------------- nothing changes


def described(site: Site, queue: str) -> dict[str, Any]:
    """Return every property of a queue that popgate must not change."""
    told = site.node.api("GET", "queues", site.vhost, queue)
    kept = ("name", "type", "durable", "auto_delete", "exclusive", "arguments", "policy", "operator_policy")
    bindings = site.node.api("GET", "queues", site.vhost, queue, "bindings")
    return {**{key: told.get(key) for key in kept}, "bindings": bindings}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_about_a_queue_or_its_publishers_changes(site: Site, kind: str) -> None:
    queue = site.declare(kind, {"x-max-length": 100_000, "x-dead-letter-exchange": "the-teams-own"})
    exchange = f"exchange-{queue}"
    with site.channel() as channel:
        channel.exchange_declare(exchange, "fanout", durable=True)
        channel.queue_bind(queue, exchange, "", {"the": "team's"})
    before = described(site, queue)

    with BusyPublisher(site, exchange) as publisher:
        wait_until(lambda: len(publisher.published) > 20, timeout_seconds=20, what="a publisher at work")
        adopted = site.adopt(queue)
        seen: list[Popped] = []
        while len(seen) < 200:
            messages = adopted.pop(64)
            assert messages, "a publisher is at work"
            assert adopted.ack(*messages) == ["acked"] * len(messages)
            seen += messages
        assert described(site, queue) == before
        publisher.stop()  # it would have raised an error, or waited, if a message had been refused
        rest = adopted.pop_all()
        assert adopted.ack(*rest) == ["acked"] * len(rest)
        assert sorted(map(body_of, [*seen, *rest])) == sorted(publisher.published)
    assert {message["headers"]["amqp-exchange"] for message in seen} == {exchange}
    assert described(site, queue) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_team_can_take_its_queue_back(site: Site, kind: str) -> None:
    queue = site.declare(kind)
    before = described(site, queue)
    site.publish(queue, b"one", b"two", b"three")
    adopted = site.adopt(queue)
    adopted.ack(adopted.pop_one())
    held = adopted.pop_one()
    assert site.proxy.client.delete(f"/v1/admin/topics/{adopted.topic}").status_code == 204
    assert described(site, queue) == before
    assert site.ready(queue) == 2, "what was not acked is back, the leased message included"
    bodies = sorted(site.take(queue)[1] for _ in range(2))
    assert body_of(held) in bodies


def test_a_topic_can_stand_on_queues_of_both_kinds_and_can_be_published_to(site: Site) -> None:
    queues = [site.declare(kind) for kind in KINDS]
    adopted = site.adopt(*queues)
    for queue in queues:
        site.publish(queue, b"the team's")
    sent = {"messages": [{"body": "popgate's"}] * 2}
    answer = site.proxy.client.post(f"/v1/topics/{adopted.topic}/messages", json=sent)
    assert [result["status"] for result in answer.json()["results"]] == ["published"] * 2
    messages = adopted.pop_count(4)
    assert sorted((message["queue"], message["body"]) for message in messages) == [
        (0, "popgate's"),
        (0, "the team's"),
        (1, "popgate's"),
        (1, "the team's"),
    ]
    assert adopted.ack(*messages) == ["acked"] * 4


def test_popgate_leaves_what_it_did_not_declare_alone(site: Site) -> None:
    """The only addition is the dead-letter queue of its group; there are no exchanges and no bindings."""
    queue = site.declare("quorum")
    adopted = site.adopt(queue)
    names = {row["name"] for row in site.node.queues(site.vhost) if adopted.topic in row["name"]}
    exchanges = {row["name"] for row in site.node.api("GET", "exchanges", site.vhost)}
    assert names <= {f"popgate:{adopted.topic}:{GROUP}:dead"}
    own = sorted(name for name in exchanges if name.startswith("popgate:"))
    assert own.pop() == "popgate:guard"
    assert [name.rpartition(":")[0] for name in own] == ["popgate:data"], "only the mark of the data folder"
    with pika.BlockingConnection(pika.URLParameters(site.amqp_url)) as connection:
        connection.channel().queue_declare(f"popgate:{adopted.topic}:{GROUP}:dead", passive=True)


# ---------------------------------------------------------------- permissions


def test_the_documented_permissions_are_enough(rabbitmq: RabbitNode, tmp_path: Path) -> None:
    """A user with only the permissions in docs/rabbitmq.md adopts, consumes, publishes and dead-letters."""
    page = (PROJECT / "docs" / "rabbitmq.md").read_text()
    block = re.search(r"<!-- permissions -->\n```sh\n(.*?)```", page, re.DOTALL)
    assert block is not None
    configure, write, read = re.findall(r"'([^']+)'", block[1])
    user = f"user-{secrets.token_hex(4)}"
    site = Site(rabbitmq, tmp_path, user=user)
    rabbitmq.add_vhost(site.vhost)
    rabbitmq.api("PUT", "users", user, body={"password": user, "tags": ""})
    rabbitmq.api("PUT", "permissions", site.vhost, user, body={"configure": configure, "write": write, "read": read})
    with site:
        queues = ("orders-classic", "orders-quorum")
        with site.channel() as channel:
            for queue, kind in zip(queues, KINDS, strict=True):
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})
        adopted = site.adopt(*queues)
        sent = {"messages": [{"body": "a"}, {"body": "b"}]}
        answer = site.proxy.client.post(f"/v1/topics/{adopted.topic}/messages", json=sent)
        assert [result["status"] for result in answer.json()["results"]] == ["published"] * 2
        first, second = adopted.pop_count(2)
        assert adopted.reject(first, reason="bad") == ["rejected"]
        assert adopted.ack(second) == ["acked"]
        own = "/v1/admin/topics/own"
        assert site.proxy.client.put(own, json={"queues": 2}).status_code == 201
        assert site.proxy.client.put(f"{own}/groups/all").status_code == 201
        answer = site.proxy.client.post("/v1/topics/own/messages", json=sent)
        assert [result["status"] for result in answer.json()["results"]] == ["published"] * 2
        assert site.proxy.client.delete(own).status_code == 204
    rabbitmq.api("DELETE", "users", user)
