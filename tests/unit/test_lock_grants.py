"""How a fenced grant handles the tokens that come on its channel."""

import asyncio

import pytest

from popgate.domain.errors import LockLost, LockUnavailable
from popgate.domain.locks import LockKind, Slot
from popgate.locks.grants import FencedGrant
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


@pytest.mark.parametrize(("body", "is_kept"), [(b"100", True), (b"900", False)])
async def test_a_renewal_that_is_answered_with_the_token_of_a_new_queue_has_lost_the_lock(
    body: bytes, is_kept: bool
) -> None:
    """RabbitMQ transfers the consumers of a deleted queue to a new one of its name."""
    channel, background = SilentChannel(), Background()
    token = Token(SLOT.token_queue, b"100", 0)
    grant = FencedGrant(SLOT, channel, token, driver=NoDriver(), background=background, renew_seconds=600)
    renewing = asyncio.ensure_future(grant.renew())
    await asyncio.sleep(0)
    assert channel.turned_over == [SLOT.token_queue]
    grant.on_token(Token(SLOT.token_queue, body, 1))
    if is_kept:
        assert await renewing == 101
    else:
        with pytest.raises(LockLost, match="taken away"):
            await renewing
        assert grant.lost.is_set()
    await grant.release()
    await background.stop()
