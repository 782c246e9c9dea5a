"""Defines a client of the lock in a worker process. It reconnects after a failure, and prints a line before and after
each call.

This module defines the format of the lines that the parent process reads, and chooses the node of the broker.
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from popgate.domain.lock_operations import CUT_OFF, Action, OperationOutcome
from popgate.domain.locks import LockKind
from popgate.prover.relay import Relay, Traffic
from popgate.prover.target import Connect, Doubting, Held, LockTarget, Renewing

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
AGAIN_SECONDS = 0.2
ERROR_LENGTH_MAX = 200

T = TypeVar("T")


class Lines:
    """Writes the lines that the parent process reads, one JSON object per line. No line is cut off if the process is
    killed."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def say(self, what: str, **fields: Any) -> None:
        """Write a line of kind ``what``. Safe to call from any thread."""
        line = json.dumps({"what": what, **fields}, separators=(",", ":"))
        with self._lock:
            os.write(1, line.encode() + b"\n")

    def number(self) -> int:
        self._count += 1
        return self._count


@dataclass(frozen=True, slots=True)
class Call:
    """The result of one call of the lock implementation, and what the call cost. If the call was answered, ``error`` is
    empty."""

    outcome: OperationOutcome
    held: Held | None = None
    number: int = 0
    renewed_token: int | None = None
    error: str = ""
    seconds: float = 0.0
    traffic: Traffic | None = None


class LockClient:
    """A client that uses one lock. ``name`` identifies the client in the recorded history."""

    def __init__(
        self, name: str, connect: Connect, urls: Sequence[str], lock: str, kind: LockKind, lines: Lines
    ) -> None:
        """Create a client that is not connected yet.

        ``urls`` are the URLs of the broker's nodes, the preferred node first. An entry may contain several URLs,
        separated by commas. The client then uses all URLs of the entry at the same time.
        """
        self.name = name
        self._connect = connect
        self._urls = list(urls)
        self._lock = lock
        self._kind = kind
        self._lines = lines
        self._relays = [Relay(url, self._on_lost) for url in urls[0].split(",")]
        self._target: LockTarget | None = None
        self._ends_by_time = False
        """Whether this client's locks end after a time to live, and not with its connection."""

    @property
    def is_connected(self) -> bool:
        return self._target is not None

    async def connect(self) -> None:
        """Connect to the first node that accepts the connection.

        Raises: the implementation's exception (of any type) for the last node that was tried.
        """
        for _ in range(len(self._urls) - 1):
            with contextlib.suppress(Exception):
                return await self._connect_to_first()
        return await self._connect_to_first()

    async def connect_again(self) -> None:
        """Try to connect until the client is connected. Return immediately if it is connected already."""
        while not self.is_connected:
            with contextlib.suppress(Exception):
                await self.connect()
            if not self.is_connected:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _connect_to_first(self) -> None:
        for relay, url in zip(self._relays, self._urls[0].split(","), strict=True):
            relay.lead_to(url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                target = await self._connect(",".join(relay.url for relay in self._relays), self._lock, self._kind)
        except BaseException:
            self._urls.append(self._urls.pop(0))
            raise
        self._target = target
        self._ends_by_time = isinstance(target, Doubting)
        if isinstance(target, Doubting):
            target.on_doubt = self._on_doubt

    async def close(self) -> None:
        """Close the connection. This releases all locks that this client holds."""
        target, self._target = self._target, None
        if target is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await target.close()
        self._cut()

    def cut(self) -> None:
        """Abort the client's connections, and print a line with the time of the abort."""
        start = time.monotonic()
        self._cut()
        how = CUT_OFF if self._ends_by_time else "connection cut"
        self._lines.say("disturbed", client=self.name, how=how, at=start, until=time.monotonic())

    def _cut(self) -> None:
        for relay in self._relays:
            relay.cut()

    def _traffic(self) -> Traffic:
        """Return the traffic of all of this client's connections so far."""
        return sum((relay.traffic for relay in self._relays), Traffic())

    def _on_lost(self, at: float) -> None:
        self._lines.say("disturbed", client=self.name, how="connection lost", at=at, until=at)

    def _on_doubt(self, at: float) -> None:
        self._lines.say("disturbed", client=self.name, how="not renewed", at=at, until=time.monotonic())

    # -- the calls ------------------------------------------------------------------------------------------------

    async def acquire(self, wait_seconds: float) -> Call:
        return await self._call(
            Action.ACQUIRE, lambda target: target.acquire(wait_seconds), _acquired, wait_seconds=wait_seconds
        )

    async def verify(self, held: Held) -> Call:
        return await self._call(Action.VERIFY, lambda target: target.verify(held), _verified, held)

    async def confirm(self, held: Held, *, renew: bool) -> Call:
        """Renew the lock if ``renew`` is true and the implementation can, otherwise verify it."""
        target: object = self._target
        if not renew or not isinstance(target, Renewing):
            return await self.verify(held)
        return await self._call(Action.RENEW, lambda _: target.renew(held), _renewed, held)

    async def release(self, held: Held) -> Call:
        return await self._call(Action.RELEASE, lambda target: target.release(held), _done, held)

    async def set_slots(self, slots: int) -> Call:
        return await self._call(Action.SET_SLOTS, lambda target: target.set_slots(slots), _done, number=slots)

    async def count_held(self, *, patience_seconds: float) -> Call:
        """Count the held slots repeatedly, until no slot is held or ``patience_seconds`` have passed. Return the last
        count."""

        async def count(target: LockTarget) -> int:
            deadline = time.monotonic() + patience_seconds
            while True:
                number = await target.count_held()
                if not number or time.monotonic() > deadline:
                    return number
                await asyncio.sleep(AGAIN_SECONDS)

        return await self._call(Action.COUNT_HELD, count, _counted)

    async def remove(self) -> None:
        """Remove the lock from the broker. Raises: any exception of the implementation."""
        if self._target is not None:
            await self._target.remove()

    async def write(self, held: Held, ask: Callable[[int], Awaitable[bool]]) -> bool:
        """Write to the protected resource, and return whether it accepted the write. ``ask`` gets the number of the
        operation, and returns the answer of the resource."""
        number = self._begin(Action.WRITE, held)
        admitted = await ask(number)
        self._end(number, Call(OperationOutcome.DONE if admitted else OperationOutcome.REFUSED, held))
        return admitted

    async def _call(
        self,
        action: Action,
        call: Callable[[LockTarget], Awaitable[T]],
        understood: Callable[[T], Call],
        held: Held | None = None,
        *,
        wait_seconds: float = 0.0,
        number: int = 0,
    ) -> Call:
        target = self._target
        assert target is not None, "it is connected"
        traffic, start = self._traffic(), time.monotonic()
        operation = self._begin(action, held, wait_seconds=wait_seconds, number=number)
        try:
            answer = understood(await call(target))
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            answer = Call(OperationOutcome.UNKNOWN, error=f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX])
        seconds = time.monotonic() - start
        self._end(operation, answer)
        if answer.error:
            await self.close()
        return replace(answer, seconds=seconds, traffic=self._traffic().since(traffic))

    def _begin(self, action: Action, held: Held | None, *, wait_seconds: float = 0.0, number: int = 0) -> int:
        operation = self._lines.number()
        about: dict[str, Any] = {} if held is None else {"slot": held.slot, "token": held.token}
        if number:
            about["number"] = number
        if wait_seconds:
            about["wait_seconds"] = wait_seconds
        self._lines.say("begin", id=operation, client=self.name, action=action, at=time.monotonic(), **about)
        return operation

    def _end(self, operation: int, answer: Call) -> None:
        about: dict[str, Any] = {}
        if answer.held is not None:
            about = {"slot": answer.held.slot, "token": answer.held.token}
        if answer.number:
            about["number"] = answer.number
        if answer.renewed_token is not None:
            about["renewed_token"] = answer.renewed_token
        if answer.error:
            about["error"] = answer.error
        self._lines.say("end", id=operation, at=time.monotonic(), outcome=answer.outcome, **about)


def _acquired(held: Held | None) -> Call:
    return Call(OperationOutcome.REFUSED) if held is None else Call(OperationOutcome.DONE, held)


def _verified(is_held: bool) -> Call:
    return Call(OperationOutcome.DONE if is_held else OperationOutcome.REFUSED)


def _renewed(token: int | None) -> Call:
    return Call(OperationOutcome.REFUSED if token is None else OperationOutcome.DONE, renewed_token=token)


def _counted(number: int) -> Call:
    return Call(OperationOutcome.DONE, number=number)


def _done(_: None) -> Call:
    return Call(OperationOutcome.DONE)
