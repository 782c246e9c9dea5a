"""What `publish` takes and what it raises, the values that messages carry, and settings with wrong names."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import httpx
import pytest

from popgate_client import (
    AsyncClient,
    Client,
    Consumer,
    GroupSettings,
    Message,
    MessageTooLarge,
    NoSubscribers,
    OutgoingMessage,
    PublishFailed,
    TopicSettings,
)
from popgate_client.amqp import AmqpConsumer
from popgate_client.keywords import RetrySettings
from support.processes import wait_until
from support.proxy import ProxyProcess

GROUP = "default"
LARGE = b"x" * (17 << 20)
"""More than a message may have."""


class Order(NamedTuple):
    """A value that JSON does not know."""

    number: int


def written(order: Order) -> str:
    return f"order {order.number}"


def read(body: bytes) -> Order:
    return Order(int(body.removeprefix(b"order ")))


@pytest.fixture
def ready(client: Client, topic: str) -> str:
    """The name of a topic of one queue with a group."""
    client.put_topic(topic, queues=1)
    client.put_group(topic, GROUP)
    return topic


def pop_all(client: Client, topic: str, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += client.pop(topic, GROUP, max_messages=count, wait_seconds=5)
    return found


def test_a_message_without_a_reader_raises(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    with pytest.raises(NoSubscribers, match="group"):
        client.publish(topic, "x")
    (result,) = client.publish(topic, "x", raise_on_failure=False)
    assert (result.ok, result.error and result.error["code"]) == (False, "no_subscribers")


async def test_of_several_messages_the_error_says_which_are_stored(
    shared_proxy: ProxyProcess, client: Client, ready: str
) -> None:
    first_request = [str(number) for number in range(256)]
    with pytest.raises(PublishFailed, match=r"2 of 258 messages are not stored; number 257: .*16 MiB") as failed:
        client.publish(ready, *first_request, LARGE, "never sent")
    assert [one.ok for one in failed.value.results] == [True] * 256 + [False] * 2
    assert failed.value.failed == [256, 257]
    assert {one.text for one in pop_all(client, ready, 256)} == set(first_request)
    with pytest.raises(MessageTooLarge):
        client.publish(ready, LARGE)
    async with AsyncClient(shared_proxy.url) as other:
        with pytest.raises(PublishFailed):
            await other.publish(ready, *first_request, LARGE)
        assert not (await other.publish(ready, *first_request, LARGE, raise_on_failure=False))[-1].ok


@pytest.mark.parametrize("value", [{"a": 1, "é": [None, True]}, ["a", 1.5], 7, None, False, "text", ""])
async def test_json_values_are_bodies(shared_proxy: ProxyProcess, client: Client, ready: str, value: object) -> None:
    body = value if isinstance(value, str) else json.dumps(value)
    client.publish(ready, value)
    async with AsyncClient(shared_proxy.url) as other:
        await other.publish(ready, OutgoingMessage(body=value))
    for message in pop_all(client, ready, 2):
        if isinstance(value, str):
            assert message.text == body
        else:
            assert (message.json(), message.data) == (value, value)


def test_options_apply_to_every_plain_body(client: Client, ready: str) -> None:
    client.publish(ready, "a", {"b": 1}, ordering_key="k", headers={"tenant": 7}, delay_seconds=1, ttl_seconds=60)
    client.publish(ready, bytearray(b"c"), message_id="m-1", dedup_id="d-1", ordering_key=None)
    (result,) = client.publish(ready, b"c", message_id="m-1", dedup_id="d-1")
    assert result.status == "duplicate"
    (first,) = client.pop(ready, GROUP, max_messages=10)
    assert (first.message_id, first.body, first.ordering_key) == ("m-1", b"c", None)
    (second,) = client.pop(ready, GROUP, wait_seconds=5)
    assert (second.body, second.ordering_key, second.headers["tenant"]) == (b"a", "k", 7)
    second.ack()
    (third,) = client.pop(ready, GROUP, wait_seconds=5)
    assert (third.data, third.headers["tenant"]) == ({"b": 1}, 7)


@pytest.mark.parametrize(
    ("messages", "options", "error", "says"),
    [
        ((OutgoingMessage(body="a"),), {"ordering_key": "k"}, ValueError, "set it in each OutgoingMessage"),
        (("a", "b"), {"message_id": "m"}, ValueError, "message_id is for one message"),
        (("a", "b"), {"dedup_id": "m"}, ValueError, "dedup_id is for one message"),
        (("a",), {"orderingkey": "k"}, TypeError, "did you mean 'ordering_key'?"),
        (("a",), {"partition": 1}, TypeError, "it takes dedup_id, delay_seconds, headers"),
        ((object(),), {}, TypeError, "a body of type object can't be written as JSON"),
        ((float("nan"),), {}, TypeError, "a body of type float can't be written as JSON"),
        (([OutgoingMessage(body="a")],), {}, TypeError, r"unpack them: publish\(topic, \*messages\)"),
    ],
)
async def test_what_can_not_be_published_is_refused_before_anything_is_sent(
    messages: tuple[Any, ...], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Nothing listens at that address, so a request would raise another error."""
    with Client("http://127.0.0.1:1", retry_seconds_max=0) as client, pytest.raises(error, match=says):
        client.publish("orders", *messages, **options)
    async with AsyncClient("http://127.0.0.1:1", retry_seconds_max=0) as other:
        with pytest.raises(error, match=says):
            await other.publish("orders", *messages, **options)


async def test_values_of_own_types_are_written_and_read_by_the_hooks(shared_proxy: ProxyProcess, ready: str) -> None:
    with Client(shared_proxy.url, serializer=written, deserializer=read) as client:
        client.publish(ready, Order(1))
        assert client.pop(ready, GROUP, wait_seconds=5)[0].data == Order(1)
    async with AsyncClient(shared_proxy.url, serializer=written, deserializer=read) as other:
        await other.publish(ready, OutgoingMessage(body=Order(2)), "order 3")
        found: list[Message] = []
        while len(found) < 2:
            found += await other.pop(ready, GROUP, max_messages=5, wait_seconds=5)
    assert {one.data for one in found} == {Order(2), Order(3)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_gives_its_handler_the_values(
    shared_proxy: ProxyProcess,
    client: Client,
    ready: str,
    is_async: bool,
    running: Callable[[Consumer], AbstractContextManager[Future[None]]],
) -> None:
    seen: list[Order] = []

    async def handle_async(message: Message) -> None:
        seen.append(message.data)

    def handle(message: Message) -> None:
        seen.append(message.data)

    client.publish(ready, "order 4")
    handler = handle_async if is_async else handle
    with running(Consumer(ready, GROUP, handler, base_url=shared_proxy.url, deserializer=read)):
        wait_until(lambda: seen == [Order(4)], timeout_seconds=10, what="the message")


def test_times_are_datetimes_too(client: Client, ready: str) -> None:
    client.publish(ready, "a")
    (message,) = client.pop(ready, GROUP, wait_seconds=5, invisibility_seconds=30)
    now = datetime.now(UTC)
    assert message.published_datetime is not None
    assert message.published_datetime.timestamp() == pytest.approx(message.published_at, abs=1e-6)
    assert abs(message.first_delivered_datetime - now) < timedelta(seconds=10)
    assert message.invisible_until_datetime is not None
    assert timedelta(seconds=20) < message.invisible_until_datetime - now < timedelta(seconds=40)


@pytest.mark.parametrize("handler", [None, "print", 7])
def test_a_handler_that_is_no_function_is_refused_at_once(handler: Any) -> None:
    for consumer in (Consumer, AmqpConsumer):
        with pytest.raises(TypeError, match="the handler must be a function of one message, not"):
            consumer("orders", "billing", handler)


async def test_settings_with_wrong_names_are_refused_with_a_suggestion(
    shared_proxy: ProxyProcess, client: Client, ready: str
) -> None:
    misspelt: Any = {"invisibilty_seconds": 3}
    with pytest.raises(TypeError, match="'invisibilty_seconds'; did you mean 'invisibility_seconds'"):
        client.put_group(ready, GROUP, **misspelt)
    async with AsyncClient(shared_proxy.url) as other:
        with pytest.raises(TypeError, match="did you mean 'invisibility_seconds'"):
            await other.put_group(ready, GROUP, **misspelt)
        unknown: Any = {"que": 3}
        with pytest.raises(TypeError, match=r"put_topic\(\) got an unexpected keyword argument 'que'"):
            await other.put_topic(ready, **unknown)


def test_the_settings_are_those_of_the_server(shared_proxy: ProxyProcess) -> None:
    schemas = httpx.get(f"{shared_proxy.url}/openapi.json").json()["components"]["schemas"]
    for name, settings in (
        ("TopicChange", TopicSettings),
        ("PolicyChange", GroupSettings),
        ("RetryChange", RetrySettings),
    ):
        assert set(schemas[name]["properties"]) == settings.__optional_keys__


def check_types(client: Client) -> None:
    """Never called: a type checker reads it. An ignored error that is no error fails the check of the types."""
    client.put_group("orders", "billing", invisibilty_seconds=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    client.publish("orders", "a", ordering_ky="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
