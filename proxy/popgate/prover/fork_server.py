"""Starts workers quickly: one process imports the modules that all workers need, and forks each worker.

Theory of operation. Starting Python and importing an AMQP client takes longer than most of a worker's tasks, and a
proof starts dozens of workers. So the parent process starts one **fork server** (``python -m
popgate.prover.fork_server``), which runs no thread and no event loop. To get a worker, the parent sends the fork server
a request with three descriptors, which become the worker's standard streams. The answer is the worker's process id.
Each worker is a separate process with its own connections, and can be stopped and killed. The fork server imports no
implementation except popgate's. So if a module of another implementation sets a value during its import, such as a
random identity, each worker has its own value.

    parent --"fork", 3 descriptors--> fork server --fork--> worker
      <------------- pid ---------------|                    |
      |---- signals, standard streams -----------------------|
      |----------- "reap" pid --------> fork server: wait until it is dead

A worker's process id is not reused until the worker is reaped. The fork server ends when its parent ends. A worker ends
when its input ends.
"""

import asyncio
import os
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

from popgate.prover.errors import ProverFailed
from popgate.prover.target import BUILT_IN, load
from popgate.prover.worker import main

FORK, REAP = 1, 2
REQUEST = struct.Struct("=Bq")
"""A request to the fork server: its kind, and the process id to reap."""
ANSWER = struct.Struct("=q")
STREAMS = 3
READY_SECONDS = 60.0


class Child:
    """A worker's process, as its parent sees it. ``said`` reads the standard output of the process."""

    def __init__(
        self, pid: int, said: asyncio.StreamReader, told: asyncio.WriteTransport, fork_server: "ForkServer"
    ) -> None:
        self.said = said
        self._pid = pid
        self._told = told
        self._fork_server = fork_server
        self._is_reaped = False

    def tell(self, line: bytes) -> None:
        self._told.write(line)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. Do nothing if the process has been reaped."""
        if not self._is_reaped:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def end_input(self) -> None:
        self._told.close()

    async def kill(self) -> None:
        """Kill the process. Return when the process is dead. Idempotent. Raises: ProverFailed."""
        self.signal(signal.SIGKILL)
        self._told.close()
        if not self._is_reaped:
            self._is_reaped = True
            await self._fork_server.reap(self._pid)


class ForkServer:
    """The process that forks workers, as its parent sees it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[int]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def start(self) -> None:
        """Start the fork server. It may not be ready when this method returns; the first ``fork`` waits until it is
        ready."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "popgate.prover.fork_server", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # only the parent handles Ctrl-C
            )

    async def fork(self, stderr: int) -> Child:
        """Fork a worker, and return its process. The worker's standard error is written to the descriptor ``stderr``.
        Raises: ProverFailed."""
        loop = asyncio.get_running_loop()
        input_theirs, input_ours = os.pipe()
        output_ours, output_theirs = os.pipe()
        said = asyncio.StreamReader()
        try:
            told, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(input_ours, "wb", 0))
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), os.fdopen(output_ours, "rb", 0))
            try:
                pid = await self._ask(FORK, 0, (input_theirs, output_theirs, stderr))
            except BaseException:
                told.close()  # a worker that may have been forked ends with its input
                raise
        finally:
            os.close(input_theirs)
            os.close(output_theirs)
        return Child(pid, said, told, self)

    async def reap(self, pid: int) -> None:
        """Wait until a killed worker is dead. After that, its process id may be reused. Raises: ProverFailed."""
        await self._ask(REAP, pid)

    async def end(self) -> None:
        """End the fork server. A worker continues to run until its input is closed. Idempotent, and safe before
        ``start``."""
        if self._socket is not None:
            self._socket.close()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()  # the fork server has no state to lose
            await process.wait()

    async def _ask(self, what: int, pid: int, descriptors: tuple[int, ...] = ()) -> int:
        """Send a request to the fork server, and return the answer.

        Even if the caller is cancelled, the answer is read. Otherwise the next request would receive this answer.
        """
        asking = asyncio.create_task(self._asked(what, pid, tuple(os.dup(one) for one in descriptors)), name="fork")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)

    async def _asked(self, what: int, pid: int, descriptors: tuple[int, ...]) -> int:
        assert self._socket is not None, "it was started"
        try:
            async with self._turn, asyncio.timeout(READY_SECONDS):
                socket.send_fds(self._socket, [REQUEST.pack(what, pid)], descriptors)
                answer = await asyncio.get_running_loop().sock_recv(self._socket, ANSWER.size)
        except (OSError, TimeoutError) as error:
            raise ProverFailed(f"no worker could be started: {type(error).__name__}: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if len(answer) < ANSWER.size:
            raise ProverFailed("no worker could be started: the process that starts them ended")
        number: int = ANSWER.unpack(answer)[0]
        return number


# ---------------------------------------------------------------- in the fork server's process


def serve(connection: socket.socket) -> None:
    """Answer the requests of the parent process until it ends."""
    load(BUILT_IN)  # loads the modules that the forked workers share
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST.size, STREAMS)
        if not request:
            return
        what, pid = REQUEST.unpack(request)
        answer = _forked(connection, descriptors) if what == FORK else os.waitpid(pid, 0)[0]
        connection.sendall(ANSWER.pack(answer))


def _forked(connection: socket.socket, descriptors: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        _become_worker(connection, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become_worker(connection: socket.socket, descriptors: list[int]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        connection.close()
        for stream, descriptor in enumerate(descriptors):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # even if the implementation has left threads running


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        serve(parent)
