"""Requests from one process to another: delayed, lost in either direction, or refused because the target is dead.

This module owns the transport of a request and of its answer, not their content.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from popgate.domain.errors import PopgateError
from simulator.processes import Process
from simulator.wires import NOBODYS, Weather

T = TypeVar("T")


class Answered(NamedTuple, Generic[T]):
    """``undo`` is called in the answering process if the answer does not arrive."""

    answer: T
    undo: Callable[[], object] | None = None


class Network:
    """``loss``: the share of requests lost with the connection on the way there, and the same share again on the way
    back. ``failures``: unexpected exceptions, which are bugs.
    """

    def __init__(self, chance: random.Random, weather: Weather, failures: list[str]) -> None:
        self.weather = weather
        self.loss = 0.0
        self.apart: set[frozenset[str]] = set()
        """Pairs of processes, by name, that can't reach each other: requests between them are never answered."""
        self._chance = chance
        self._failures = failures

    async def exchange(
        self,
        to: Process | None,
        work: Callable[[], Awaitable[Answered[T]]],
        *,
        seconds: float,
        asker: Process | None = None,
        leave: Callable[[], object] | None = None,
    ) -> T:
        """Return the answer of ``to``; ``leave`` is called there as soon as the caller stops waiting. Raises:
        ConnectionRefusedError: the request reached no process. OSError, TimeoutError: it may have been carried out.
        PopgateError.
        """
        request: _Request[T] = _Request(self, to, asker, leave)
        if to is None or asker is None or frozenset((to.name, asker.name)) not in self.apart:
            arrive = partial(request.arrive, work)
            asyncio.get_running_loop().call_later(self.weather.seconds(), arrive, context=NOBODYS)
        try:
            async with asyncio.timeout(seconds):
                return await request.answered
        finally:
            request.end()

    def is_lost(self) -> bool:
        return self._chance.random() < self.loss

    def note_failure(self, what: str) -> None:
        self._failures.append(what)


class _Request(Generic[T]):
    """One request on its way to ``to``."""

    def __init__(
        self,
        network: Network,
        to: Process | None,
        asker: Process | None,
        leave: Callable[[], object] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[T] = self._loop.create_future()
        self._network = network
        self._to = to
        self._asker = asker
        self._leave = leave
        self._has_arrived = False
        if asker is not None:
            asker.at_death(self._asker_gone)

    def arrive(self, work: Callable[[], Awaitable[Answered[T]]]) -> None:
        to = self._to
        if to is None or to.is_dead:
            self._fail(ConnectionRefusedError("nobody is there"))
        elif self._network.is_lost():
            self._fail(ConnectionResetError("the request was lost"))
        elif not self.answered.done():
            self._has_arrived = True
            to.at_death(self._reset)
            to.spawn(self._serve(to, work), "a request")

    def end(self) -> None:
        """End the request: the caller has its answer, or stops waiting."""
        if self._to is not None:
            self._to.not_at_death(self._reset)
        if self._asker is not None:
            self._asker.not_at_death(self._asker_gone)
        if not self.answered.done() or self.answered.cancelled():
            self._tell_gone()

    def _tell_gone(self) -> None:
        if self._leave is not None and self._to is not None and self._has_arrived:
            self._later(self._leave, self._to.context)

    def _asker_gone(self) -> None:
        self.answered.cancel()
        self._tell_gone()

    def _reset(self) -> None:
        """Handle the death of the answering process."""
        self._later(partial(self._fail, ConnectionResetError("the connection was closed")), NOBODYS)

    def _fail(self, error: BaseException) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)

    async def _serve(self, to: Process, work: Callable[[], Awaitable[Answered[T]]]) -> None:
        """Runs in the answering process."""
        try:
            found = await work()
        except PopgateError as error:
            self._later(partial(self._fail, error), NOBODYS)
        except Exception as error:  # a bug, to be reported
            self._network.note_failure(f"a request failed: {error!r}")
            self._later(partial(self._fail, ConnectionResetError("it failed")), NOBODYS)
        else:
            self._later(partial(self._bring, to, found), NOBODYS)

    def _bring(self, to: Process, found: Answered[T]) -> None:
        if self._network.is_lost():
            self._fail(ConnectionResetError("the answer was lost"))
            self._undo(to, found)
        elif self.answered.done():
            self._undo(to, found)
        else:
            self.answered.set_result(found.answer)

    def _undo(self, to: Process, found: Answered[T]) -> None:
        if found.undo is not None:
            self._later(found.undo, to.context)

    def _later(self, work: Callable[[], object], context: Context) -> None:
        self._loop.call_later(self._network.weather.seconds(), work, context=context)
