"""The way from a process to the ``MemoryRedis``: the real ``PipelinedConnection`` over a simulated connection.

This module owns the data under way, and its fate while Redis is down, hangs or is cut off.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from popgate.adapters.redis.change_signals import ChangeSignal
from simulator.processes import Process
from simulator.redis_memory import MemoryRedis
from simulator.wires import Pipe, Weather

SUBSCRIBE_SECONDS = 1.0
"""Maximum seconds that a subscriber takes to subscribe again (``change_signals.AGAIN_SECONDS``)."""


class RedisServer:
    """One Redis and its connections. It ``is_up``, and may hang: then it does everything later."""

    def __init__(self, wall: Callable[[], float], chance: random.Random) -> None:
        self.redis = MemoryRedis(wall, self._publish)
        self.is_up = True
        self.connections: dict[SimulatedConnection, None] = {}
        self._chance = chance
        self._hangs = False
        self._held: deque[Callable[[], None]] = deque()
        self._listeners: dict[Process, tuple[Weather, dict[bytes, ChangeSignal]]] = {}

    def listen(self, process: Process, weather: Weather, prefix: str, *signals: ChangeSignal) -> None:
        """Deliver messages on the channels of ``signals`` to ``process``, as long as it lives."""
        self._listeners[process] = weather, {f"{prefix}{one.channel}".encode(): one for one in signals}
        process.at_death(partial(self._listeners.pop, process, None))

    def when_it_works(self, work: Callable[[], None]) -> None:
        """Do ``work``, later if Redis hangs."""
        if self._hangs:
            self._held.append(work)
        else:
            work()

    # -- faults -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop Redis; all its connections end."""
        self.is_up = False
        for connection in list(self.connections):
            connection.cut(None if self._chance.random() < 0.5 else 0)

    def start(self, *, keeps_data: bool = True) -> None:
        self.redis.restart(keeps_data=keeps_data)
        self.is_up = True
        self._tell_all()

    def hang(self) -> None:
        self._hangs = True

    def go_on(self) -> None:
        self._hangs = False
        while self._held:
            self._held.popleft()()

    def cut(self, process: Process) -> None:
        """End the connections of one process."""
        for connection in [one for one in self.connections if one.process is process]:
            connection.cut(None if self._chance.random() < 0.5 else 0)
        self._tell_all()

    # -- channels -----------------------------------------------------------------------------------------------

    def _publish(self, channel: bytes, message: bytes) -> None:
        for process, (weather, signals) in self._listeners.items():
            if channel in signals:
                _later(weather.seconds(), process, signals[channel])

    def _tell_all(self) -> None:
        """Notify each subscriber, because one that subscribes again assumes that it missed something."""
        for process, (_, signals) in self._listeners.items():
            for one in signals.values():
                _later(self._chance.uniform(0.0, SUBSCRIBE_SECONDS), process, one)


def _later(seconds: float, process: Process, signal: ChangeSignal) -> None:
    asyncio.get_running_loop().call_later(seconds, signal.notify, context=process.context)


class SimulatedPool:
    """The pool that provides a ``PipelinedConnection``'s connections."""

    def __init__(self, server: RedisServer, process: Process, weather: Weather) -> None:
        self._made = partial(SimulatedConnection, server, process, weather)

    def make_connection(self) -> "SimulatedConnection":
        return self._made()


class SimulatedConnection:
    """The part of redis-py's connection that a ``PipelinedConnection`` uses."""

    def __init__(self, server: RedisServer, process: Process, weather: Weather) -> None:
        self.process = process
        self.is_connected = False
        self._server = server
        self._weather = weather
        self._up, self._down = Pipe(weather), Pipe(weather, process.context)
        self._answers: deque[object] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._is_cut = False

    async def connect(self) -> None:
        if self._is_cut:
            raise ConnectionResetError("the connection was cut")
        if not self.is_connected:
            await asyncio.sleep(self._weather.seconds())
            if not self._server.is_up:
                raise ConnectionRefusedError("nobody listens")
            self.is_connected = True
            self._server.connections[self] = None
            self.process.at_death(self._died)

    async def can_read(self) -> bool:
        """Tell whether the connection was closed."""
        return self._is_cut

    async def send_packed_command(self, packed: list[bytes], *, check_health: bool) -> None:
        if self._is_cut:
            raise ConnectionResetError("the connection was cut")
        for one in packed:
            self._up.send(partial(self._arrived, _words(one)))

    async def read_response(self, *, disable_decoding: bool) -> Any:
        while not self._answers:
            if self._is_cut:
                raise ConnectionResetError("the connection was cut")
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        answer = self._answers.popleft()
        if isinstance(answer, RedisError):
            raise answer
        return answer

    async def disconnect(self, *, nowait: bool = False) -> None:
        if not self._is_cut:
            self.cut(0)  # what was sent arrives
        self._is_cut = True

    def cut(self, loses: int | None) -> None:
        """End the connection; this many of the messages under way to Redis are lost (None: all), and all answers."""
        self._up.cut(loses=loses)
        self._down.cut()
        self._server.connections.pop(self, None)
        self.process.not_at_death(self._died)
        asyncio.get_running_loop().call_soon(self._end, context=self.process.context)

    def _died(self) -> None:
        # Data under way is lost with the process. If it arrived nevertheless, popgate would lose a race: a grant under
        # an attempt, whose caller was notified of the death and has got messages from another owner under the same
        # attempt, would replace that owner's grant, and the client's repeat would get other messages than before.
        self.cut(None)

    def _end(self) -> None:
        self._is_cut = True
        self._wake()

    def _arrived(self, words: list[bytes]) -> None:
        self._server.when_it_works(partial(self._do, words))

    def _do(self, words: list[bytes]) -> None:
        if not self._server.is_up:
            return
        try:
            answer: object = self._server.redis.do(*words)
        except RedisError as error:
            answer = error
        self._down.send(partial(self._answered, answer))

    def _answered(self, answer: object) -> None:
        self._answers.append(answer)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _words(packed: bytes) -> list[bytes]:
    """Return the words of a command as the ``PipelinedConnection`` packs it."""
    words: list[bytes] = []
    at = packed.index(b"\r\n") + 2
    while at < len(packed):
        end = packed.index(b"\r\n", at)
        length = int(packed[at + 1 : end])
        words.append(packed[end + 2 : end + 2 + length])
        at = end + length + 4
    return words
