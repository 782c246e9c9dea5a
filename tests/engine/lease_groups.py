"""Helpers for the tests of lease groups in the engine: one stream of the group ``default`` of one topic."""

from collections.abc import Sequence

from popgate.domain.names import StreamName
from popgate.engine.lease_groups.lease_groups import FormedGroup
from popgate.engine.lease_groups.slices import GroupMessage
from support.engines import World

STREAM = StreamName("s")
TOPIC = "t"
INVISIBILITY = 30.0


async def put(
    world: World, epoch: int = 1, *, count: int = 100, slices: int = 1, seconds: float = INVISIBILITY
) -> FormedGroup:
    return await world.engine.lease_groups.put(
        TOPIC, "default", STREAM, epoch, max_messages=count, slices=slices, invisibility_seconds=seconds
    )


async def read(world: World, epoch: int = 1, number: int = 0) -> list[GroupMessage]:
    found = await world.engine.lease_groups.read(TOPIC, "default", STREAM, epoch, number)
    messages = [message async for part in found.parts for message in part]
    assert len(messages) == found.message_count
    return messages


async def ack(world: World, through: int = 1) -> tuple[int, int, int]:
    return await world.engine.lease_groups.ack(TOPIC, "default", STREAM, through)


def texts(messages: Sequence[GroupMessage]) -> list[str]:
    return [one.message.body.decode() for one in messages]


def numbered(count: int) -> list[str]:
    return [f"m{number:04}" for number in range(count)]
