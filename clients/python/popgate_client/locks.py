"""Locks over HTTP: their types, their requests, and how one is acquired (the server's docs/locks.md).

Owns paths, fields and the meaning of answers; does no I/O. `lock_terms` decides how long a lock is trusted; `held_lock`
and `async_held_lock` hold one.
"""

import math
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import httpx

from popgate_client.errors import LockLost, LockNotAcquired, LockNotFound, PopgateError, RetryLater
from popgate_client.exchange import Attempt, Exchange, Exchanges, is_passing
from popgate_client.lock_terms import LockTerm
from popgate_client.retrying import Backoff
from popgate_client.wire import (
    ANSWER_SECONDS,
    JsonObject,
    Request,
    accepted,
    encode,
    lock_path,
    read_answer,
    without_none,
)

TTL_SECONDS = 30.0
WAIT_SECONDS_MAX = 30.0
"""Maximum wait in seconds of one request; a longer wait takes several, each of which queues at the end again."""
EARLY_SECONDS = 0.5
HOLDER_LENGTH_MAX = 128
RELEASE_SECONDS_MAX = 3.0
"""Seconds for which a release is repeated, and for which it waits for an answer; a lock that can't be released
expires."""

LockKind: TypeAlias = Literal["mutex", "persistent_mutex", "semaphore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockGrant:
    """An acquired lock. The `token` authorizes renewing and releasing it."""

    name: str
    holder: str
    token: str = field(repr=False)
    fencing_token: int
    slot: int
    term: LockTerm = field(repr=False, compare=False)


def default_holder() -> str:
    """Return the holder name to show: the machine's name and the process ID."""
    return f"{socket.gethostname()}:{os.getpid()}"[-HOLDER_LENGTH_MAX:]


class LockExchanges:
    """Makes the exchanges about locks of one client. `clock` measures the terms."""

    def __init__(self, exchanges: Exchanges, clock: Callable[[], float], chance: random.Random | None = None) -> None:
        self._exchanges = exchanges
        self._clock = clock
        self._chance = chance or random.Random()

    def acquire(self, name: str, holder: str, ttl_seconds: float, wait_seconds: float) -> Exchange[LockGrant]:
        """Ask until the lock is acquired, or until others have held it for `wait_seconds`. This is safe to repeat: a
        lock whose answer was lost expires.

        Raises: LockNotAcquired, LockNotFound.
        """
        until = self._clock() + wait_seconds
        backoff, pause = Backoff(self._chance), 0.0

        def request(pause: float) -> Request:
            wait = min(max(0.0, until - self._clock() - pause), WAIT_SECONDS_MAX)
            fields = {"holder": holder, "ttl_seconds": ttl_seconds, "wait_seconds": wait}
            return _post(name, "acquire", fields, silence_seconds=wait + ANSWER_SECONDS)

        while True:
            answer, asked_at = yield from self._answered(request, pause)
            grant = read_answer(answer, partial(self._grant, name, holder, ttl_seconds, asked_at))
            if grant and (self._clock() < grant.term.renew_at or (yield from self._is_confirmed(grant))):
                return grant
            now = self._clock()
            if now >= until:
                raise LockNotAcquired("lock_not_acquired", f"lock {name} is held by others")
            if now - asked_at < EARLY_SECONDS:  # a server that is shutting down answers early: don't hammer it
                pause = min(backoff.next_seconds(), until - now)
            else:
                backoff.reset()
                pause = 0.0

    def renew(self, grant: LockGrant, silence_seconds: float) -> Exchange[None]:
        """Renew the lock with one request. Raises: LockLost, LockNotFound, ServerFault, and temporary errors."""
        _check_held(grant, accepted((yield Attempt(_renewal(grant, silence_seconds)))))

    def verify(self, grant: LockGrant, left_seconds: float) -> Exchange[None]:
        """Ask whether the lock is held, with repeats until its term ends.

        Raises: LockLost, LockNotFound, ServerFault.
        """
        silence_seconds = min(left_seconds, ANSWER_SECONDS)
        request = _post(grant.name, "verify", {"token": grant.token}, silence_seconds=silence_seconds)
        _check_held(grant, (yield from self._exchanges.repeatable(request, retry_seconds_max=left_seconds)))

    def release(self, grant: LockGrant, *, retry_seconds_max: float) -> Exchange[LockLost | None]:
        """Release the lock. Return a LockLost if it was no longer held. If the request was repeated, this is unknown,
        because an earlier one may have released the lock."""
        request = _post(grant.name, "release", {"token": grant.token}, silence_seconds=RELEASE_SECONDS_MAX)
        tries = 0

        def next_try(_pause: float) -> Request:
            nonlocal tries
            tries += 1
            return request

        answer, _ = yield from self._answered(next_try, 0.0, retry_seconds_max)
        if read_answer(answer, lambda body: bool(body["released"])) or tries > 1:
            return None
        return LockLost("lock_lost", f"lock {grant.name} was no longer held when it was released")

    def _grant(self, name: str, holder: str, ttl_seconds: float, asked_at: float, body: JsonObject) -> LockGrant | None:
        if not body["acquired"]:
            return None
        return LockGrant(
            name=name,
            holder=holder,
            token=str(body["token"]),
            fencing_token=int(body["fencing_token"]),
            slot=int(body["slot"]),
            term=LockTerm(name, ttl_seconds, asked_at, self._chance),
        )

    def _is_confirmed(self, grant: LockGrant) -> Exchange[bool]:
        """Renew a lock whose answer came so late that it can't be trusted any more; False if it is lost."""
        request = _renewal(grant, ANSWER_SECONDS)
        try:
            answer, asked_at = yield from self._answered(lambda _: request, 0.0)
            _check_held(grant, answer)
        except (LockLost, LockNotFound):
            return False
        grant.term.restart(asked_at)
        return True

    def _answered(
        self, request: Callable[[float], Request], pause: float, retry_seconds_max: float = math.inf
    ) -> Exchange[tuple[httpx.Response, float]]:
        """Return the answer, and when its request was sent. `request` makes a new request for each try from its
        pause."""
        patience = self._exchanges.patience(retry_seconds_max)
        while True:
            asked_at = self._clock()
            try:
                return accepted((yield Attempt(request(pause), pause))), asked_at
            except PopgateError as error:
                asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
                again = patience.pause_seconds(asked_for) if is_passing(error) else None
                if again is None:
                    raise
                pause = again


def list_locks(exchanges: Exchanges) -> Exchange[list[JsonObject]]:
    """Return all locks, as they were defined."""
    answer = yield from exchanges.repeatable(Request(method="GET", path="/v1/locks"))
    return read_answer(answer, lambda body: [dict(lock) for lock in body["locks"]])


def put_lock(
    exchanges: Exchanges, name: str, kind: LockKind, slots: int | None, enabled: bool | None
) -> Exchange[JsonObject]:
    return exchanges.put(lock_path(name), without_none({"kind": kind, "slots": slots, "enabled": enabled}))


def force_release_request(name: str, holder: str | None, fencing_token: int | None) -> Request:
    fields = without_none({"holder": holder, "fencing_token": fencing_token})
    return _post(name, "force-release", fields, silence_seconds=ANSWER_SECONDS)


def holders_of(released: JsonObject) -> list[JsonObject]:
    return [dict(one) for one in released["holders"]]


def _check_held(grant: LockGrant, answer: httpx.Response) -> None:
    """Raises: ServerFault if the answer does not say that the lock is held, because another program than popgate may
    have sent it."""

    def read(body: JsonObject) -> None:
        if body["held"] is not True or int(body["fencing_token"]) < grant.fencing_token:  # a renewal may raise it
            raise ValueError("it does not say that the lock is held")

    read_answer(answer, read)


def _renewal(grant: LockGrant, silence_seconds: float) -> Request:
    return _post(grant.name, "renew", {"token": grant.token}, silence_seconds=silence_seconds)


def _post(name: str, verb: str, fields: JsonObject, *, silence_seconds: float) -> Request:
    return Request(
        method="POST",
        path=lock_path(name, verb),
        content=encode(fields),
        silence_seconds=silence_seconds,
        seconds_max=silence_seconds,  # the answer is small, and a lock can't be trusted for longer
    )
