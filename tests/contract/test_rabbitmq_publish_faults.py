"""An exception at any step of publishing: every answer is backed by RabbitMQ's own."""

from collections.abc import Sequence
from contextlib import nullcontext

import aio_pika
import pytest
from pamqp.common import FieldTable

from contract.brokers import rabbit_broker
from contract.recorder import TOPIC, Recorder, declare, layout, message
from contract.test_rabbitmq_faults import available
from popgate.adapters.rabbitmq import confirms, field_values, properties, publisher
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.errors import BrokerUnavailable
from popgate.domain.names import BrokerQueue, TopicName
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from support.injected import FaultAtLine, InjectedError, Tried

MODULES = (publisher, confirms, properties, field_values)
BILLING = layout("billing")
QUEUE = BILLING.queues[0]
FULL = BrokerQueue("full")
NOWHERE = TopicName("nowhere")
FILL_COUNT = 10
"""Number of messages after which a queue with a limit of one is certainly full."""
EXPECTED = [PublishStatus.PUBLISHED, PublishStatus.REFUSED, PublishStatus.UNROUTED] * 2


async def publish_all_kinds(broker: RabbitBroker, bodies: Sequence[bytes]) -> list[PublishOutcome]:
    """Publish one message that is stored, one that is refused and one that no queue takes; then the same again."""
    kinds = [{"topic": TOPIC}, {"queue": FULL}, {"topic": TOPIC, "index": 7}] * 2
    headers = {"n": 1, "nested": [{"a": 1.5}, None, True]}
    return await broker.publish(
        [Outgoing(message=message(body, headers=headers), **kind) for body, kind in zip(bodies, kinds, strict=True)]  # type: ignore[arg-type]
    )


async def answers_around(broker: RabbitBroker, fault: FaultAtLine, number: int) -> set[bytes]:
    """Return what was answered ``published`` in a batch with the fault inside it, and in the next one."""
    published: set[bytes] = set()
    for which in (b"first", b"next"):
        await available(broker)
        bodies = [b"%s %d.%d" % (which, number, place) for place in range(len(EXPECTED))]
        try:
            with fault if which == b"first" else nullcontext():
                outcomes = await publish_all_kinds(broker, bodies)
        except (InjectedError, BrokerUnavailable):
            continue
        for body, outcome, expected in zip(bodies, outcomes, EXPECTED, strict=True):
            was_hit = outcome.unfit and which == b"first"
            assert was_hit or outcome.status in {expected, PublishStatus.FAILED}, (fault.happened_in, body, outcome)
            if outcome.status is PublishStatus.PUBLISHED:
                published.add(body)
    return published


@pytest.mark.parametrize("repetition", [1, 4])
async def test_a_fault_at_any_line_of_publishing_makes_no_false_success(
    amqp_url: str, repetition: int, seed: int, *, full_run: bool
) -> None:
    options = RabbitOptions(amqp_urls=(amqp_url,), confirm_timeout_seconds=2.0)
    connection = await aio_pika.connect(amqp_url)
    async with connection, rabbit_broker(options) as broker:
        await declare(broker, BILLING)
        channel = await connection.channel()
        arguments: FieldTable = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await channel.declare_queue(FULL, durable=True, arguments=arguments)
        filler = [Outgoing(message=message(), queue=FULL)]
        filling = [(await broker.publish(filler))[0].status for _ in range(FILL_COUNT)]
        assert filling[-1] is PublishStatus.REFUSED, "nothing more fits into it"
        published: set[bytes] = set()
        tried = Tried(seed, all_lines=full_run)
        while True:
            fault = FaultAtLine(MODULES, tried, repetition)
            published |= await answers_around(broker, fault, len(tried))
            if not fault.happened_in:
                break
            tried.add(fault.happened_in)
        assert len(tried) > 8
        listener = Recorder()
        await broker.consume(QUEUE, BILLING, 10_000, listener)
        await listener.until(lambda: published <= set(listener.bodies))
