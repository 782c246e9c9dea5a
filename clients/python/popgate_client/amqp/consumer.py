"""A consumer directly on RabbitMQ: it shares the queues of a group with others of its kind, without a proxy.

Owns the life of one run: its successive sessions, the stop and its signals. `balancing` decides which program consumes
which queue; `place` handles the messages.
"""

import asyncio
import contextlib
import os
import random
import re
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from yarl import URL

from popgate_client.amqp.balancing import Balancer
from popgate_client.amqp.group import Group, find_group
from popgate_client.amqp.management import Management
from popgate_client.amqp.session import Session
from popgate_client.amqp.working import Traces, Work
from popgate_client.calling import Handler, HandlerCalls, prepared
from popgate_client.counters import Counters
from popgate_client.errors import BrokerUnavailable, RequestInvalid
from popgate_client.facts import FactLogger
from popgate_client.handling import RetryDelays
from popgate_client.publishing import Deserializer
from popgate_client.retrying import Backoff
from popgate_client.signals import signals_to

logger = FactLogger(__name__)

URL_VARIABLE = "POPGATE_AMQP_URL"
URL_DEFAULT = "amqp://guest:guest@127.0.0.1:5672/"
PREFETCH_MAX = 65_535
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpState:
    """The state of an `AmqpConsumer`.

    `queues` gives this program's state for each queue of the group: "active" (RabbitMQ delivers to it), "waiting" (in
    line), "leaving", or "absent". `members` are the known programs that share the queues, including this one
    (`client_id`); `learns_from` is the source of this: "management" or "presence". `released_count` counts the queues
    that were released to others for the balance. `problems` says by queue why it is not used.
    """

    client_id: str
    connected: bool = False
    queues: Mapping[str, str]
    members: Sequence[str] = ()
    learns_from: str | None = None
    released_count: int = 0
    problems: Mapping[str, str]


class AmqpConsumer:
    """Runs `handler(message)` for every message of a group, directly from RabbitMQ. One object is one run.

    handler: if it returns, the message is acked. If it raises `Reject`, the message goes to the group's dead letters.
        After any other exception it is tried again, after the delay of a `Retry`, or a growing delay. A handler may see
        a message twice, because delivery is at-least-once.
    amqp_url: RabbitMQ's URL, or those of several nodes of one cluster, separated by commas. None: POPGATE_AMQP_URL, or
        amqp://guest:guest@127.0.0.1:5672/ if that is not set.
    management_url: RabbitMQ's management interface with credentials, http://user:password@host:15672. Without it, or
        if it rejects the user, the programs tell each other over RabbitMQ which queues they consume.
    queues: the names of an adopted topic's queues. None: popgate's queues, found by their names.
    client_id: the name of this program in logs and in RabbitMQ's management interface; a random part is added.
    concurrency: maximum number of handlers that run at once.
    keep_order: handle one message of each queue at a time; a message that fails blocks those behind it. False: up to
        `concurrency` messages of a queue at once.
    prefetch_count: the prefetch of a queue: how many unacknowledged messages RabbitMQ sends.
    max_deliveries: a message that has failed this often goes to the dead letters. None: no limit.
    drain_seconds: how long a stop waits for running handlers.
    retry_initial_seconds, retry_multiplier, retry_delay_seconds_max, deserializer: as for `Consumer`.
    error_texts: write the text of a failed handler's exception into the dead letter, and not only its type.
    tracing: `popgate_client.tracing.Tracing()` handles and settles each message in a span. None: nothing is traced.

    Messages are those of `Consumer`, but they have no leases: `invisible_until` is infinite, and `lease_lost` is set
    when RabbitMQ may deliver the message to another consumer. `counters` and `state()` report what happens.
    Raises: ValueError for invalid options, TypeError for a handler that is not a function.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        amqp_url: str | None = None,
        management_url: str | None = None,
        queues: Sequence[str] | None = None,
        client_id: str | None = None,
        concurrency: int = 8,
        keep_order: bool = True,
        prefetch_count: int = 32,
        max_deliveries: int | None = None,
        drain_seconds: float = 20.0,
        retry_initial_seconds: float = 1.0,
        retry_multiplier: float = 2.0,
        retry_delay_seconds_max: float = 300.0,
        error_texts: bool = True,
        tracing: Traces | None = None,
        deserializer: Deserializer | None = None,
    ) -> None:
        handler = prepared(handler, deserializer)
        handler = handler if tracing is None else tracing.processed(handler)
        _check(concurrency, drain_seconds, prefetch_count, max_deliveries, queues)
        name = client_id or f"{re.sub('[^A-Za-z0-9._-]', '-', socket.gethostname())[:40]}:{os.getpid()}"
        if not _CLIENT_ID.fullmatch(name):
            raise ValueError("client_id must be 1 to 64 letters, digits and ._:-")
        self.counters = Counters()
        self._name = name
        self._client_id = f"{name}.{secrets.token_hex(3)}"
        self._topic = topic
        self._group = group
        self._queues = queues
        self._urls = _amqp_urls(amqp_url or os.environ.get(URL_VARIABLE) or URL_DEFAULT)
        self._management_url = management_url
        self._drain_seconds = drain_seconds
        self._chance = random.Random()
        self._calls = HandlerCalls(handler, concurrency=concurrency)
        self._work = Work(
            calls=self._calls,
            slots=asyncio.Semaphore(concurrency),
            workers=1 if keep_order else concurrency,
            prefetch_count=prefetch_count,
            delays=RetryDelays(
                initial_seconds=retry_initial_seconds, multiplier=retry_multiplier, seconds_max=retry_delay_seconds_max
            ),
            max_deliveries=max_deliveries,
            counters=self.counters,
            error_texts=error_texts,
            tracing=tracing,
        )
        self._balancer: Balancer | None = None
        self._released_before = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[object] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that leave the places of lost sessions; their handlers may still run."""
        self._stop = asyncio.Event()
        self._stopping = self._stopping_now = False

    def run(self) -> None:
        """Consume until SIGTERM or SIGINT, then drain and return; a second signal stops at once.

        Call it in the main thread, with no event loop running; in another thread it leaves the signals alone.
        Raises: what `run_async` raises.
        """
        asyncio.run(self._run_with_signals())

    async def run_async(self) -> None:
        """Consume until `stop()`, then drain and return.

        The consumer keeps trying through lost connections and restarts of RabbitMQ.
        Raises: TopicNotFound, GroupNotFound if popgate has not created them; Conflict for queues that programs can't
            share, with the remedy; Unauthorized if RabbitMQ rejects the user; RuntimeError for a second run.
        """
        if self._loop is not None:
            raise RuntimeError("an AmqpConsumer can run only once; create a new one")
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        if self._stopping:
            self._stop.set()
        try:
            await self._run_sessions()
            if self._ending:
                await asyncio.wait(self._ending, timeout=self._drain_seconds)
        except asyncio.CancelledError:
            if not self._stopping_now or self._main is None:
                raise
            self._main.uncancel()
        finally:
            for ending in self._ending:
                ending.cancel()
            self._calls.close()

    def stop(self) -> None:
        """Start draining; may be called from any thread, also before the run, and again."""
        self._stopping = True
        self._in_loop(self._stop.set)

    def stop_now(self) -> None:
        """Stop at once: RabbitMQ redelivers unacknowledged messages. May be called from any thread, and again."""
        self._stopping = self._stopping_now = True
        self._in_loop(self._cancel)

    def state(self) -> AmqpState:
        """Return the current state; may be called from any thread."""
        balancer = self._balancer
        if balancer is None:
            return AmqpState(client_id=self._client_id, queues={}, problems={}, released_count=self._released_before)
        places = dict(balancer.places)
        queues = {queue: places[queue].standing if queue in places else "absent" for queue in balancer.group.queues}
        return AmqpState(
            client_id=self._client_id,
            connected=balancer.is_connected,
            queues=queues,
            members=balancer.members,
            learns_from=balancer.source,
            released_count=self._released_before + balancer.released_count,
            problems=dict(balancer.problems),
        )

    # ------------------------------------------------------------ one session after the other

    async def _run_sessions(self) -> None:
        backoff = Backoff(self._chance)
        is_known = False
        settled_before = 0
        for attempt in count():
            if self._stop.is_set():
                return
            url = self._urls[attempt % len(self._urls)]
            try:
                session = await Session.connect(url, f"popgate pull {self._client_id}")
                try:
                    group = await find_group(session, self._topic, self._group, self._queues)
                    is_known = True
                    await self._share(session, group, url)
                finally:
                    await session.close()
                    # Only work is a success: each lost connection counts as a delivery of all prefetched messages.
                    if (settled := self.counters.acked + self.counters.rejected) > settled_before:
                        settled_before = settled
                        backoff.reset()
                if not self._stop.is_set():
                    logger.warning("the connection to RabbitMQ was lost", extra={"cause": session.reason})
            except (BrokerUnavailable, RequestInvalid) as error:
                if isinstance(error, RequestInvalid) and not is_known:
                    raise
                logger.warning("RabbitMQ can't be consumed now", extra={"cause": str(error)})
            await self._until_stopped(asyncio.sleep(backoff.next_seconds()))

    async def _share(self, session: Session, group: Group, url: URL) -> None:
        management = None
        if self._management_url is not None:
            management = Management(self._management_url, url.path[1:].replace("%2F", "/") or "/")
        # Each session has a new name, because RabbitMQ may still know the previous one.
        self._client_id = f"{self._name}.{secrets.token_hex(3)}"
        balancer = Balancer(session, group, self._client_id, self._work, management, self._chance)
        self._balancer = balancer
        try:
            await self._until_stopped(balancer.run())
            if not session.lost.is_set():
                await balancer.leave(self._drain_seconds)
        finally:
            self._released_before += balancer.released_count
            self._balancer = None
            self._ending |= {place.leave_soon() for place in balancer.places.values()}
            if management is not None:
                await management.close()

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` until it ends or the consumer stops."""
        working = asyncio.create_task(work, name="popgate amqp consumer")
        stopping = asyncio.create_task(self._stop.wait(), name="popgate amqp stop")
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            working.cancel()
        await asyncio.wait([working])
        if not working.cancelled():
            working.result()

    async def _run_with_signals(self) -> None:
        def on_signal() -> None:
            if self._stopping:
                self.stop_now()
            else:
                self.stop()

        with signals_to(on_signal):
            await self.run_async()

    def _cancel(self) -> None:
        if self._main is not None and not self._main.done():
            self._main.cancel()

    def _in_loop(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(function)


def _check(
    concurrency: int,
    drain_seconds: float,
    prefetch_count: int,
    max_deliveries: int | None,
    queues: Sequence[str] | None,
) -> None:
    """Raises: ValueError for options of a consumer that are out of range."""
    if concurrency < 1 or drain_seconds < 0 or not 1 <= prefetch_count <= PREFETCH_MAX:
        raise ValueError("concurrency must be at least 1, drain_seconds at least 0, prefetch_count 1 to 65,535")
    if max_deliveries is not None and max_deliveries < 1:
        raise ValueError("max_deliveries must be at least 1, or None")
    if queues is not None and not queues:
        raise ValueError("queues must name at least one queue, or be None")


def _amqp_urls(text: str) -> list[URL]:
    """Raises: RequestInvalid."""
    urls: list[URL] = []
    for part in text.split(","):
        try:
            url = URL(part.strip())
        except ValueError:
            url = URL()
        if url.scheme not in ("amqp", "amqps") or not url.host:
            # A part without "@" may be the beginning of a password that contains a comma.
            shown = part.rpartition("@")[2] if "@" in part or "@" not in text else f"part {len(urls) + 1}"
            raise RequestInvalid("invalid_request", f"amqp_url: {shown!r} is not an amqp:// URL")
        urls.append(url)
    return urls
