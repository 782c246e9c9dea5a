"""How a fenced grant handles the tokens that come on its channel."""

import asyncio

import pytest

from popgate.domain.errors import LockLost, LockUnavailable
from popgate.domain.locks import LockKind, Slot
from popgate.locks.grants import FencedGrant
from popgate.locks.lock_queues import TokenListener
from popgate.ports.lock_driver import LockChannel, LockListener, QueueRole, QueueState, Token
from popgate.runtime.background import Background

SLOT = Slot("a", LockKind.PERSISTENT_MUTEX, 1)


class NoDriver:
    """A broker that can no longer be reached."""

    is_open = False

    async def open(self, listener: LockListener) -> LockChannel:
        raise LockUnavailable("gone, says the test")


class SilentChannel:
    """A channel whose tokens the test delivers."""

    def __init__(self) -> None:
        self.turned_over: list[str] = []

    async def declare(self, queue: str, role: QueueRole, *, kept_seconds: int | None) -> None: ...

    async def delete(self, queue: str) -> None: ...

    async def state(self, queue: str) -> QueueState | None:
        return None

    async def put(self, queue: str, body: bytes) -> bool:
        return False

    async def last(self, queue: str) -> bytes | None:
        return None

    async def wait_for_token(self, queue: str) -> bool:
        return False

    async def leave(self, queue: str) -> None: ...

    async def return_token(self, queue: str) -> None:
        self.turned_over.append(queue)

    async def take(self, queue: str) -> bool:
        return False

    async def close(self) -> None: ...

    def abandon(self) -> None: ...


def grant_on(channel: SilentChannel, background: Background) -> FencedGrant:
    token = Token(SLOT.token_queue, b"100", 3)
    return FencedGrant(SLOT, channel, token, driver=NoDriver(), background=background, renew_seconds=600)


@pytest.mark.parametrize(
    ("body", "deliveries", "lost"),
    [
        (b"100", 4, None),
        (b"900", 4, "taken away"),  # RabbitMQ transfers the consumers of a deleted queue to a new one of its name
        (b"100", 5, "another client held it"),
        (b"100", 3, "another client held it"),
    ],
)
async def test_a_renewal_is_answered_with_the_next_delivery_of_the_same_token_or_the_lock_is_lost(
    body: bytes, deliveries: int, lost: str | None
) -> None:
    channel, background = SilentChannel(), Background()
    grant = grant_on(channel, background)
    renewing = asyncio.ensure_future(grant.renew())
    await asyncio.sleep(0)
    assert channel.turned_over == [SLOT.token_queue]
    grant.on_token(Token(SLOT.token_queue, body, deliveries))
    if lost is None:
        assert await renewing == 104
    else:
        with pytest.raises(LockLost, match=lost):
            await renewing
        assert grant.lost.is_set()
    await grant.release()
    await background.stop()


async def test_a_second_token_that_came_before_the_grant_was_made_shows_that_the_first_was_taken_away() -> None:
    channel, background, listener = SilentChannel(), Background(), TokenListener()
    listener.on_token(Token(SLOT.token_queue, b"100", 3))
    assert await listener.token(0.1) == Token(SLOT.token_queue, b"100", 3)
    listener.on_token(Token(SLOT.token_queue, b"100", 5))
    grant = grant_on(channel, background)
    listener.forward_to(grant)
    with pytest.raises(LockLost, match="taken away"):
        await grant.renew()
    await background.stop()
