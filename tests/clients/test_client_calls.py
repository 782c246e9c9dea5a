"""Every call of the synchronous and the asyncio client, against a real proxy."""

import inspect
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from popgate_client import (
    AsyncClient,
    AsyncLeasedMessage,
    Client,
    LeasedMessage,
    LeaseLost,
    Message,
    OutgoingMessage,
    RequestInvalid,
    SettleEntry,
    SettleResult,
    TopicNotFound,
    Verb,
    WrongMode,
)
from support.processes import wait_until
from support.proxy import ProxyProcess

WITHOUT_REQUEST = {"lease_stream", "lock"}
"""Calls that send no request."""
MANY = 600  # three requests: 256 + 256 + 88
MEBIBYTE = 1024 * 1024


def statuses(results: list[SettleResult]) -> list[str]:
    return [result.status for result in results]


def pop_all(client: Client, topic: str, count: int, group: str = "default") -> list[LeasedMessage]:
    """Pop this many messages, because one pop may return fewer than there are."""
    messages: list[LeasedMessage] = []
    while len(messages) < count:
        popped = client.pop(topic, group, min(count - len(messages), 256), wait_seconds=10)
        assert popped, f"{len(messages)} of {count} messages came"
        messages += popped
    return messages


# ---------------------------------------------------------------- publish and pop


def test_a_message_comes_back_as_it_was_published(client: Client, topic: str) -> None:
    before = time.time()
    sent = OutgoingMessage(
        body="héllo", headers={"a": 1, "b": None, "c": True, "d": 1.5}, message_id="m-1", ordering_key="key"
    )
    (published,) = client.publish(topic, sent)
    published.raise_for_status()
    assert published.ok
    assert published.message_id == "m-1"

    (message,) = client.pop(topic, "default", invisibility_seconds=100)

    assert message.body == "héllo".encode()
    assert message.text == "héllo"
    assert message.headers == {"a": 1, "b": None, "c": True, "d": 1.5}
    assert (message.message_id, message.ordering_key) == ("m-1", "key")
    assert (message.topic, message.group) == (topic, "default")
    assert message.delivery_count == 1
    assert message.published_at is not None
    assert before - 1 < message.published_at <= message.first_delivered_at
    assert message.invisible_until == pytest.approx(message.first_delivered_at + 100, abs=5)
    assert not message.lease_lost
    assert len({message, message}) == 1


def test_a_repeat_is_a_duplicate_of_the_first_and_no_failure(client: Client, topic: str) -> None:
    sent = OutgoingMessage(body="a", dedup_id="order-17")
    (first,) = client.publish(topic, sent)
    again, other = client.publish(topic, sent, "b")
    assert (first.status, again.status, other.status) == ("published", "duplicate", "published")
    assert again.message_id == first.message_id
    again.raise_for_status()
    assert sorted(message.text for message in pop_all(client, topic, 2)) == ["a", "b"]
    assert client.pop(topic, "default") == []


@pytest.mark.parametrize("body", ["", b"", "ünï\u2028\x00", b"\xff\x00\xfe", b'{"json": true}', "x" * MEBIBYTE])
def test_a_body_comes_back_byte_for_byte(client: Client, topic: str, body: str | bytes) -> None:
    client.publish(topic, body)[0].raise_for_status()
    (message,) = pop_all(client, topic, 1)
    assert message.body == (body.encode() if isinstance(body, str) else body)


def test_any_number_of_messages_is_published_and_acked_in_order(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    published = client.publish(topic, *(str(number) for number in range(MANY)))
    assert [result.status for result in published] == ["published"] * MANY

    messages = pop_all(client, topic, MANY)
    assert [message.text for message in messages] == [str(number) for number in range(MANY)]

    assert statuses(client.ack(topic, "default", messages)) == ["acked"] * MANY
    mixed: list[Message | str] = [messages[0].receipt_handle, "bogus", messages[-1]]
    assert statuses(client.ack(topic, "default", mixed)) == ["already_acked", "invalid", "already_acked"]


def test_publishing_nothing_does_nothing(client: Client, topic: str) -> None:
    assert client.publish(topic) == []
    assert client.ack(topic, "default", []) == []
    with pytest.raises(TopicNotFound):
        client.get_topic(topic)


def test_a_parked_pop_gets_what_is_published_while_it_waits(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    client.put_group(topic, "default")
    with ThreadPoolExecutor() as threads:
        parked = threads.submit(client.pop, topic, "default", wait_seconds=30)
        client.publish(topic, "hello")
        (message,) = parked.result(timeout=10)
    assert message.text == "hello"


def test_an_empty_topic_pops_an_empty_list_when_the_wait_ends(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    started_at = time.monotonic()
    assert client.pop(topic, "default", wait_seconds=0.2) == []
    assert time.monotonic() - started_at >= 0.2


def test_a_repeated_attempt_gets_the_same_leases(client: Client, topic: str) -> None:
    client.publish(topic, "a", "b", "c")
    first = client.pop(topic, "default", 2, wait_seconds=10, attempt_id="attempt")
    again = client.pop(topic, "default", 2, attempt_id="attempt")
    assert {message.receipt_handle for message in first} == {message.receipt_handle for message in again}
    assert {message.delivery_count for message in again} == {1}
    assert len(pop_all(client, topic, 3 - len(first))) == 3 - len(first)


# ---------------------------------------------------------------- settle


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_message_settles_itself(client: Client, topic: str) -> None:
    client.publish(topic, "a", "b", "c")
    one, two, three = pop_all(client, topic, 3)
    until = one.extend(100)
    assert until == pytest.approx(time.time() + 100, abs=5)
    one.ack()
    one.ack()  # a repeat is as good as done
    two.release(error=LookupError("no such customer"))
    three.reject("no use", error=Unprintable())
    (letter,) = client.dead_letters(topic, "default")["messages"]
    assert letter["error"] == {"type": f"{__name__}.Unprintable", "text": "it can't be shown: RuntimeError"}

    (again,) = pop_all(client, topic, 1)
    assert (again.body, again.delivery_count) == (two.body, 2)
    again.ack()
    state = client.stats(topic, "default")
    assert (state["ready"], state["in_flight"], state["dead"]) == (0, 0, 1)


def test_a_settled_message_says_that_its_lease_is_lost(client: Client, topic: str) -> None:
    client.publish(topic, "a")
    (message,) = pop_all(client, topic, 1)
    message.release()
    message.release()  # a repeat succeeds until another client has the message
    settles: list[Callable[[], object]] = [message.ack, message.reject, partial(message.extend, 10)]
    for settle in settles:
        with pytest.raises(LeaseLost) as caught:
            settle()
        assert caught.value.code == "expired"
    (again,) = pop_all(client, topic, 1)
    with pytest.raises(LeaseLost):
        message.release()
    again.ack()


def test_a_release_may_be_delayed(client: Client, topic: str) -> None:
    client.publish(topic, "a")
    (message,) = pop_all(client, topic, 1)
    released_at = time.monotonic()
    message.release(delay_seconds=0.5, reason="later")
    assert client.stats(topic, "default")["delayed"] == 1
    (again,) = client.pop(topic, "default", wait_seconds=10)
    assert time.monotonic() - released_at >= 0.5
    assert again.delivery_count == 2


def test_settle_takes_options_for_each_lease(client: Client, topic: str) -> None:
    client.publish(topic, "a", "b")
    one, two = (message.receipt_handle for message in pop_all(client, topic, 2))
    entries = [
        SettleEntry(receipt_handle=one, invisibility_seconds=100),
        SettleEntry(receipt_handle=two, invisibility_seconds=1_000),
        SettleEntry(receipt_handle="bogus", invisibility_seconds=1),
    ]
    results = client.settle(topic, "default", Verb.EXTEND, entries)
    assert statuses(results) == ["extended", "extended", "invalid"]
    ends = [result.invisible_until for result in results]
    assert ends == pytest.approx([time.time() + 100, time.time() + 1_000, None], abs=5)


def test_leases_are_a_message_or_a_receipt_handle_or_many(client: Client, topic: str) -> None:
    client.publish(topic, *"abcde")
    one, two, three, four, five = pop_all(client, topic, 5)
    assert statuses(client.ack(topic, "default", one)) == ["acked"]
    assert statuses(client.ack(topic, "default", two.receipt_handle)) == ["acked"]
    assert statuses(client.release(topic, "default", {three})) == ["released"]
    assert statuses(client.reject(topic, "default", (message for message in [four]), "why")) == ["rejected"]
    assert statuses(client.extend(topic, "default", [five.receipt_handle], 9)) == ["extended"]


# ---------------------------------------------------------------- admin and the connection


def test_topics_and_groups_are_made_read_changed_and_deleted(client: Client, topic: str) -> None:
    assert client.put_topic(topic, queues=3)["queues"] == 3
    assert client.get_topic(topic)["queues"] == 3
    assert topic in {listed["topic"] for listed in client.list_topics()}

    made = client.put_group(
        topic, "billing", invisibility_seconds=9, max_lease_seconds=90, retry={"initial_seconds": 2}
    )
    assert made["policy"]["invisibility_seconds"] == 9
    assert made["policy"]["max_lease_seconds"] == 90
    assert client.get_group(topic, "billing")["policy"]["retry"]["initial_seconds"] == 2
    assert client.get_topic(topic)["groups"] == ["billing"]
    assert client.stats(topic, "billing")["mode"] == "pop"

    client.delete_group(topic, "billing")
    assert client.get_topic(topic)["groups"] == []
    client.delete_topic(topic)
    with pytest.raises(TopicNotFound):
        client.get_topic(topic)


async def test_the_consume_mode_is_read_previewed_and_switched(
    client: Client, shared_proxy: ProxyProcess, topic: str
) -> None:
    client.publish(topic, "a")
    told = client.set_consume_mode(topic, "default", "pull", drain_timeout_seconds=3, dry_run=True)
    assert (told["mode"], told["preview"]["drain_timeout_seconds"]) == ("pop", 3)
    assert client.set_consume_mode(topic, "default", "pull")["wanted"] == "pull"
    with pytest.raises(WrongMode) as refused:
        client.pop(topic, "default")
    assert refused.value.mode in ("draining", "pull")
    async with AsyncClient(shared_proxy.url) as asynchronous:
        assert (await asynchronous.set_consume_mode(topic, "default", "pop"))["mode"] == "pop"
        assert (await asynchronous.consume_mode(topic, "default"))["preview"] is None
    assert [message.text for message in client.pop(topic, "default", wait_seconds=5)] == ["a"]


def test_the_server_says_what_it_is(client: Client) -> None:
    info = client.info()
    assert info["service"] == "popgate"
    assert info["protocol"]["min"] <= 1 <= info["protocol"]["max"]
    assert "pop" in info["features"]


def test_the_url_comes_from_the_environment_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, shared_proxy: ProxyProcess
) -> None:
    monkeypatch.setenv("POPGATE_URL", shared_proxy.url)
    with Client() as client:
        assert client.info()["service"] == "popgate"


@pytest.mark.parametrize("url", ["ftp://example.org", "localhost:8080", "http://", "https://a:b"])
def test_a_bad_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(RequestInvalid):
        Client(url)


def test_the_token_goes_with_every_request(wire_url: str, sent_requests: list[bytes]) -> None:
    with Client(wire_url, token="s3cret") as client:
        client.info()
        client.list_topics()
    assert len(sent_requests) == 2
    assert all(b"\r\nauthorization: bearer s3cret\r\n" in request.lower() for request in sent_requests)
    for token in ("with\nline end\n", "pässword"):
        with pytest.raises(RequestInvalid):
            Client(wire_url, token=token)


def test_one_client_serves_many_threads(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=4)
    client.put_group(topic, "default")

    def publish_and_pop(number: int) -> list[str]:
        client.publish(topic, str(number))
        popped = client.pop(topic, "default", 10, wait_seconds=1)
        client.ack(topic, "default", popped)
        return [message.text for message in popped]

    with ThreadPoolExecutor(16) as threads:
        seen = [text for texts in threads.map(publish_and_pop, range(64)) for text in texts]
    seen += [message.text for message in client.pop(topic, "default", 256)]
    assert sorted(seen, key=int) == [str(number) for number in range(64)]


# ---------------------------------------------------------------- asyncio


async def test_the_asyncio_client_does_the_same(shared_proxy: ProxyProcess, topic: str) -> None:
    async with AsyncClient(shared_proxy.url) as client:
        assert (await client.info())["service"] == "popgate"
        assert (await client.put_topic(topic, queues=2))["queues"] == 2
        assert (await client.get_topic(topic))["queues"] == 2
        assert topic in {listed["topic"] for listed in await client.list_topics()}
        await client.put_group(topic, "g", invisibility_seconds=9)
        assert (await client.get_group(topic, "g"))["policy"]["invisibility_seconds"] == 9

        results = await client.publish(topic, *(str(number) for number in range(MANY)))
        assert all(result.ok for result in results)
        messages: list[AsyncLeasedMessage] = []
        while len(messages) < MANY and (popped := await client.pop(topic, "g", 256, wait_seconds=10)):
            messages += popped
        assert sorted(int(message.text) for message in messages) == list(range(MANY))

        one, two, three, *rest = messages
        assert await one.extend(100) == pytest.approx(time.time() + 100, abs=5)
        await one.ack()
        await two.release()
        await three.reject("no use", error=LookupError("no such customer"))
        (letter,) = (await client.dead_letters(topic, "g"))["messages"]
        assert letter["error"] == {"type": "LookupError", "text": "no such customer"}
        with pytest.raises(LeaseLost):
            await two.extend(5)
        assert statuses(await client.extend(topic, "g", rest, 50)) == ["extended"] * len(rest)
        assert statuses(await client.release(topic, "g", rest[:5], delay_seconds=600)) == ["released"] * 5
        assert statuses(await client.reject(topic, "g", rest[5], "why")) == ["rejected"]
        assert statuses(await client.ack(topic, "g", rest[6:])) == ["acked"] * (MANY - 9)
        assert statuses(await client.settle(topic, "g", Verb.ACK, [SettleEntry(receipt_handle="x")])) == ["invalid"]
        state = await client.stats(topic, "g")
        assert [state[name] for name in ("ready", "in_flight", "delayed", "dead")] == [1, 0, 5, 2]

        await client.delete_group(topic, "g")
        await client.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            await client.get_topic(topic)
    await client.close()


@pytest.mark.parametrize(("plain", "twin"), [(Client, AsyncClient), (LeasedMessage, AsyncLeasedMessage)])
def test_the_two_clients_have_the_same_calls(plain: type, twin: type) -> None:
    calls = {name: call for name, call in vars(plain).items() if inspect.isfunction(call) and name[0] != "_"}
    twins = {name: call for name, call in vars(twin).items() if inspect.isfunction(call) and name[0] != "_"}
    assert calls.keys() == twins.keys()
    for name, call in calls.items():
        mine, its = (dict(inspect.signature(one).parameters) for one in (call, twins[name]))
        if name == "lock":  # what is called on its loss gets the lock of its own client
            assert mine.pop("on_loss").replace(annotation=None) == its.pop("on_loss").replace(annotation=None)
        assert list(mine.items()) == list(its.items()), name
        assert inspect.iscoroutinefunction(twins[name]) is (name not in WITHOUT_REQUEST), name


# ---------------------------------------------------------------- over RabbitMQ


def test_the_calls_work_over_rabbitmq(rabbit_proxy: ProxyProcess, topic: str) -> None:
    with Client(rabbit_proxy.url) as client:
        client.put_topic(topic, queues=2)
        client.put_group(topic, "default")
        sent = {str(number).encode() for number in range(MANY)} | {b"\xff\x00"}
        assert all(result.ok for result in client.publish(topic, *sent))
        messages = pop_all(client, topic, len(sent))
        assert {message.body for message in messages} == sent

        one, two, *rest = messages
        one.release()
        two.reject("no use")
        assert statuses(client.extend(topic, "default", rest, 60)) == ["extended"] * len(rest)
        assert statuses(client.ack(topic, "default", rest)) == ["acked"] * len(rest)
        (again,) = client.pop(topic, "default", wait_seconds=10)
        assert (again.body, again.delivery_count) == (one.body, 2)
        again.ack()
        wait_until(lambda: client.stats(topic, "default")["dead"] == 1, timeout_seconds=10, what="the dead letter")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_settings_of_a_group_are_the_ones_that_the_server_has(
    client: Client, topic: str, kind: type[Client | AsyncClient]
) -> None:
    client.put_topic(topic, queues=1)
    policy = client.put_group(topic, "default")["policy"]
    told = (kind.put_group.__doc__ or "").partition("The policy: ")[2].partition(".")[0]
    assert set(re.findall(r"\w+", told)) == {*policy, *policy["retry"]}
