"""Delays and times to live through the Python client, synchronous and asyncio, against a real proxy."""

import asyncio
import time

import pytest

from popgate_client import AsyncClient, Client, OutgoingMessage, RequestInvalid
from support.proxy import ProxyProcess

GROUP = "default"


def test_a_delayed_message_comes_when_its_time_has_come(client: Client, topic: str) -> None:
    before = time.time()
    client.publish(topic, OutgoingMessage(body="later", delay_seconds=0.5))[0].raise_for_status()
    assert client.pop(topic, GROUP) == []
    (message,) = client.pop(topic, GROUP, wait_seconds=10)
    assert before + 0.5 <= time.time() < before + 5
    assert message.text == "later"
    assert message.published_at == pytest.approx(before, abs=0.4), "it was published then"
    with pytest.raises(RequestInvalid) as caught:
        client.publish(topic, OutgoingMessage(body="a", delay_seconds=2_592_001))
    assert caught.value.field == "messages[0].delay_seconds"


def test_a_message_whose_time_to_live_is_over_is_discarded(client: Client, topic: str) -> None:
    short, long = (OutgoingMessage(body="short", ttl_seconds=0.5), OutgoingMessage(body="long", ttl_seconds=3600))
    assert all(result.ok for result in client.publish(topic, short, long))
    time.sleep(0.6)
    assert [message.text for message in client.pop(topic, GROUP, max_messages=9)] == ["long"]
    assert client.pop(topic, GROUP) == []


async def test_the_asyncio_client_does_the_same(shared_proxy: ProxyProcess, topic: str) -> None:
    async with AsyncClient(shared_proxy.url) as client:
        before = time.time()
        later = OutgoingMessage(body="later", delay_seconds=0.5, ttl_seconds=60)
        short = OutgoingMessage(body="short", ttl_seconds=0.1)
        assert all(result.ok for result in await client.publish(topic, later, short))
        await asyncio.sleep(0.2)
        assert await client.pop(topic, GROUP, max_messages=9) == []
        (message,) = await client.pop(topic, GROUP, max_messages=9, wait_seconds=10)
        assert (message.text, before + 0.5 <= time.time()) == ("later", True)
