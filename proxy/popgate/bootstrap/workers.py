"""``popgate serve --workers N``: one parent, and N processes that are members of one cluster behind one port.

Theory of operation. The parent binds the port, loads the code and forks. It serves no requests, runs no event loop and
no thread, and holds no connection, so it can fork again when a worker has died. Each worker is a whole proxy. No client
is accepted until every worker serves; if a worker can't start before that, all of them are stopped.

    worker: starting --reports that it serves--> serving --ends for any reason--> pausing --pause is over--> starting
    parent: opening --all serve--> open --SIGINT, SIGTERM--> stopping --all have ended--> gone
              |--one ends------------------------------------^
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn, Self

from popgate import bootstrap
from popgate.bootstrap.acceptor import ClientCounts
from popgate.bootstrap.banner import banner
from popgate.bootstrap.endings import EXIT_SECONDS
from popgate.bootstrap.listening import listening_for_clients
from popgate.bootstrap.worker_front import COME_IN, FAILED, SAID_BYTES_MAX, SERVES, WorkerFront
from popgate.config import ServeOptions
from popgate.config.values import HostPort
from popgate.domain.errors import StartupError
from popgate.runtime.logs import configure_logging

_log = logging.getLogger(__name__)

KILL_SECONDS = EXIT_SECONDS + 0.1
"""Seconds after a signal at which a worker that has not ended by itself is killed."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.2, 10.0
"""Seconds before a worker that has ended is started again: after its first quick end, and at most."""
SETTLED_SECONDS = 60.0
"""Seconds that a worker must live for its end not to count as a quick one."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
HANDLED = (*STOPPING, signal.SIGCHLD)
LOADED_LATE = ("popgate.adapters.rabbitmq.broker", "popgate.adapters.rabbitmq.lock_connection", "redis.asyncio")
"""Modules that a proxy on RabbitMQ and Redis loads on demand; the parent loads them so that the workers share them."""


def pause_seconds(quick_ends: int, chance: random.Random) -> float:
    """Return the pause before the next start, after ``quick_ends`` ends in a row that came soon after a start."""
    longest = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2.0 ** min(quick_ends, 16))
    return longest * chance.uniform(0.5, 1.0)


def supervise(options: ServeOptions) -> int:
    """Run ``options.workers`` proxies until SIGINT or SIGTERM; return the exit code. Raises: StartupError."""
    configure_logging(options.log_level)
    with listening_for_clients(options) as listener, _Signals() as signals:
        for module in LOADED_LATE:
            importlib.import_module(module)
        gc.freeze()  # keeps a worker's collector from writing to the shared pages
        gc.enable()
        return _Parent(options, listener, signals).run()


class _Signals:
    """Records signals, and makes the socket ``wakes`` readable when one arrives. A context manager."""

    def __init__(self) -> None:
        self.noted: deque[int] = deque()
        self.wakes, self._wake = socket.socketpair()
        for end in (self.wakes, self._wake):
            end.setblocking(False)

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._note) for number in HANDLED}
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()
        for number, former in self._former.items():
            signal.signal(number, former)

    def forget(self) -> None:
        """Drop the parent's handlers in a forked child."""
        signal.set_wakeup_fd(-1)
        self.wakes.close()
        self._wake.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)

    @contextlib.contextmanager
    def held_back(self) -> Generator[None]:
        """Block the signals within this context."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


@dataclass(slots=True)
class _Worker:
    """One worker's place. ``pid`` is None while no process runs there; ``due`` (monotonic) is when the next one
    starts."""

    number: int
    due: float = 0.0
    pid: int | None = None
    channel: socket.socket | None = None
    said: bytes = b""
    is_open: bool = False
    """Whether the worker was told to accept clients."""
    began: float = 0.0
    quick_ends: int = 0

    @property
    def serves(self) -> bool:
        return self.pid is not None and self.said == SERVES


class _Parent:
    """Starts the workers, restarts those that end, and stops them all."""

    def __init__(self, options: ServeOptions, listener: socket.socket, signals: _Signals) -> None:
        self._options = options
        self._listener = listener
        self._signals = signals
        self._client_counts = ClientCounts(options.workers)
        self._workers: Sequence[_Worker] = [_Worker(number) for number in range(options.workers)]
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wakes, selectors.EVENT_READ)
        self._chance = random.Random()
        self._is_open = False
        self._why_not: str | None = None
        self._kill_at: float | None = None
        """Monotonic time at which remaining workers are killed; None until all are told to stop."""
        self._code = 0

    def run(self) -> int:
        """Supervise the workers until they have ended; return the exit code. Raises: StartupError."""
        while True:
            while self._signals.noted:
                number = self._signals.noted.popleft()
                if number in STOPPING and self._kill_at is not None:
                    self._end_at_once()
                    return 128 + number
                if number in STOPPING:
                    self._end_all()
            self._reap()
            if self._kill_at is None:
                self._start_those_due()
            elif not self._living():
                break
            elif time.monotonic() >= self._kill_at:
                _log.warning("gave up waiting", extra={"workers": [one.number + 1 for one in self._living()]})
                self._end_at_once()
            self._wait()
        if self._why_not is not None:
            raise StartupError(self._why_not)
        return self._code

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.pid is not None]

    # -- events -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until something happens or is due."""
        times = [self._kill_at] if self._kill_at is not None else [one.due for one in self._workers if one.pid is None]
        seconds = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._signals.wakes.recv(SAID_BYTES_MAX)
            else:
                self._hear(key.data)

    def _hear(self, worker: _Worker) -> None:
        """Read what the worker reports; close its channel when the worker has ended."""
        channel = worker.channel
        if channel is None:
            return
        try:
            while said := channel.recv(SAID_BYTES_MAX):
                worker.said += said
        except BlockingIOError:
            self._let_in()
            return
        except OSError as error:
            _log.debug("lost the connection to a worker", extra={"why": error.strerror})
        self._selector.unregister(channel)
        channel.close()
        worker.channel = None

    def _let_in(self) -> None:
        """Tell the workers that serve to accept clients; the first time, once all of them serve."""
        if self._kill_at is not None or not (self._is_open or all(worker.serves for worker in self._workers)):
            return
        for worker in self._workers:
            if worker.serves and worker.channel is not None and not worker.is_open:
                worker.is_open = True
                with contextlib.suppress(OSError):  # it has just ended
                    worker.channel.send(COME_IN)
        if not self._is_open:
            self._is_open = True
            print(banner(self._options), flush=True)

    def _reap(self) -> None:
        for worker in self._living():
            assert worker.pid is not None
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                self._hear(worker)
                self._client_counts.leave(worker.number)
                worker.pid = None
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: _Worker, code: int) -> None:
        if worker.said.startswith(FAILED):
            self._not_there(worker, worker.said.removeprefix(FAILED).decode(errors="replace"))
            return
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self._not_there(worker, how if self._is_open else f"worker {worker.number + 1} ended before it served: {how}")
        if self._kill_at is not None and worker.is_open and code > 0:
            self._code = 1

    def _not_there(self, worker: _Worker, why: str) -> None:
        """Schedule a restart, do nothing if all are being stopped, or stop all if not all workers could start."""
        if self._kill_at is not None:
            return
        if not self._is_open:
            self._why_not = why
            self._end_all()
            return
        now = time.monotonic()
        if now - worker.began > SETTLED_SECONDS:
            worker.quick_ends = 0
        pause = pause_seconds(worker.quick_ends, self._chance)
        worker.quick_ends += 1
        worker.due = now + pause
        fields = {"worker": worker.number + 1, "why": why, "again_in_seconds": round(pause, 2)}
        _log.warning("a worker has ended and will be restarted", extra=fields)

    # -- stopping ---------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Stop all workers in order, within the time limit."""
        self._kill_at = time.monotonic() + KILL_SECONDS
        self._listener.close()  # as the workers do: new clients are refused at once, and can go elsewhere
        self._signal_all(signal.SIGTERM)

    def _end_at_once(self) -> None:
        self._signal_all(signal.SIGKILL)
        for worker in self._living():
            assert worker.pid is not None
            os.waitpid(worker.pid, 0)
            worker.pid = None

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._living():
            assert worker.pid is not None
            os.kill(worker.pid, number)  # the process exists: only `_reap` releases its number

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_those_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.pid is None and worker.due <= now and self._kill_at is None:
                self._start(worker)

    def _start(self, worker: _Worker) -> None:
        ours, theirs = socket.socketpair()
        worker.began = time.monotonic()
        with theirs, self._signals.held_back():  # no signal reaches the child before it has its own handlers
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                pid = os.fork()
            except OSError as error:  # no room for another process
                ours.close()
                self._not_there(worker, f"can't be started: {error.strerror}")
                return
            if pid == 0:
                self._become(worker, theirs, ours)
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        worker.pid, worker.channel, worker.said, worker.is_open = pid, ours, b"", False

    def _become(self, worker: _Worker, parent: socket.socket, parents_own: socket.socket) -> NoReturn:
        """Run this worker in the forked process, and exit when it ends."""
        code = 1
        try:
            gc.disable()  # as for a single process: until everything is loaded
            self._signals.forget()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent passes it on
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            # A worker that held the parent's end of a channel would hide the parent's death from the other workers.
            for channel in (parents_own, *(one.channel for one in self._workers)):
                if channel is not None:
                    channel.close()
            self._selector.close()
            front = WorkerFront(worker.number, self._listener, self._client_counts, parent)
            try:
                code = asyncio.run(bootstrap.serve(_options_of(worker.number, self._options), front))
            except StartupError as error:
                front.failed(error.detail)
        except BaseException:
            _log.exception("a worker failed")
        finally:
            logging.shutdown()
            os._exit(code)


def _options_of(number: int, options: ServeOptions) -> ServeOptions:
    """Give each worker its own port for the other proxies."""
    address = options.peer_address
    if address is None or address.port == 0:
        return options
    return replace(options, peer_address=HostPort(address.host, address.port + number))
