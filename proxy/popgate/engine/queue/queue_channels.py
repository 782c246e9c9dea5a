"""Opens and closes the channels on which one queue is consumed. At most one channel is open at a time.

A channel can be lost or ended at any moment, also while it is being opened. Therefore each attempt to open a channel
has its own listener. If the channel of an attempt is ended, the callbacks of its listener are ignored. If it is ended
before it is open, it is closed as soon as it is open. The next channel is opened only after the last one is closed,
because a queue may accept only one consumer at a time.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from popgate.domain.names import BrokerQueue, Layout
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.flow import Flow
from popgate.ports.broker import Channel, Delivery, Listener


class QueueChannels:
    """The channels of one queue.

    ``listener``: the listener of the present channel; it is set as soon as the channel begins to open. ``present``: the
    present channel, once it is open.
    """

    def __init__(self, context: EngineContext, layout: Layout, queue: BrokerQueue, flow: Flow) -> None:
        self.present: Channel | None = None
        self.listener: Listener | None = None
        self._context = context
        self._layout = layout
        self._queue = queue
        self._flow = flow
        self._early = Effects()
        """Acks and requeues that were decided while the channel was still being opened."""
        self._closing: asyncio.Task[None] | None = None

    async def open(self, prefetch: int, consumer: Listener) -> Channel | None:
        """Open a channel, and pass its deliveries to ``consumer``.

        Return None if the channel was ended (``end``) during the call. After an error, ``listener`` is None, so that
        the caller can try again. Raises: BrokerUnavailable, QueueGone, Conflict.
        """
        listener = self.listener = _PresentOnly(self, consumer)
        try:
            await self.closed()
            if self.listener is not listener:
                return None
            channel = await self._context.broker.consume(self._queue, self._layout, prefetch, listener)
        except BaseException:
            if self.listener is listener:
                self.listener = None
                self._flow.closed()
            raise
        if self.listener is not listener:
            await channel.close()
            return None
        self.present = channel
        self._flow.opened()
        self.send(self._early)
        self._early = Effects()
        return self.present

    def send(self, effects: Effects) -> None:
        """Send the acks and requeues of ``effects`` to the broker. If the channel is not open yet, send them later."""
        channel = self.present
        if channel is None:
            self._early.acks += effects.acks
            self._early.requeues += effects.requeues
            return
        if effects.acks:
            channel.ack(effects.acks)
        if effects.requeues:
            channel.requeue(effects.requeues)

    def end(self) -> Channel | None:
        """Detach from the channel and return it, so that the caller can close it.

        Acks and requeues that were not sent yet are dropped, because their delivery tags are void.
        """
        channel, self.present, self.listener = self.present, None, None
        self._early = Effects()
        return channel

    # -- closing ----------------------------------------------------------------------------------------------------

    async def leave(self, channel: Channel | None) -> None:
        """Close ``channel`` if it is not None. Then release the queue, so that other proxies can consume it."""
        if channel is not None:
            await channel.close()
        await self._context.broker.let_go(self._queue)

    def close_soon(self, closing: Coroutine[Any, Any, None]) -> None:
        """Run ``closing`` in the background. The next channel is opened only after it has ended."""
        self._closing = self._context.background.spawn(closing, name=f"close {self._queue}")

    async def closed(self) -> None:
        """Wait until the last ``close_soon`` has ended. Return at once if there was none."""
        if self._closing is not None:
            await asyncio.wait({self._closing})


class _PresentOnly:
    """Passes the callbacks of one channel to ``consumer`` as long as the channel is the present one."""

    def __init__(self, channels: QueueChannels, consumer: Listener) -> None:
        self._channels = channels
        self._consumer = consumer

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        if self._channels.listener is self:
            self._consumer.on_deliveries(deliveries)

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        if self._channels.listener is self:
            self._consumer.on_channel_lost(reason, queue_gone=queue_gone)
