"""Verifies, renews and releases a held lock, and notifies the holder when the lock is lost."""

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
"""Maximum seconds for an answer. If the broker takes longer, it may have given the lock to another client, so the
holder must assume that the lock is lost."""
RETURN_SECONDS = 1.0
"""Maximum seconds that a release waits until the broker counts the returned token."""
RETURN_AGAIN_SECONDS = 0.002
"""Seconds between two checks whether the broker has received the returned token."""


class Grant(Protocol):
    """A held lock.

    ``lost`` is set as soon as this process knows that the lock is lost. ``verify`` asks the broker.
    """

    slot: Slot
    lost: asyncio.Event
    reason: str
    """The reason why the lock is lost; empty while it is held."""

    @property
    def fencing_token(self) -> int | None:
        """The fencing token, which grows with each grant of a slot.

        None means that the lock is unfenced. The protected resource then accepts writes of a client that has lost the
        lock without noticing it.
        """
        ...

    async def verify(self) -> None:
        """Check that the lock is held, in one round trip. Raises: LockLost."""
        ...

    async def renew(self) -> int | None:
        """Confirm at the broker that the lock is held. Return its fencing token, which may have grown. Raises:
        LockLost."""
        ...

    async def release(self) -> None:
        """Release the lock. Idempotent. Never raises: if the broker does not answer, the lock ends with the connection.

        The release of a fenced lock waits for a limited time until the broker counts the slot as free or has given it
        to the next client.
        """
        ...


class ChannelGrant:
    """A slot that is held through a channel. The base of fenced and unfenced grants."""

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
        """Stop the background work for a lock that is no longer held."""

    # -- the channel's listener -----------------------------------------------------------------------------------

    def on_token(self, token: Token) -> None:
        """Accept a token that arrived."""

    def on_ended(self, reason: str) -> None:
        """Mark the lock as lost, and close its channel, so that the broker does not count it as held either."""
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
        """Only verify the lock, because an unfenced lock has no token to renew. Raises: LockLost."""
        await self.verify()


class FencedGrant(ChannelGrant):
    """A fenced lock, which renews itself every ``renew_seconds``. ``token`` is the delivery that granted it."""

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
        """Make the broker deliver the token again, to this client only. Return the new token. Raises: LockLost."""
        self._raise_if_lost()
        if self._came_back is None:
            self._came_back = asyncio.get_running_loop().create_future()
            turn = self._channel.return_token(self.slot.token_queue)
        else:
            turn = None  # another renewal is in progress: use its result
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
        """Release the lock, and wait at most ``RETURN_SECONDS`` until the broker counts its slot as free.

        Idempotent. Never raises.

        RabbitMQ confirms the end of a channel before it has returned the channel's token to the queue. Without the
        wait, a client that knows of the release could be refused the free slot, and an administrator would see the
        former holder.
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
            self._came_back.exception()  # mark the error as retrieved, because perhaps no task waits for it
            self._came_back = None

    def on_token(self, token: Token) -> None:
        if self._came_back is None or token.body != self._token.body:
            # RabbitMQ moves the consumers of a deleted queue to a new queue of the same name without a notification.
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
        """Set the timer for the next renewal. Without renewals, the broker's consumer_timeout would close the
        channel."""
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
    """Return the fencing token: the number in the token message plus its delivery count."""
    return int(token.body) + token.deliveries


_fenced_conforms: type[Grant] = FencedGrant
_unfenced_conforms: type[Grant] = UnfencedGrant
