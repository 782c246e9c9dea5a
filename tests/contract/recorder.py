"""A listener that records its events, and messages and layouts for broker tests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from popgate.domain.message import HeaderValue, Message
from popgate.domain.names import CopyId, GroupName, Layout, Subscription, TopicName, own_layout
from popgate.ports.broker import Broker, Delivery, Outgoing, PublishStatus

WAIT_SECONDS = 20.0
"""Maximum wait in seconds, far above what any broker needs: tests wait for events, not for time."""
TOPIC = TopicName("orders")


class Recorder:
    """Listens to one channel."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.ends: list[tuple[str, bool]] = []
        self._changed = asyncio.Event()

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        assert not self.ends, "deliveries after the channel was lost"
        self.deliveries += deliveries
        self._changed.set()

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        self.ends.append((reason, queue_gone))
        self._changed.set()

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.message.body for delivery in self.deliveries]

    @property
    def tags(self) -> list[int]:
        return [delivery.tag for delivery in self.deliveries]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_count(self, count: int) -> list[Delivery]:
        """Return all deliveries once there are at least `count`."""
        await self.until(lambda: len(self.deliveries) >= count)
        return self.deliveries

    async def until_lost(self) -> tuple[str, bool]:
        await self.until(lambda: bool(self.ends))
        return self.ends[0]


def layout(group: str = "billing", queue_count: int = 1, topic: TopicName = TOPIC) -> Layout:
    return own_layout(Subscription(topic, GroupName(group)), queue_count)


_minted = 0


def message(
    body: bytes = b"",
    *,
    headers: Mapping[str, HeaderValue] | None = None,
    ordering_key: str | None = None,
    message_id: str = "m-1",
) -> Message:
    """Return a message with a new copy id."""
    global _minted  # noqa: PLW0603 - unique over all tests of the run
    _minted += 1
    return Message(
        copy_id=CopyId(f"{_minted:032x}"),
        message_id=message_id,
        body=body,
        headers=headers or {},
        ordering_key=ordering_key,
        published_at=1_700_000_000.25,
    )


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


async def publish(broker: Broker, bodies: Sequence[bytes], *, topic: TopicName = TOPIC, index: int = 0) -> None:
    """Publish bodies, each of which must be stored."""
    outcomes = await broker.publish([Outgoing(message=message(body), topic=topic, index=index) for body in bodies])
    assert [outcome.status for outcome in outcomes] == [PublishStatus.PUBLISHED] * len(bodies)


async def declare(broker: Broker, *layouts: Layout) -> None:
    for each in layouts:
        await broker.declare_topic(each.subscription.topic)
        await broker.declare_group(each)
