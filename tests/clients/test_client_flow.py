"""Flow control through the Python client: filters, max_in_flight, pause; and ordering keys."""

import asyncio

import pytest

from popgate_client import AsyncClient, Client, Consumer, Message, OutgoingMessage, RetryLater
from support.proxy import ProxyProcess

GROUP = "default"


def test_a_pop_with_a_filter_gets_only_what_passes(client: Client, topic: str) -> None:
    client.publish(topic, OutgoingMessage(body="1", headers={"size": 1}), OutgoingMessage(body="2"))
    (one,) = client.pop(topic, GROUP, max_messages=9, wait_seconds=5, filter={"size": [1, 2]})
    assert one.body == b"1"
    (two,) = client.pop(topic, GROUP, max_messages=9, wait_seconds=5, filter={"size": None})
    assert two.body == b"2"


def test_a_full_group_is_told_as_retry_later(client: Client, topic: str) -> None:
    client.publish(topic, "a", "b")
    client.put_group(topic, GROUP, max_in_flight=1)
    (first,) = client.pop(topic, GROUP, wait_seconds=5)
    with pytest.raises(RetryLater) as caught:
        client.pop(topic, GROUP)
    assert (caught.value.code, caught.value.status) == ("too_many_in_flight", 429)
    first.ack()
    (second,) = client.pop(topic, GROUP, wait_seconds=5)
    assert {first.body, second.body} == {b"a", b"b"}  # each from a queue of its own, in any order


async def test_a_group_is_paused_and_resumed(shared_proxy: ProxyProcess, client: Client, topic: str) -> None:
    client.publish(topic, "a")
    async with AsyncClient(shared_proxy.url) as asynchronous:
        assert (await asynchronous.pause_group(topic, GROUP))["policy"]["paused"] is True
        assert await asynchronous.pop(topic, GROUP, wait_seconds=0.5) == []
        assert client.resume_group(topic, GROUP)["policy"]["paused"] is False
        assert len(await asynchronous.pop(topic, GROUP, wait_seconds=5)) == 1


async def test_consumers_of_a_filter_and_of_the_rest_keep_each_key_in_order(
    shared_proxy: ProxyProcess, client: Client, topic: str
) -> None:
    for number in range(40):
        client.publish(
            topic,
            *(
                OutgoingMessage(body=f"{key}.{number}", ordering_key=key, headers={"even": number % 2 == 0})
                for key in "abc"
            ),
        )
    handled: dict[str, list[int]] = {key: [] for key in "abc"}

    async def handle(message: Message) -> None:
        key, number = message.body.decode().split(".")
        handled[key].append(int(number))
        await asyncio.sleep(0.001)

    even = Consumer(topic, GROUP, handle, base_url=shared_proxy.url, wait_seconds=1, filter={"even": True})
    odd = Consumer(topic, GROUP, handle, base_url=shared_proxy.url, wait_seconds=1, filter={"even": False})
    running = [asyncio.create_task(consumer.run_async()) for consumer in (even, odd)]
    async with asyncio.timeout(30):
        while sum(map(len, handled.values())) < 120:  # noqa: ASYNC110 - the handlers say no more than this
            await asyncio.sleep(0.05)
    for consumer in (even, odd):
        consumer.stop()
    await asyncio.gather(*running)
    assert all(numbers == list(range(40)) for numbers in handled.values())
