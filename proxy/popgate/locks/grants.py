"""Verifies, renews and releases a held lock. Notifies the holder when the lock is lost."""

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
"""Maximum seconds to wait for an answer of the broker. If the broker does not answer in time, it may have granted the
lock to another client. So the holder must assume that the lock is lost."""
RETURN_SECONDS = 1.0
"""Maximum seconds that a release waits until the broker has put the token message back into its queue."""
RETURN_AGAIN_SECONDS = 0.002
"""Seconds between two checks whether the broker has put the token message back into its queue."""


class Grant(Protocol):
    """A held slot of a lock.

    ``lost`` is set as soon as this process learns that the lock is lost. To find a loss of which this process does not
    know yet, ``verify`` queries the broker.
    """

    slot: Slot
    lost: asyncio.Event
    reason: str
    """The reason why the lock is lost. It is empty while the lock is held."""

    @property
    def fencing_token(self) -> int | None:
        """The fencing token, or None if the lock is unfenced. A later grant of the same slot has a higher token.

        Without a fencing token, the protected resource can't refuse the writes of a client that has lost the lock, but
        has not noticed the loss.
        """
        ...

    async def verify(self) -> None:
        """Check that the lock is held, in one round trip. Raises: LockLost."""
        ...

    async def renew(self) -> int | None:
        """Confirm at the broker that the lock is held, and that no other client has held it since it was acquired.

        Return the fencing token, which may be higher than before. Raises: LockLost.
        """
        ...

    async def release(self) -> None:
        """Release the lock. Idempotent, and never raises.

        If the broker does not answer, the lock is released when the connection ends. The release of a fenced lock waits
        for a limited time until the broker shows the slot as free, or has granted the slot to the next client.
        """
        ...


class ChannelGrant:
    """A slot that this client holds through a channel. Fenced and unfenced grants derive from this class."""

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
        """Stop the background work of this grant, because the lock is no longer held."""

    # -- the channel's listener -----------------------------------------------------------------------------------

    def on_token(self, token: Token) -> None:
        """Ignore the token. ``FencedGrant`` overrides this method."""

    def on_ended(self, reason: str) -> None:
        """Mark the lock as lost, and close its channel, so that the broker also releases the lock."""
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
        """Verify the lock. An unfenced lock has no token that could be renewed. Raises: LockLost."""
        await self.verify()


class FencedGrant(ChannelGrant):
    """A held slot of a fenced lock, which is renewed every ``renew_seconds``.

    ``token`` is the delivery of the token message that granted the slot.
    """

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
        """Make the broker redeliver the token message to this client only.

        Return the new fencing token. It is higher by one, so the broker has delivered the message to no other client
        since the last delivery to this one. Raises: LockLost.
        """
        self._raise_if_lost()
        if self._came_back is None:
            self._came_back = asyncio.get_running_loop().create_future()
            turn = self._channel.return_token(self.slot.token_queue)
        else:
            turn = None  # another renewal is in progress: wait for its result
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
        """Release the lock, and wait at most ``RETURN_SECONDS`` until the broker shows that the slot was released.

        Idempotent. Never raises.

        RabbitMQ confirms the end of a channel before it has put the token message of this channel back into the queue.
        Without the wait, a client that acquires the lock right after the release might not find the free slot, and an
        administrator might still see the former holder.
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
            self._came_back.exception()  # mark the error as retrieved, because maybe no task awaits it
            self._came_back = None

    def on_token(self, token: Token) -> None:
        """Accept the token if it is the answer to a renewal. Otherwise the lock is lost.

        - A token that was not requested has been with the broker, which could have delivered it to another client.
        - A token with another body comes from a new queue: if a queue is deleted and declared again, RabbitMQ may move
          its consumers to the new queue without a notification.
        - A token whose count has skipped a number was delivered to another client in the meantime. RabbitMQ takes the
          message away from a consumer whose node it considers lost, but it keeps the consumer in the line. If the node
          was only paused, the channel lives on, and the consumer gets the message again when its turn comes.
        """
        if self._came_back is None or token.body != self._token.body:
            self.on_ended("it was taken away")
            return
        if token.deliveries != self._token.deliveries + 1:
            self.on_ended("another client held it in the meantime")
            return
        self._token = token
        self._came_back.set_result(token)
        self._came_back = None

    async def _returned(self) -> None:
        """Wait until the broker shows the slot as free or held by a later grant.

        Raises: TimeoutError, LockUnavailable.
        """
        async with asyncio.timeout(RETURN_SECONDS), Probe(self._driver) as probe:
            while True:
                status = await slot_status(probe, self.slot)
                if not status.held or (status.fencing_token or 0) > self.fencing_token:
                    return
                await asyncio.sleep(RETURN_AGAIN_SECONDS)

    def _renew_later(self) -> None:
        """Set the timer for the next renewal.

        Without renewals, the broker would close the channel after its consumer_timeout.
        """
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
    """Return the fencing token: the number in the body of the token message, plus the message's delivery count."""
    return int(token.body) + token.deliveries


_fenced_conforms: type[Grant] = FencedGrant
_unfenced_conforms: type[Grant] = UnfencedGrant
