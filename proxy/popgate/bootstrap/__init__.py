"""Assembles a proxy from its parts, starts and stops the parts in order, and chooses the adapters.

On a signal, the proxy stops accepting clients, answers the pops that wait, and returns its buffered messages to the
broker. Then it stops the engine, and then the stores. A second signal ends the process immediately. Each step has a
time limit, after which its work is abandoned, as if the process was killed. No message is lost in this way, and neither
a client nor a broker that hangs can delay the exit.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn

from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.database import Database
from popgate.api.process_metrics import ProcessFigures, RoundTrip
from popgate.backup.hosted import HostedBackup
from popgate.bootstrap.access import AccessControl, access_control
from popgate.bootstrap.backup import hosted_backup
from popgate.bootstrap.banner import banner
from popgate.bootstrap.cluster import Membership, membership
from popgate.bootstrap.credential_warnings import warn_of_credentials
from popgate.bootstrap.descriptors import raise_limit, within
from popgate.bootstrap.endings import end_in_time, ending_on_signals, stop_in_time
from popgate.bootstrap.http import GRACE_SECONDS, http_server
from popgate.bootstrap.journal import combined, started_journal
from popgate.bootstrap.listening import is_open, listening_for_clients
from popgate.bootstrap.policies import watch_policies
from popgate.bootstrap.state import State, redis_state, sqlite_state
from popgate.bootstrap.tracing import locks_type, made_engine
from popgate.config import ServeOptions
from popgate.domain.errors import (
    BrokerUnavailable,
    Conflict,
    PopgateError,
    StartupError,
    StateUnavailable,
)
from popgate.domain.features import Feature
from popgate.domain.identity import IdentityKeys
from popgate.domain.names import InstanceId
from popgate.domain.topics import ConsumeMode
from popgate.engine.catalog.replica_groups import ServedReplicaGroups
from popgate.engine.context.engine_context import EngineContext, EngineOptions, make_context
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.journal.figures import JournalFigures
from popgate.locks.arbiter import Arbiter
from popgate.locks.embedded import EmbeddedArbiter
from popgate.locks.hosted import WAITING_MAX, HostedLocks
from popgate.locks.on_broker import BrokerArbiter
from popgate.ports.journal import Journal
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock
from popgate.runtime.data_folder import kept_secret, make_folder
from popgate.runtime.faults import Faults
from popgate.runtime.logs import configure_logging
from popgate.runtime.loop_lag import LoopLag
from popgate.runtime.memory import give_back_large_blocks

if TYPE_CHECKING:
    from popgate.adapters.rabbitmq.broker import RabbitBroker
    from popgate.bootstrap.workers import Worker
    from popgate.replicas.keeper import ReplicaKeeper

_log = logging.getLogger(__name__)

DATABASE_FILE = "popgate.db"
EMBEDDED = "embedded"
COLLECTOR_THRESHOLDS = (20_000, 20, 100)
"""Thresholds for ``gc.set_threshold``."""
GUARD_WAIT_HEARTBEATS = 3
"""RabbitMQ has closed a crashed host's connection after this many of the connection's heartbeat intervals."""
GUARD_WAIT_SECONDS_MAX = 15.0
LOCK_RENEWALS = 3
"""Number of times that a held lock is renewed at RabbitMQ within ``--consumer-timeout-seconds``."""
LOCKS_DIVISOR = 8
"""The maximum number of client connections, divided by this, is the maximum number of waits for locks."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The parts of a started proxy. ``access`` proves who callers are.

    ``process`` is measured for the metrics. ``journal_figures``, ``membership`` and ``replicas`` are None if no journal
    is written, if the proxy is not in a cluster, and if no replica keeper runs in this process, respectively.
    """

    access: AccessControl
    backup: HostedBackup
    engine: Engine
    locks: HostedLocks
    counters: EventCounters
    journal_figures: Callable[[], JournalFigures] | None
    membership: Membership | None
    replicas: "ReplicaKeeper | None"
    process: ProcessFigures


@contextlib.asynccontextmanager
async def started(
    options: ServeOptions, background: Background, faults: Faults, *, is_first: bool = True
) -> AsyncGenerator[Proxy, None]:
    """Start all parts of a proxy except the HTTP interface. At the exit of the context, stop them in reverse order.

    ``is_first``: the proxy runs alone, or is the first of several workers.

    Raises: StartupError; BrokerUnavailable or StateUnavailable if one of these becomes unavailable during the start.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        access = await stack.enter_async_context(access_control(options, background, records_keys=is_first))
        make_folder(options.data_dir)
        state, embedded = await _stores(options, clock, stack, background)
        own_secrets = options.secrets or (kept_secret(options.data_dir),)  # a cluster has configured secrets
        if is_first:
            warn_of_credentials(options, own_secrets)
        broker = embedded or _rabbit_broker(options, state.cluster, own_secrets)
        bound = await state.bound()
        if bound is not None and (bound == EMBEDDED) != (embedded is not None):
            raise StartupError(_why_not_bound(options, state.place, bound))
        stack.push_async_callback(stop_in_time, "broker", broker.stop)
        await broker.start()
        await _bind(options, state, broker, bound)
        instance, counters = secrets.token_hex(5), EventCounters(options.metrics_groups_max)
        written = await started_journal(options, instance, clock, stack)
        journal = combined(faults, counters, written)
        context = _made_context(options, state, broker, own_secrets, instance, journal, clock, background, faults)
        engine = made_engine(options, context, stack)
        locks = _locks(options, state, context, engine)
        place = None
        if state.claims is not None:
            place = await membership(options, state, state.claims, engine, context, locks, stack, background)
        for name, part in (("engine", engine), ("locks", locks)):
            stack.push_async_callback(stop_in_time, name, part.stop)
            try:
                await part.start()
            except PopgateError as error:
                raise StartupError(error.detail) from error
        if place is not None:
            await place.join()
        if options.amqp_urls and options.policy_check_seconds:
            watching = partial(watch_policies, options, rabbit_options(options).vhost, engine)
            background.keep(watching, name="watch policies")
        background.keep(partial(engine.backlogs.run, options.metrics_read_seconds), name="read the backlogs")
        replicas = await stack.enter_async_context(_keeper(options, engine))
        yield Proxy(
            access=access,
            backup=hosted_backup(options, state, clock, background),
            engine=engine,
            locks=locks,
            counters=counters,
            journal_figures=None if written is None else written.figures,
            membership=place,
            replicas=replicas,
            process=_process_figures(state, broker, background),
        )


def _process_figures(state: State, broker: "SqliteBroker | RabbitBroker", background: Background) -> ProcessFigures:
    """Return what is measured outside the engine, and start to measure it."""
    lag, round_trips = LoopLag(), dict(state.round_trips)
    background.keep(lag.run, name="measure the event loop")
    if not isinstance(broker, SqliteBroker):
        round_trips[RoundTrip("amqp", "publish")] = broker.confirm_seconds
        round_trips[RoundTrip("amqp", "call")] = broker.call_seconds
    return ProcessFigures(round_trips=round_trips, loop_lag=lag.seconds)


async def _stores(
    options: ServeOptions, clock: SystemClock, stack: contextlib.AsyncExitStack, background: Background
) -> tuple[State, SqliteBroker | None]:
    """Open the state, and the embedded broker if it is used. Raises: StartupError."""
    if options.redis_url is not None:
        return await redis_state(options, options.redis_url, stack, background), None
    database = Database(options.data_dir / DATABASE_FILE, clock)
    stack.push_async_callback(database.close)
    await database.open()
    return sqlite_state(options, database), None if options.amqp_urls else SqliteBroker(database)


@contextlib.asynccontextmanager
async def _keeper(options: ServeOptions, engine: Engine) -> "AsyncGenerator[ReplicaKeeper | None]":
    """Run a replica keeper in this process if the settings request it. Otherwise yield None."""
    if not options.replica_keeper:
        yield None
        return
    from popgate.bootstrap.replicas import at_work  # slow to load

    async with at_work(options, rabbit_options(options), ServedReplicaGroups(engine.topics)) as keeper:
        yield keeper


def _made_context(
    options: ServeOptions,
    state: State,
    broker: "SqliteBroker | RabbitBroker",
    own_secrets: Sequence[bytes],
    instance: str,
    journal: Journal,
    clock: SystemClock,
    background: Background,
    faults: Faults,
) -> EngineContext:
    return make_context(
        EngineOptions(
            instance=instance,
            secrets=own_secrets,
            auto_create=options.auto_create,
            auto_create_queues=options.auto_create_queues,
            buffer_bytes_max=options.buffer_bytes_max,
            idle_return_seconds=options.idle_return_seconds,
            dedup_seconds=options.dedup_seconds,
            lease_group_seconds_max=options.lease_group_seconds_max,
            first_mode=ConsumeMode.POP if Feature.POP in options.features else ConsumeMode.PULL,
            pull_session_seconds=options.pull_session_seconds,
            quotas=options.quotas,
            parked_pops_max=options.parked_pops_max,
            parked_pops_per_group_max=options.parked_pops_per_group_max,
        ),
        broker=broker,
        leases=state.leases,
        lease_groups=state.lease_groups,
        assignments=state.assignments,
        dedup=state.dedup,
        atomic=broker if isinstance(broker, SqliteBroker) else None,
        catalog=state.catalog,
        journal=journal,
        clock=clock,
        background=background,
        faults=faults,
    )


def rabbit_options(options: ServeOptions, cluster: str | None = None) -> RabbitOptions:
    return RabbitOptions(
        amqp_urls=options.amqp_urls,
        cluster=cluster,
        heartbeat_seconds=options.amqp_heartbeat_seconds,
        guard_wait_seconds=min(GUARD_WAIT_SECONDS_MAX, GUARD_WAIT_HEARTBEATS * options.amqp_heartbeat_seconds),
        confirm_timeout_seconds=options.confirm_timeout_seconds,
        consumer_timeout_seconds=options.consumer_timeout_seconds,
    )


def _rabbit_broker(options: ServeOptions, cluster: str, own_secrets: Sequence[bytes]) -> "RabbitBroker":
    # Slow to load, and the embedded broker does not need it.
    from popgate.adapters.rabbitmq.broker import RabbitBroker

    keys = IdentityKeys(own_secrets, accepts_untagged=options.accept_untagged)
    return RabbitBroker(rabbit_options(options, cluster), keys)


def _locks(options: ServeOptions, state: State, context: EngineContext, engine: Engine) -> HostedLocks:
    background = Background()
    arbiter: Arbiter
    if not options.amqp_urls:
        arbiter = EmbeddedArbiter(state.locks, context.clock, background)
    else:
        from popgate.adapters.rabbitmq.lock_connection import RabbitLockConnection

        connection = RabbitLockConnection(rabbit_options(options))
        renew_seconds = options.consumer_timeout_seconds / LOCK_RENEWALS
        arbiter = BrokerArbiter(connection, context.clock, background, renew_seconds)

    async def announce() -> None:
        await context.router.announce(list)

    return locks_type(options, engine)(
        arbiter,
        state.locks,
        context.clock,
        background,
        instance=InstanceId(context.instance),
        auto_create=options.auto_create,
        locks_max=options.locks_max,
        announce=None if state.claims is None else announce,
        waiting_max=min(WAITING_MAX, max(1, options.connections_max // LOCKS_DIVISOR)),
    )


async def _bind(options: ServeOptions, state: State, broker: "SqliteBroker | RabbitBroker", bound: str | None) -> None:
    """Bind the stored state to this broker. Raises: StartupError if the state is already bound to another broker."""
    if isinstance(broker, SqliteBroker):
        await state.bind(EMBEDDED)
        return
    try:
        if bound is None:
            mark = secrets.token_hex(8)
            await broker.leave_mark(mark)  # before ``bind``: if the process crashes now, an unused mark does no harm
            await state.bind(mark)
            bound = await state.bound()  # another proxy may have bound the state at the same time
        if bound is None or not await broker.has_mark(bound):
            raise StartupError(_why_not_bound(options, state.place, bound))
    except (BrokerUnavailable, StateUnavailable, Conflict) as error:
        raise StartupError(error.detail) from error


def _why_not_bound(options: ServeOptions, place: str, bound: str | None) -> str:
    if options.redis_url is not None:
        return (
            f"{place} holds the records of another RabbitMQ or virtual host: this one has no mark {bound}; choose "
            "another --redis-namespace, or delete the keys of this one if RabbitMQ was emptied on purpose"
        )
    if bound == EMBEDDED:
        return (
            f"{options.data_dir} holds the messages of an embedded popgate; choose another --data-dir for use with "
            "--amqp-url"
        )
    if not options.amqp_urls:
        return f"{options.data_dir} holds the records of a popgate on RabbitMQ; give --amqp-url or another --data-dir"
    return (
        f"{options.data_dir} holds the records of another RabbitMQ or virtual host: this one has no mark {bound}; "
        "choose another --data-dir, or delete this one if RabbitMQ was emptied on purpose"
    )


async def serve(options: ServeOptions, worker: "Worker | None" = None) -> int:
    """Run a proxy until it is stopped, alone or as one of several workers. Return the exit code."""
    configure_logging(options.log_level, worker=None if worker is None else worker.number, form=options.log_format)
    give_back_large_blocks()
    # If RabbitMQ can't be reached, the adapter logs the reason in one line. aiormq would log the reason again.
    logging.getLogger("aiormq.connection").setLevel(logging.CRITICAL)
    options, peers_max = within(options, raise_limit())
    failures: list[BaseException] = []
    faults = Faults()
    stop = asyncio.Event()

    def failed(error: BaseException) -> None:
        """Count the error. If it is not an ``Exception``, stop the proxy."""
        if isinstance(error, Exception):
            faults.task_failed()
        else:
            failures.append(error)
            stop.set()

    def failed_callback(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        faults.task_failed()
        loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(failed_callback)

    listening = listening_for_clients(options) if worker is None else worker.listening(stop)
    with ending_on_signals(stop), listening as listener:
        is_insecure = is_open(listener, options)
        if is_insecure:
            _log.error("--insecure: other machines can reach this proxy without authentication or without TLS")
        async with contextlib.AsyncExitStack() as stack:
            background, is_first = Background(failed), worker is None or worker.number == 1
            starting = started(options, background, faults, is_first=is_first)
            try:
                proxy = await _unless(stop, stack.enter_async_context(starting))
            except StartupError:
                raise
            except PopgateError as error:  # the broker or the store became unavailable during the start
                raise StartupError(error.detail) from error
            if proxy is not None:
                server = http_server(proxy, options, peers_max, background, is_insecure=is_insecure)
                running = asyncio.create_task(server.serve(), name="http server")
                _collect_rarely()
                acceptor = server.acceptor(listener, None if worker is None else worker.turns)
                if worker is None:
                    acceptor.open()
                    print(banner(options), flush=True)
                else:
                    worker.serves(acceptor, stop)
                stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
                await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if failures or running.done():  # without a signal, the exit has no time limit yet
                    end_in_time(stop, code=1)
                acceptor.close()
                failures += await _wind_down(proxy, server, running)
    return 1 if failures else 0


def _collect_rarely() -> None:
    """Exclude the objects that exist now from garbage collection, and run the garbage collector less often.

    popgate creates few reference cycles and many messages. With Python's default thresholds, the collector would often
    scan all messages, and the longest scans would delay every pop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    gc.enable()  # the collector was off while modules were loaded


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``. If ``stop`` is set first, cancel ``work``, wait for its end, and return None."""
    working = asyncio.create_task(work, name="start")
    stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
    return None if working.cancelled() else working.result()


async def _wind_down(proxy: Proxy, server: uvicorn.Server, running: asyncio.Task[None]) -> list[BaseException]:
    """Drain the engine, and let running requests end within a time limit. Return errors of the engine and server."""
    # Until the exit, uvicorn would only log tracebacks of the requests that it cancels.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    proxy.locks.drain()
    draining = asyncio.create_task(proxy.engine.drain(), name="drain")
    server.should_exit = True
    await asyncio.wait({draining}, timeout=GRACE_SECONDS)
    await asyncio.wait({running})  # uvicorn has the same time limit
    if not draining.done():
        _log.warning("gave up waiting", extra={"part": "drain"})
        draining.cancel()
    errors = [error for task in (draining, running) if task.done() and (error := task.exception()) is not None]
    for error in errors:
        _log.error("an error occurred during shutdown", exc_info=error)
    return errors
