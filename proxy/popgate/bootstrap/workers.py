"""Runs ``popgate serve --workers N``: a parent process, and N workers that form a cluster and share one port.

Theory of operation. The parent binds the port, loads the code and forks. The parent serves no requests, runs no event
loop and no thread, and has no connection, so it can fork again when a worker has died. Each worker is a whole proxy. A
worker and the parent communicate through a pair of sockets, the channel. The worker reports that it can serve, or why
it can't. The parent then tells the worker to accept clients. No client is accepted until every worker can serve. If a
worker can't start before that, the parent stops all workers. If the parent ends or closes the channel, the worker
notices this on the channel, and ends. The parent notices in the same way that a worker has ended.

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
import time
from collections.abc import Collection, Generator
from dataclasses import dataclass, replace
from typing import NoReturn

from popgate import bootstrap
from popgate.bootstrap.acceptor import Acceptor
from popgate.bootstrap.banner import banner
from popgate.bootstrap.endings import EXIT_SECONDS, end_in_time
from popgate.bootstrap.listening import listening_for_clients
from popgate.bootstrap.turns import Turns
from popgate.config import ServeOptions
from popgate.config.values import HostPort
from popgate.domain.errors import StartupError
from popgate.runtime import event_loop
from popgate.runtime.logs import configure_logging

_log = logging.getLogger(__name__)

KILL_SECONDS = EXIT_SECONDS + 0.1
"""Seconds from a signal until the parent kills the workers that have not ended by themselves."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.2, 10.0
"""Seconds from a worker's end to its restart: the basic pause, which doubles after each quick end in a row, and the
maximum."""
SETTLED_SECONDS = 60.0
"""Minimum lifetime in seconds of a worker whose end does not count as a quick end."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
LOADED_LATE = ("popgate.adapters.rabbitmq.broker", "popgate.adapters.rabbitmq.lock_connection", "redis.asyncio")
"""Modules that a proxy loads on demand if it uses RabbitMQ or Redis. The parent loads them before it forks, so that all
workers share their memory."""
SERVES, COME_IN = b"+", b"!"
"""The messages on the channel: a worker sends ``SERVES`` when it can serve, and the parent sends ``COME_IN``. A worker
that can't start sends the reason."""
SAID_BYTES_MAX = 4_096


def supervise(options: ServeOptions) -> int:
    """Run ``options.workers`` proxies until SIGINT or SIGTERM, and return the exit code. Raises: StartupError."""
    configure_logging(options.log_level, form=options.log_format)
    with listening_for_clients(options) as listener:
        parent = _Parent(options, listener)
        for module in LOADED_LATE:
            importlib.import_module(module)
        gc.freeze()  # keeps a worker's collector from writing to the shared pages
        return parent.run()


def pause_seconds(quick_ends: int, chance: random.Random) -> float:
    """Return the seconds to wait before a worker that has ended is restarted. ``quick_ends`` is the number of its
    previous quick ends in a row."""
    longest = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2.0 ** min(quick_ends, 16))
    return longest * chance.uniform(0.5, 1.0)


def _say(channel: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):  # the other side has ended, which `_hear` notices as well
        channel.sendall(said[:SAID_BYTES_MAX])


def _hear(channel: socket.socket) -> bytes:
    """Return the bytes that the other side of the channel has sent. Return no bytes if the other side has ended."""
    try:
        return channel.recv(SAID_BYTES_MAX)
    except OSError:  # the other side ended with unread data
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker, as its own process sees it. ``number`` counts from 1. All workers use the same ``listener``. ``parent``
    is the channel."""

    number: int
    listener: socket.socket
    turns: Turns
    parent: socket.socket

    @contextlib.contextmanager
    def listening(self, stop: asyncio.Event) -> Generator[socket.socket]:
        """Yield the listener. ``stop`` is set when the parent closes the channel or has ended."""
        asyncio.get_running_loop().add_reader(self.parent, self._obey, stop)
        yield self.listener

    def serves(self, acceptor: Acceptor, stop: asyncio.Event) -> None:
        """Report to the parent that this worker can serve. ``acceptor`` is opened when the parent replies."""
        asyncio.get_running_loop().add_reader(self.parent, self._obey, stop, acceptor)
        _say(self.parent, SERVES)

    def _obey(self, stop: asyncio.Event, acceptor: Acceptor | None = None) -> None:
        if not _hear(self.parent):
            asyncio.get_running_loop().remove_reader(self.parent)
            end_in_time(stop)
        elif acceptor is not None and not stop.is_set():
            acceptor.open()


@dataclass(slots=True, eq=False)
class _Child:
    """A worker, as the parent sees it. ``number`` counts from 0. ``began`` is the monotonic time of its start, and
    ``said`` are the bytes that it has sent."""

    number: int
    pid: int
    channel: socket.socket
    began: float
    said: bytes = b""


class _Parent:
    """Starts the workers, restarts the workers that end, and stops all of them."""

    def __init__(self, options: ServeOptions, listener: socket.socket) -> None:
        self._options, self._listener, self._turns = options, listener, Turns(options.workers)
        self._due = dict.fromkeys(range(options.workers), 0.0)
        """The monotonic time at which each missing worker must be started, by the worker's number."""
        self._quick_ends = [0] * options.workers
        self._children: list[_Child] = []
        self._is_open = self._is_stopping = False
        self._why_not: str | None = None
        self._code = 0
        self._chance = random.Random()
        self._signalled: list[int] = []
        self._signals, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, lambda _number, _frame: None)  # `_signals` receives the number
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)

    def run(self) -> int:
        """Supervise the workers until all of them have ended, and return the exit code. Raises: StartupError."""
        while not self._signalled and self._why_not is None:
            for number in [number for number, due in self._due.items() if due <= time.monotonic()]:
                self._start(number)
            self._wait(self._due.values())
        return self._stop()

    def _stop(self) -> int:
        """Stop all workers in an orderly way within the time limit. A further signal kills them immediately. Return the
        exit code."""
        self._is_stopping = True
        del self._signalled[:1]
        self._listener.close()  # as the workers do: new clients are refused at once, and can use another server
        for child in self._children:
            with contextlib.suppress(OSError):  # it has just ended
                child.channel.shutdown(socket.SHUT_WR)
        kill_at = time.monotonic() + KILL_SECONDS
        while self._children and not self._signalled and time.monotonic() < kill_at:
            self._wait([kill_at])
        if self._children and not self._signalled:
            _log.warning("gave up waiting", extra={"workers": [child.number + 1 for child in self._children]})
        for child in self._children:
            os.kill(child.pid, signal.SIGKILL)  # the process id is still in use: only `_reap` releases it
            os.waitpid(child.pid, 0)
        if self._signalled:
            return 128 + self._signalled[0]
        if self._why_not is not None:
            raise StartupError(self._why_not)
        return self._code

    def _wait(self, times: Collection[float]) -> None:
        """Wait until a worker or a signal needs attention, or until the earliest of ``times``. Handle what has
        happened."""
        seconds = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Child):
                self._listen_to(key.data)
            else:
                self._signalled += _hear(self._signals)

    def _listen_to(self, child: _Child) -> None:
        said = _hear(child.channel)
        child.said += said
        if not said:
            self._reap(child)
        elif self._is_open:
            _say(child.channel, COME_IN)
        elif not self._is_stopping and [one.said for one in self._children] == [SERVES] * self._options.workers:
            self._is_open = True
            for one in self._children:
                _say(one.channel, COME_IN)
            print(banner(self._options), flush=True)

    def _reap(self, child: _Child) -> None:
        self._children.remove(child)
        self._selector.unregister(child.channel)
        child.channel.close()
        self._turns.leave(child.number)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if self._is_stopping:
            self._code |= child.said == SERVES and code > 0
            return
        if time.monotonic() - child.began > SETTLED_SECONDS:
            self._quick_ends[child.number] = 0
        why = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if child.said not in (b"", SERVES):
            why = child.said.decode(errors="replace")
        elif not self._is_open:
            why = f"worker {child.number + 1} ended before it served: {why}"
        self._try_again(child.number, why)

    def _try_again(self, number: int, why: str) -> None:
        """Schedule the restart of a worker. If not all workers have started yet, stop all of them."""
        if not self._is_open:
            self._why_not = why
            return
        pause = pause_seconds(self._quick_ends[number], self._chance)
        self._quick_ends[number] += 1
        self._due[number] = time.monotonic() + pause
        fields = {"worker": number + 1, "why": why, "again_in_seconds": round(pause, 2)}
        _log.warning("a worker has ended and will be restarted", extra=fields)

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # the child must not use the parent's handlers
        try:
            pid = os.fork()
            if pid == 0:
                self._become(number, theirs, ours)
        except OSError as error:  # the system can't run another process
            ours.close()
            self._try_again(number, f"can't be started: {error.strerror}")
        else:
            del self._due[number]
            child = _Child(number, pid, ours, time.monotonic())
            self._children.append(child)
            self._selector.register(ours, selectors.EVENT_READ, child)
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def _become(self, number: int, parent: socket.socket, parents_own: socket.socket) -> NoReturn:
        """Run a worker in the forked process, and exit when it ends."""
        code, options = 1, self._options
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            # If a worker kept the parent's end of a channel open, another worker would not notice the parent's death.
            for channel in (parents_own, *(child.channel for child in self._children)):
                channel.close()
            address = options.peer_address
            if address is not None and address.port:  # each worker listens on a separate port for the other proxies
                options = replace(options, peer_address=HostPort(address.host, address.port + number))
            self._turns.worker = number
            worker = Worker(number=number + 1, listener=self._listener, turns=self._turns, parent=parent)
            code = event_loop.run(bootstrap.serve(options, worker), options.event_loop)
        except StartupError as error:
            _say(parent, error.detail.encode())
        except BaseException:
            _log.exception("a worker failed")
        finally:
            logging.shutdown()
            os._exit(code)
