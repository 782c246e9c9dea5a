"""Keeps one connection to RabbitMQ alive for one purpose: connects, and reconnects after a loss.

``RabbitBroker`` has two connections. The reason is that RabbitMQ stops reading connections that publish when RabbitMQ
is low on memory or disk, but consuming and acking must continue. The connection "consume" carries the queues' channels
and the declarations of topics and groups. The connection "publish" carries messages and confirms, and the checks and
declarations that a publish needs. The locks of a proxy use a third connection, "locks".

If several nodes are configured, the first usable node in the configured order is chosen. After a loss, the other nodes
are tried at once, in the same order, starting after the lost node and wrapping around. If all of them fail, all nodes
are tried again in rounds, the lost node last, with a pause before each round. popgate does not fail back to a preferred
node, because each change of the node closes all channels of the connection.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from yarl import URL

from popgate.adapters.rabbitmq.channel_parser import CloseReason
from popgate.adapters.rabbitmq.guard import GUARD, GuardHeldError
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.rabbitmq.partition_detector import CHECK_SECONDS, PartitionDetector
from popgate.adapters.rabbitmq.session import Session
from popgate.adapters.rabbitmq.startup import address, check_urls, explain, explain_all, is_timeout
from popgate.domain.errors import BrokerUnavailable, PopgateError, StartupError
from popgate.runtime.histogram import Histogram

_log = logging.getLogger(__name__)


class Connection:
    """Keeps one connection to RabbitMQ alive.

    `prepare` is called with each new session, before callers can use the session. If `prepare` raises, the attempt to
    connect has failed. `on_blocked` is called with the reason when the broker has a memory or disk alarm, and with None
    when the alarm ends. `on_cut_off` is called with the URL of a node that this connection leaves because the node is
    cut off from the other nodes. If `on_cut_off` is None, the connection does not check whether its node is cut off.
    This check publishes messages, which a connection that consumes must not do.
    """

    def __init__(
        self,
        options: RabbitOptions,
        purpose: str,
        *,
        prepare: Callable[[Session], Awaitable[None]] | None = None,
        on_blocked: Callable[[str | None], None] = lambda _: None,
        on_cut_off: Callable[[URL], None] | None = None,
        chance: random.Random,
    ) -> None:
        self._options = options
        self._purpose = purpose
        self._prepare = prepare
        self._on_blocked = on_blocked
        self._on_cut_off = on_cut_off
        self._chance = chance
        self._urls: list[URL] = []
        self._url = URL()
        """The URL of the latest session."""
        self._session: Session | None = None
        self._reason = "popgate has not connected to RabbitMQ yet"
        self._keeper: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.call_seconds = Histogram()
        """How long the answered calls of all sessions took."""

    async def start(self) -> None:
        """Connect. Raises: StartupError, whose single line says what to check."""
        check_urls(self._options.amqp_urls)
        self._urls = [URL(url) for url in self._options.amqp_urls]
        self._session = await self._open_first()
        _log.info("connected to RabbitMQ", extra={"purpose": self._purpose, "address": address(self._url)})
        self._keeper = asyncio.create_task(self._keep(), name=f"popgate rabbitmq {self._purpose} connection")
        self._keeper.add_done_callback(self._note_keeper_end)
        if self._on_cut_off is not None and len(self._urls) > 1:
            self._watch = asyncio.create_task(
                self._watch_node(self._on_cut_off), name=f"popgate rabbitmq {self._purpose} partition detector"
            )

    async def stop(self) -> None:
        """Disconnect. Idempotent, and safe before `start`."""
        self._reason = "popgate is stopping"
        tasks = [task for task in (self._keeper, self._watch) if task is not None]
        self._keeper = self._watch = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def place(self) -> str:
        """The address of the latest session's node."""
        return address(self._url)

    def session(self) -> Session:
        """Return the live session. Raises: BrokerUnavailable while there is none."""
        session = self._session
        if session is None or session.interceptor.ended is not None:
            raise BrokerUnavailable(self._reason)
        return session

    def unavailable_reason(self) -> str | None:
        """Return why there is no live session, or None if there is one."""
        session = self._session
        return None if session is not None and session.interceptor.ended is None else self._reason

    def leave(self, url: URL) -> None:
        """If the connection leads to the node of ``url``, end it, so that it reconnects to another node."""
        session = self._session
        if session is not None and self._url == url:
            session.interceptor.end(CloseReason(0, f"RabbitMQ at {address(url)} is cut off from its other nodes"))
            session.interceptor.abort()

    async def _watch_node(self, on_cut_off: Callable[[URL], None]) -> None:
        detector = PartitionDetector(self._options)
        while True:
            await asyncio.sleep(CHECK_SECONDS * self._chance.uniform(0.8, 1.2))
            session, url = self._session, self._url
            if session is None or session.interceptor.ended is not None:
                continue
            if await detector.is_cut_off(session, self._others()) and session is self._session:
                self.leave(url)
                on_cut_off(url)

    def _others(self) -> list[URL]:
        """Return the URLs of the other nodes in order, starting after the present node and wrapping around."""
        at = self._urls.index(self._url)
        return [*self._urls[at + 1 :], *self._urls[:at]]

    async def _keep(self) -> None:
        while True:
            session = self._session
            assert session is not None
            await session.lost.wait()
            self._reason = session.end_reason
            _log.warning(
                "lost the connection to RabbitMQ",
                extra={"purpose": self._purpose, "address": address(self._url), "reason": session.end_reason},
            )
            # Closing the session of a hanging broker takes long, and must not delay the connection to another node.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.close(), name="popgate lost connection")
                self._session = await self._reopen()
                _log.info(
                    "connected to RabbitMQ again", extra={"purpose": self._purpose, "address": address(self._url)}
                )

    async def _open_first(self) -> Session:
        """Return a session with the first usable node.

        If no node is usable, make a second attempt with a longer timeout at each node that timed out.

        Raises: StartupError.
        """
        problems: dict[URL, str] = {}
        failure: Exception | None = None
        urls, seconds = self._urls, self._connect_seconds
        while urls:
            silent: list[URL] = []
            for url in urls:
                try:
                    return await self._open(url, seconds)
                except Exception as error:
                    # aiormq raises errors of five unrelated kinds here.
                    failure = error
                    problems[url] = self._explain(error, url, seconds)
                    if isinstance(error, GuardHeldError):  # all nodes report the same guard
                        raise StartupError(problems[url]) from error
                    if is_timeout(error) and seconds < self._options.connect_timeout_seconds:
                        silent.append(url)
            urls, seconds = silent, self._options.connect_timeout_seconds
        raise StartupError(explain_all(problems.values())) from failure

    async def _reopen(self) -> Session:
        """Return a new session after a loss. Try the other nodes first, and then all nodes, until an attempt succeeds.

        A growing and jittered pause precedes each round except the first, so that the proxies of a cluster do not
        reconnect at the same moment.
        """
        pause, seconds = self._options.reconnect_seconds_min, self._connect_seconds
        lost = self._url
        others = self._others()
        urls = others
        while True:
            problems: list[str] = []
            for url in urls:
                try:
                    return await self._open(url, seconds)
                except Exception as error:
                    # aiormq raises errors of five unrelated kinds here. After any of them, the next attempt may
                    # succeed.
                    problems.append(self._explain(error, url, seconds))
            if problems and (reason := explain_all(problems)) != self._reason:  # log a reason only once
                _log.warning("no connection to RabbitMQ yet", extra={"purpose": self._purpose, "reason": reason})
                self._reason = reason
            if urls is not others:
                seconds = min(seconds * 2, self._options.connect_timeout_seconds)
            await asyncio.sleep(pause * self._chance.uniform(0.5, 1.0))
            pause = min(pause * 2, self._options.reconnect_seconds_max)
            urls = [*others, lost]

    @property
    def _connect_seconds(self) -> float:
        """Timeout in seconds for the first attempt to connect to a node."""
        patience = self._options.connect_timeout_seconds
        return patience if len(self._urls) == 1 else min(patience, self._options.next_node_seconds)

    async def _open(self, url: URL, connect_seconds: float) -> Session:
        session = await Session.connect(
            self._options,
            url,
            self._purpose,
            connect_seconds=connect_seconds,
            on_blocked=self._on_blocked,
            call_seconds=self.call_seconds,
        )
        if self._prepare is not None:
            try:
                await self._prepare(session)
            except BaseException:
                await session.close()
                raise
        self._url = url
        self._reason = "the connection to RabbitMQ was lost"  # valid from the moment that the session ends
        return session

    def _explain(self, error: Exception, url: URL, connect_seconds: float) -> str:
        if isinstance(error, GuardHeldError):
            return (
                f"another popgate uses RabbitMQ at {address(url)}, virtual host {url.path.strip('/') or '/'!r} "
                f"(it holds the exchange {GUARD}), and the two share no state: stop it, use another virtual host, or "
                "give both the same --redis-url and --redis-namespace"
            )
        if isinstance(error, PopgateError):
            return error.detail
        return explain(error, url, connect_seconds)

    def _note_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._reason = f"internal error: the connection is no longer kept ({error})"
            _log.critical("stopped keeping the connection to RabbitMQ", exc_info=error)
