"""A consumer: gets messages, runs a handler for each, and settles each message by the result of its handler.

Owns the life of one run and its signals. Its parts: `following` (the consume mode); for pop mode `popping` (the pop
loop), `working` (the handlers), `leases` (the extensions), `settling` (the acks); for pull mode `pulling` (the session)
and `queue_worker` (pull, handle, commit).

    running --stop(), SIGTERM, SIGINT, a refusal--> draining --> stopped
       |                                               |
       +---------stop_now(), a second signal-----------+--> stopped at once

Draining: the consumer pops and pulls no more, and releases messages whose handler has not started. Running handlers
get `drain_seconds`; then their messages are released too (an `async` handler is cancelled; a thread runs on, with
`message.lease_lost` set).
Stopped at once: nothing is released. Leases end at their deadlines, and the session ends when its heartbeats stop.

A handler that blocks for ever occupies one place of `concurrency`. Its lease is extended for `lease_seconds_max`; then
the lease ends and another client gets the message. An `async` handler must not block its event loop: that stops
everything, extensions included. A handler that blocks must be a plain function, which gets a thread.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable

import httpx

from popgate_client.async_client import AsyncClient
from popgate_client.calling import Handler, prepared
from popgate_client.counters import Counters
from popgate_client.errors import PopgateError
from popgate_client.exchange import Traces
from popgate_client.facts import FactLogger, about
from popgate_client.following import Follower
from popgate_client.handling import RetryDelays, give_back
from popgate_client.leases import Extender, LeaseBook
from popgate_client.lengths import LeaseLength
from popgate_client.popping import Popper
from popgate_client.publishing import Deserializer
from popgate_client.pulling import Puller
from popgate_client.settling import Settler
from popgate_client.signals import signals_to
from popgate_client.subscription_calls import SubscriptionCalls, new_client_id
from popgate_client.tokens import AsyncTokenSource
from popgate_client.transport import shown_url
from popgate_client.wire import HeaderFilter
from popgate_client.working import HandlerPool

logger = FactLogger(__name__)

FLUSH_SECONDS = 5.0
"""Seconds that a stop waits for the answers to the last settlements."""


class Consumer:
    """Runs `handler(message)` for every message of a subscription. One object is one run.

    It follows the group's consume mode, also when that changes during the run: in pop mode it pops; in pull mode it
    pulls the queues that it is assigned, each in order. `mode` is the mode, and `client_id` the name under which it
    pulls.

    handler: if it returns, the message is acked. If it raises `Retry`, the message is released with that delay; if it
        raises `Reject`, the message is dead-lettered. Any other exception, including SystemExit, is logged, and the
        message is released with a growing delay. In pull mode a failed message is handled again in place after that
        delay; it blocks its queue until it succeeds or is dead-lettered. A handler may see a message twice, because
        delivery is at-least-once.
    base_url, token, ssl_context, transport: as for `AsyncClient`.
    tracing: `popgate_client.tracing.Tracing()` handles each message in a span. None: nothing is traced.
    deserializer: returns `message.data` for a body. None: it reads JSON.
    concurrency: maximum number of handlers that run at once.
    buffer_messages_max: maximum number of messages that are popped in addition and wait for a free handler. Their
        leases are extended meanwhile, and no other client gets them, so keep this at 0 unless the handler is faster
        than a round trip.
    invisibility_seconds: the length of a lease, 1 to 43,200; it is extended after a third of this. If the consumer is
        killed, its messages stay invisible for up to this long. None: as the group's policy says. Pull mode has no
        leases.
    filter: consume only messages with these headers; see `Client.pop`. A consumer with a filter waits while the group
        is not in pop mode, because a pull client gets all messages of its queues.
    lease_seconds_max: a lease is not extended beyond this, so that a handler that hangs finally loses its message. In
        pull mode the consumer then leaves until the handler has ended, and other clients get its queues.
    wait_seconds: the wait of a long poll, 1 to 30.
    drain_seconds: how long a stop or a change of the mode waits for running handlers.
    retry_initial_seconds, retry_multiplier, retry_delay_seconds_max: a failed message becomes visible again after
        `retry_initial_seconds * retry_multiplier ** (delivery_count - 1)`, at most `retry_delay_seconds_max`. If
        `retry_initial_seconds` is None, the group's retry policy applies, whose default is no delay.
    error_texts: send the text of a failed handler's exception to the server, and not only its type. The server keeps it
        with the message, for the dead letter. A text may contain parts of the message.

    `counters` counts what the consumer has done. Raises: ValueError for invalid options; TypeError for a handler that
    is not a function.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        base_url: str | None = None,
        token: AsyncTokenSource | None = None,
        concurrency: int = 8,
        buffer_messages_max: int = 0,
        invisibility_seconds: float | None = None,
        filter: HeaderFilter | None = None,
        lease_seconds_max: float = 3_600.0,
        wait_seconds: float = 20.0,
        drain_seconds: float = 20.0,
        retry_initial_seconds: float | None = 1.0,
        retry_multiplier: float = 2.0,
        retry_delay_seconds_max: float = 300.0,
        error_texts: bool = True,
        ssl_context: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        tracing: Traces | None = None,
        deserializer: Deserializer | None = None,
    ) -> None:
        handler = prepared(handler, deserializer)
        handler = handler if tracing is None else tracing.processed(handler)
        if concurrency < 1 or buffer_messages_max < 0 or drain_seconds < 0:
            raise ValueError("concurrency must be at least 1, buffer_messages_max and drain_seconds at least 0")
        _check_seconds(invisibility_seconds, wait_seconds, lease_seconds_max)
        self.counters = Counters()
        self.client_id = new_client_id()
        self._base_url = base_url
        self._topic = topic
        self._group = group
        self._drain_seconds = drain_seconds
        # No repeats in this client: the loops of the parts repeat calls themselves, and log and count it.
        self._client = AsyncClient(base_url, token=token, ssl_context=ssl_context, transport=transport)
        calls = SubscriptionCalls(
            self._client,
            topic,
            group,
            client_id=self.client_id,
            invisibility_seconds=invisibility_seconds,
            filter=filter,
            error_texts=error_texts,
        )
        chance = random.Random()
        delays = _delays(retry_initial_seconds, retry_multiplier, retry_delay_seconds_max)
        self._length = LeaseLength(calls.lease_seconds, invisibility_seconds)
        book = LeaseBook(lease_seconds_max=lease_seconds_max)
        self._extender = Extender(book, self._length, calls.settle, self.counters, chance)
        self._settler = Settler(
            calls.settle, self._length, self.counters, chance, goes_along=lambda: calls.acks_with_pops
        )
        self._handlers = HandlerPool(
            handler,
            concurrency=concurrency,
            capacity=concurrency + buffer_messages_max,
            delays=delays,
            book=book,
            extender=self._extender,
            settler=self._settler,
            counters=self.counters,
        )
        self._popper = Popper(
            calls.pop,
            self._handlers,
            self._settler,
            wait_seconds=wait_seconds,
            length=self._length,
            counters=self.counters,
            chance=chance,
        )
        self._follower = Follower(
            calls,
            self._popper,
            self._end_pops,
            may_pull=filter is None,
            client_id=self.client_id,
            counters=self.counters,
            chance=chance,
        )
        self._puller = Puller(
            calls,
            handler,
            concurrency=concurrency,
            wait_seconds=wait_seconds,
            drain_seconds=drain_seconds,
            handling_seconds_max=lease_seconds_max,
            delays=delays,
            counters=self.counters,
            chance=chance,
            noted=self._follower.noted,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[object] | None = None
        self._consuming: asyncio.Task[PopgateError] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._stopping_now = False

    def run(self) -> None:
        """Consume until SIGTERM or SIGINT, then drain and return; a second signal stops at once.

        Call it in the main thread, with no event loop running; in another thread it leaves the signals alone.
        Raises: what `run_async` raises.
        """
        asyncio.run(self._run_with_signals())

    async def run_async(self) -> None:
        """Consume until `stop()`, then drain and return.

        The consumer keeps trying through server restarts, lost connections and while the topic or group is missing.
        A cancellation cancels the handlers, releases all messages, and is raised again.
        Raises: RequestInvalid, Unauthorized, Forbidden if the server rejects a call permanently (after draining), and
            RuntimeError for a second run.
        """
        if self._loop is not None:
            raise RuntimeError("a Consumer can run only once; create a new one")
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        refusal: PopgateError | None = None
        try:
            with about(topic=self._topic, group=self._group, url=shown_url(self._base_url)):
                async with self._client, asyncio.TaskGroup() as services:
                    self._settling = services.create_task(self._settler.run(), name="popgate-settler")
                    try:
                        refusal = await self._consume()
                    finally:
                        await self._give_back(self._settling)
        except asyncio.CancelledError:
            if not self._stopping_now or self._main is None:
                raise
            self._main.uncancel()
        finally:
            self._handlers.close()
            self._puller.close()
        if refusal is not None:
            raise refusal

    def stop(self) -> None:
        """Start draining; may be called from any thread, also before the run, and again."""
        self._stopping = True
        self._in_loop(self._stop_consuming)

    def stop_now(self) -> None:
        """Stop at once without releasing messages; may be called from any thread, and again."""
        self._stopping = self._stopping_now = True
        self._in_loop(self._cancel)

    @property
    def mode(self) -> str | None:
        """The group's consume mode as last reported: `pop`, `draining` or `pull`; None: not yet known."""
        return self._follower.mode

    @property
    def queues(self) -> tuple[int, ...]:
        """The queues that are assigned to this consumer in pull mode."""
        return self._puller.queues

    async def _consume(self) -> PopgateError | None:
        """Get and handle messages until the stop, and let the handlers end; return the server's permanent rejection, if
        there is one."""
        async with asyncio.TaskGroup() as tasks:
            extending = tasks.create_task(self._extender.run(), name="popgate-extender")
            self._tasks = tasks
            self._handlers.start(tasks)
            self._puller.start(tasks)
            self._consuming = tasks.create_task(self._follower.run(self._puller), name="popgate-consumer")
            if self._stopping:
                self._consuming.cancel()
            await asyncio.wait([self._consuming])
            self._stopping = True
            logger.info("the consumer is draining")
            self._handlers.give_back_waiting()
            await self._reclaim()
            await asyncio.gather(self._handlers.finish(self._drain_seconds), self._puller.finish(self._drain_seconds))
            extending.cancel()
        return None if self._consuming.cancelled() else self._consuming.result()

    async def _end_pops(self) -> None:
        """End pop mode: the server has revoked the remaining leases, or will soon."""
        assert self._tasks is not None, "it runs in them"
        self._handlers.give_back_waiting()
        self._extender.ask_all()  # sets `lease_lost` for handlers whose lease is lost
        await self._handlers.finish(self._drain_seconds)
        self._handlers.start(self._tasks)

    async def _give_back(self, settling: asyncio.Task[None]) -> None:
        """Release all messages. The last step of every run, also after a cancellation, when nothing is released yet."""
        if not self._stopping_now:
            self._stopping = True
            self._handlers.give_back_waiting()
            await self._reclaim()
            self._settler.finish()
            await asyncio.gather(asyncio.wait([settling], timeout=FLUSH_SECONDS), self._puller.leave())
        settling.cancel()

    async def _reclaim(self) -> None:
        messages = await self._popper.reclaim()
        self.counters.popped += len(messages)
        ends_at = asyncio.get_running_loop().time() + self._length.seconds
        for message in messages:
            self._settler.submit(give_back(message), ends_at)

    async def _run_with_signals(self) -> None:
        def on_signal() -> None:
            if self._stopping:
                self.stop_now()
            else:
                self.stop()

        with signals_to(on_signal):
            await self.run_async()

    def _stop_consuming(self) -> None:
        if self._consuming is not None:
            self._consuming.cancel()

    def _cancel(self) -> None:
        if self._main is not None and not self._main.done():
            if self._settling is not None:  # first, so that the handlers cancelled below release nothing
                self._settling.cancel()
            self._main.cancel()

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(function)


def _check_seconds(invisibility_seconds: float | None, wait_seconds: float, lease_seconds_max: float) -> None:
    """Raises: ValueError."""
    lease_seconds_min = 1.0 if invisibility_seconds is None else invisibility_seconds
    if not 1 <= lease_seconds_min <= 43_200 or not 1 <= wait_seconds <= 30:
        raise ValueError("invisibility_seconds must be 1 to 43,200, wait_seconds 1 to 30")
    if lease_seconds_max < lease_seconds_min:
        raise ValueError("lease_seconds_max must be at least invisibility_seconds, and at least 1")


def _delays(initial: float | None, multiplier: float, seconds_max: float) -> RetryDelays | None:
    if initial is None:
        return None
    return RetryDelays(initial_seconds=initial, multiplier=multiplier, seconds_max=seconds_max)
