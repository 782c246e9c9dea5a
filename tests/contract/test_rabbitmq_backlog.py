"""How many times a channel asks RabbitMQ for the backlog of its queue when many pops ask the channel."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiormq.channel import Channel as AmqpChannel

from contract.brokers import rabbit_broker
from contract.recorder import Recorder, declare, layout, numbered, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions

BILLING = layout("billing")
QUEUE = BILLING.queues[0]
CALLERS = 50
DECLARES_OF_A_COUNT = 2


class Counts:
    """The passive declares by which channels count. The answers are withheld while `open` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.declares = 0
        self.open = asyncio.Event()
        self.open.set()
        self.answered = asyncio.Event()
        declare_queue = AmqpChannel.queue_declare

        async def counted(channel: AmqpChannel, *arguments: Any, **options: Any) -> Any:
            answer = await declare_queue(channel, *arguments, **options)
            if options.get("passive"):
                self.declares += 1
                self.answered.set()
                await self.open.wait()
            return answer

        monkeypatch.setattr(AmqpChannel, "queue_declare", counted)


@pytest.fixture
async def broker(amqp_url: str) -> AsyncIterator[RabbitBroker]:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))) as rabbit:
        await declare(rabbit, BILLING)
        yield rabbit


async def test_pops_that_ask_for_the_backlog_together_share_a_count(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(broker, numbered(1, 3))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 1, listener)
    await listener.until_count(1)
    counts = Counts(monkeypatch)
    assert await asyncio.gather(*(channel.backlog() for _ in range(CALLERS))) == [2] * CALLERS
    assert counts.declares <= 2 * DECLARES_OF_A_COUNT, "one count in progress, and one for all that came later"


async def test_a_shared_count_is_never_older_than_the_question(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(broker, numbered(1, 1))
    listener = Recorder()
    channel = await broker.consume(QUEUE, BILLING, 1, listener)
    await listener.until_count(1)
    counts = Counts(monkeypatch)
    counts.open.clear()
    earlier = asyncio.ensure_future(channel.backlog())
    await counts.answered.wait()
    await publish(broker, numbered(2, 2))
    later = [asyncio.ensure_future(channel.backlog()) for _ in range(2)]
    await asyncio.sleep(0)
    counts.open.set()
    assert (await earlier, await asyncio.gather(*later)) == (0, [1, 1])
