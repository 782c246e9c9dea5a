"""Runs one proof. For each kind of lock, the proof consists of rounds, in which faults are injected into the workers.
After each round, the slots are counted, and the whole history is checked."""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from popgate.domain.errors import PopgateError, StartupError
from popgate.domain.lock_history import FREED_SECONDS, check
from popgate.domain.locks import LockKind
from popgate.prover.crew import Crew
from popgate.prover.errors import ProverFailed
from popgate.prover.fork_server import ForkServer
from popgate.prover.nemesis import Fault, Nemesis
from popgate.prover.nodes import Nodes
from popgate.prover.record import Record
from popgate.prover.report import Cost, KindReport, Report
from popgate.prover.target import load
from popgate.prover.worker import WorkerSettings

ROUND_SECONDS, ROUND_SECONDS_MAX = 4.0, 30.0
"""Duration in seconds of the first round, and of the longest round. Each round is twice as long as the previous one,
because serious faults show in a short round."""
ROUND_SECONDS_MIN = 1.0
HEARTBEAT_SECONDS = 2.0
STALL_SECONDS = 1.0
"""Seconds that a client over HTTP may be paused without a report, which are much less than a lock's time to live. For
clients over AMQP, the heartbeat interval is the limit."""
MEASURE_SECONDS_MAX = 120.0
ADMIN_SECONDS_MAX = 60.0
ADMIN_ATTEMPTS_MAX = 10
ADMIN_AGAIN_SECONDS = 1.0
REMOVE_SECONDS_MAX = 20.0
TELL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveOptions:
    """The options of a proof.

    ``urls`` contains one URL for each node of the broker or, if ``over_http``, for each proxy. ``duration_seconds`` is
    divided equally among ``kinds``. ``slots`` applies to semaphores only.
    """

    implementation: str
    urls: Sequence[str] = field(repr=False)
    kinds: Sequence[LockKind]
    seed: int
    duration_seconds: float
    slots: int
    workers: int
    faults: frozenset[Fault]
    over_http: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressListener:
    """Functions that are called during a proof. ``counted`` is called every half second with the number of completed
    operations. ``round_ended`` is called after each round with the report so far."""

    counted: Callable[[int], None]
    round_ended: Callable[[KindReport], None]


async def prove(
    options: ProveOptions, nodes: Nodes | None, listener: ProgressListener, stopping: asyncio.Event
) -> Report:
    """Run the proof and return the report. If ``stopping`` is set, the proof ends early, and the report covers the time
    until then.

    Raises: StartupError for invalid options; BrokerMissing; ProverFailed if the implementation fails without faults, or
    if a node does not restart.
    """
    report = Report(implementation=options.implementation, seed=options.seed)
    async with ForkServer() as fork_server:
        load(options.implementation)
        urls = client_urls(options.urls, over_http=options.over_http)
        for kind in options.kinds:
            if stopping.is_set():
                break
            proof = _Proof(options, urls, kind, fork_server, nodes, listener, stopping)
            report.kinds.append(proof.report)
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(proof.tell(), name="tell how it goes")
                try:
                    failure = await proof.run()
                finally:
                    telling.cancel()
            if failure is not None:
                raise failure
            if proof.report.violations:
                break
    report.was_interrupted = stopping.is_set()
    return report


def client_urls(urls: Sequence[str], *, over_http: bool) -> list[str]:
    """Return the entries of URLs for the clients, the preferred entry first. Raises: StartupError.

    Each entry is one node of the broker or, if ``over_http``, all proxies. In each entry, another proxy comes first, so
    that the clients start with different proxies.
    """
    if not over_http:
        return [broker_url(url) for url in urls]
    proxies = [proxy_url(url) for url in urls]
    return [",".join([*proxies[at:], *proxies[:at]]) for at in range(len(proxies))]


def broker_url(url: str) -> str:
    """Return the URL with a short heartbeat interval, unless it contains one, so that the broker closes the connection
    of a paused client.

    Raises: StartupError.
    """
    if not _has_address(url, "amqp"):
        raise StartupError("--amqp-url: must be amqp://user:password@host:port/; TLS is not supported")
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    query.setdefault("heartbeat", [f"{HEARTBEAT_SECONDS:g}"])
    return urlunsplit(parts._replace(query=urlencode(query, doseq=True), path=parts.path or "/"))


def proxy_url(url: str) -> str:
    """Check the URL of a proxy, and return it. Raises: StartupError."""
    if not _has_address(url, "http") or "," in url or "@" in url:
        raise StartupError(
            "--http-url: must be http://host:port of one proxy, without a password; TLS is not supported"
        )
    return url


def _has_address(url: str, scheme: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme == scheme and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is invalid
        return False


def _heartbeat_seconds(url: str) -> float:
    try:
        return float(parse_qs(urlsplit(url).query)["heartbeat"][0])
    except ValueError:
        return HEARTBEAT_SECONDS


class _Proof:
    """The proof of one kind of lock."""

    def __init__(
        self,
        options: ProveOptions,
        urls: Sequence[str],
        kind: LockKind,
        fork_server: ForkServer,
        nodes: Nodes | None,
        listener: ProgressListener,
        stopping: asyncio.Event,
    ) -> None:
        self._options = options
        self._urls = urls
        self._kind = kind
        self._listener = listener
        self._stopping = stopping
        self._slots = options.slots if kind is LockKind.SEMAPHORE else 1
        self._lock = f"prove-{secrets.token_hex(4)}"
        self._stall_seconds = STALL_SECONDS if options.over_http else _heartbeat_seconds(urls[0])
        self._record = Record()
        chance = random.Random(f"{options.seed} {kind}")
        self._crew = Crew(
            size=options.workers, made=self._settings, record=self._record, fork_server=fork_server, chance=chance
        )
        self._nemesis = Nemesis(
            self._crew,
            kind=kind,
            slots=self._slots,
            faults=options.faults,
            stall_seconds=self._stall_seconds,
            nodes=nodes,
            chance=chance,
        )
        self.report = KindReport(kind=kind, slots=self._slots, started=time.monotonic())

    async def run(self) -> PopgateError | None:
        """Run the proof. Return the error instead of raising it, because a task group would wrap the error."""
        try:
            await self._prepare()
            await self._rounds()
            with contextlib.suppress(TimeoutError):
                await self._crew.administer("remove", REMOVE_SECONDS_MAX)
        except PopgateError as error:
            return error
        except ExceptionGroup as group:
            for failure in group.exceptions:
                if isinstance(failure, PopgateError):
                    return failure
            raise
        finally:
            await self._crew.end()
        return None

    async def tell(self) -> None:
        while True:
            self._listener.counted(self._record.count)
            await asyncio.sleep(TELL_SECONDS)

    async def _prepare(self) -> None:
        await self._crew.start()
        await self._set_slots()
        try:
            measured = await self._crew.administer("measure", MEASURE_SECONDS_MAX)
        except TimeoutError as error:
            raise ProverFailed(
                "an operation got no answer, although there were no faults and no other clients"
            ) from error
        except ProverFailed as error:
            raise ProverFailed(f"before any fault: {error.detail}") from error
        self.report.costs = {action: Cost.of(calls) for action, calls in measured["costs"].items()}

    async def _rounds(self) -> None:
        report = self.report
        report.started = started = time.monotonic()
        seconds = self._options.duration_seconds / len(self._options.kinds)
        left, length = seconds, ROUND_SECONDS
        while left > 0 and not report.violations and not self._stopping.is_set():
            await self._round(left if left < length + ROUND_SECONDS_MIN else length)
            left, length = seconds - (time.monotonic() - started), min(2 * length, ROUND_SECONDS_MAX)
            report.is_whole = bool(report.violations) or left <= 0
            self._listener.round_ended(report)

    async def _round(self, seconds: float) -> None:
        report = self.report
        self._crew.work()
        await self._nemesis.disturb(seconds, self._stopping)
        await self._crew.rest()
        if self._record.slots_set() not in (None, self._slots):
            await self._set_slots()  # only if changed: setting the slots again would restore lost slots
        with contextlib.suppress(TimeoutError):  # in the history, the count then has no answer
            await self._crew.administer("count_held", ADMIN_SECONDS_MAX, patience_seconds=FREED_SECONDS)
            await self._administer("count_free")
        record = self._record
        operations = record.operations()
        report.seconds = time.monotonic() - report.started
        report.rounds += 1
        report.operations = record.outcomes()
        report.faults = dict(record.faults)
        report.errors = dict(record.errors)
        report.wait_seconds_max = max(record.waits(), default=0.0)
        report.violations = await asyncio.to_thread(check, operations, record.disturbances, slots=self._slots)

    async def _set_slots(self) -> None:
        """Set the configured number of slots, at the start and after a round that changed the number. Raises:
        ProverFailed."""
        if self._kind is LockKind.MUTEX:
            return
        try:
            error = await self._administer("set_slots")
        except TimeoutError as late:
            raise ProverFailed(f"the slots could not be set within {ADMIN_SECONDS_MAX:g} s") from late
        if error:
            raise ProverFailed(f"the slots could not be set: {error}")

    async def _administer(self, do: str) -> str:
        """Let the administrator carry out ``do`` with the configured number of slots. Retry if it fails, because a node
        may be restarting.

        Return the error of the last attempt, or an empty text if it succeeded. Raises: TimeoutError.
        """
        error = ""
        for attempt in range(ADMIN_ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(ADMIN_AGAIN_SECONDS)
            error = (await self._crew.administer(do, ADMIN_SECONDS_MAX, number=self._slots))["error"]
            if not error:
                break
        return error

    def _settings(self, name: str, place: int, seed: int) -> WorkerSettings:
        at = place % len(self._urls)
        return WorkerSettings(
            implementation=self._options.implementation,
            urls=[*self._urls[at:], *self._urls[:at]],
            lock=self._lock,
            kind=self._kind,
            client=name,
            seed=seed,
            stall_seconds=self._stall_seconds,
        )
