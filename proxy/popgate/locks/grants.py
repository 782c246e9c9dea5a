"""A held lock: verifies, renews and releases it, and lets its holder know when it is lost."""

import asyncio
import contextlib
import logging
from typing import Protocol

from popgate.domain.errors import LockLost, LockUnavailable, PopgateError
from popgate.domain.locks import Slot
from popgate.locks.administration import slot_status
from popgate.locks.lock_queues import Probe
from popgate.ports.lock_driver import LockChannel, LockDriver, Token
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Maximum seconds for an answer. A slower broker may have given the lock to another client: when unsure, step down."""
RETURN_SECONDS = 1.0
"""Maximum seconds that a release waits until the broker counts the returned token."""
RETURN_AGAIN_SECONDS = 0.002
"""Seconds between two looks at a token on its way back."""


class Grant(Protocol):
    """A held lock. ``lost`` is set as soon as this process knows that the lock is lost; ``verify`` asks the broker."""

    slot: Slot
    lost: asyncio.Event
    reason: str
    """The reason why it is lost."""

    @property
    def fencing_token(self) -> int | None:
        """The fencing token, which grows with each grant of a slot. None: the lock is unfenced, and its resource is not
        protected from a client that does not know that it has lost the lock."""
        ...

    async def verify(self) -> None:
        """Check that the lock is held, in one round trip. Raises: LockLost."""
        ...

    async def renew(self) -> int | None:
        """Make sure at the broker that the lock is held. Return its new token, which has grown. Raises: LockLost."""
        ...

    async def release(self) -> None:
        """Release the lock. Idempotent. Never raises: if the broker can't be asked, the lock ends with the connection.

        When this returns, the broker counts the slot as free or has given it to the next client.
        """
        ...


class ChannelGrant:
    """A slot that is held through a channel: the common part of fenced and unfenced grants."""

    def __init__(self, slot: Slot, channel: LockChannel, background: Background) -> None:
        self.slot = slot
        self.lost = asyncio.Event()
        self._channel = channel
        self._background = background
        self.reason = ""
        self._released = False

    async def verify(self) -> None:
        """Check that the lock is held, in one round trip. Raises: LockLost."""
        self._raise_if_lost()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                state = await self._channel.state(self.slot.watched_queue)
        except (TimeoutError, PopgateError) as error:
            self.on_ended(f"the broker could not say whether it is still held: {str(error) or 'no answer'}")
        else:
            if state is None:
                self.on_ended("the slot was removed")
        self._raise_if_lost()

    async def release(self) -> None:
        """Release the lock. Idempotent; never raises."""
        if self._released:
            return
        self._released = True
        self.stop()
        await self._close()

    def stop(self) -> None:
        """Stop the work for a lock that is no longer held."""

    # -- the channel's listener -----------------------------------------------------------------------------------

    def on_token(self, token: Token) -> None:
        """Take a token that came."""

    def on_ended(self, reason: str) -> None:
        """Note that the lock is lost, and close its channel, so that it is not held at the broker either."""
        if self._released or self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        self.stop()
        self._background.spawn(self._close(), name=f"close lock {self.slot.lock}")

    # -- how ------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._channel.close()
        except (TimeoutError, LockUnavailable) as error:
            _log.info("a lock will end with its connection", extra={"lock": self.slot.lock, "reason": str(error)})

    def _raise_if_lost(self) -> None:
        if self._released:
            raise LockLost(f"lock {self.slot.lock} was released")
        if self.lost.is_set():
            raise LockLost(lost_detail(self.slot.lock, self.reason))


class UnfencedGrant(ChannelGrant):
    fencing_token = None

    async def renew(self) -> None:
        """Only verify, because there is nothing to renew. Raises: LockLost."""
        await self.verify()


class FencedGrant(ChannelGrant):
    """A fenced lock. ``token``: the delivery that granted it. It renews itself every ``renew_seconds``."""

    def __init__(
        self,
        slot: Slot,
        channel: LockChannel,
        token: Token,
        *,
        driver: LockDriver,
        background: Background,
        renew_seconds: float,
    ) -> None:
        super().__init__(slot, channel, background)
        self._driver = driver
        self._token = token
        self._renew_seconds = renew_seconds
        self._came_back: asyncio.Future[Token] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._renew_later()

    @property
    def fencing_token(self) -> int:
        return token_value(self._token)

    async def renew(self) -> int:
        """Let the broker deliver the token again, without a chance for another client to get it. Raises: LockLost."""
        self._raise_if_lost()
        if self._came_back is None:
            self._came_back = asyncio.get_running_loop().create_future()
            turn = self._channel.return_token(self.slot.token_queue)
        else:
            turn = None  # another renewal is under way: its result is used
        came_back = self._came_back
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if turn is not None:
                    await turn
                await asyncio.shield(came_back)
        except (TimeoutError, LockLost, LockUnavailable) as error:
            self.on_ended(f"the broker did not renew it: {str(error) or 'no answer'}")
        self._raise_if_lost()
        return self.fencing_token

    async def release(self) -> None:
        """Release the lock, and wait until the broker counts its slot as free. Idempotent; never raises.

        RabbitMQ confirms that a channel is closed before the queue has the channel's token back. Without the wait, a
        client that knows of the release could be refused the free slot, and an administrator would see a former holder.
        """
        was_held = not self._released and not self.lost.is_set()
        await super().release()
        if was_held:
            with contextlib.suppress(TimeoutError, LockUnavailable):
                await self._returned()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._came_back is not None:
            self._came_back.set_exception(LockLost("the lock was let go"))
            self._came_back.exception()  # marks it as retrieved, because perhaps no task waits for it
            self._came_back = None

    def on_token(self, token: Token) -> None:
        if self._came_back is None or token.body != self._token.body:
            # RabbitMQ moves the consumers of a deleted queue to a new queue of that name without a notification.
            self.on_ended("it was taken away")
            return
        self._token = token
        self._came_back.set_result(token)
        self._came_back = None

    async def _returned(self) -> None:
        """Wait until the broker no longer counts this released grant. Raises: TimeoutError, LockUnavailable."""
        async with asyncio.timeout(RETURN_SECONDS), Probe(self._driver) as probe:
            while True:
                status = await slot_status(probe, self.slot)
                if not status.held or (status.fencing_token or 0) > self.fencing_token:
                    return
                await asyncio.sleep(RETURN_AGAIN_SECONDS)

    def _renew_later(self) -> None:
        """Set the timer for the next renewal, before the broker's consumer_timeout closes the channel."""
        self._timer = asyncio.get_running_loop().call_later(self._renew_seconds, self._renew_soon)

    def _renew_soon(self) -> None:
        self._background.spawn(self._renew(), name=f"renew lock {self.slot.lock}")

    async def _renew(self) -> None:
        try:
            await self.renew()
        except LockLost as error:
            _log.warning("a lock could not be renewed", extra={"lock": self.slot.lock, "reason": error.detail})
        else:
            self._renew_later()


def lost_detail(lock: str, reason: str) -> str:
    return f"lock {lock} is lost: {reason}; stop, and acquire it again"


def token_value(token: Token) -> int:
    """Return the fencing token of a delivery of the token message."""
    return int(token.body) + token.deliveries


_fenced_conforms: type[Grant] = FencedGrant
_unfenced_conforms: type[Grant] = UnfencedGrant
