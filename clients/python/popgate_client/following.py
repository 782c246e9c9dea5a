"""Follows the consume mode of a group: pops while it is in pop mode, pulls while it is in pull mode.

Owns the consumer's mode and the change from one to the other. It first reads the server's features from `GET /v1`, so
that it sends nothing that an old server does not know:

    the server has   the consumer
    pop and pull     asks for its assignment, which includes the mode, and follows it
    only pull        pulls
    only pop         pops, as before consume modes existed
    neither          stops with an error

The proxies behind a load balancer may have different versions, and may be upgraded. If a proxy does not know a path
(404) or reports another mode (409), the consumer looks again. The two modes never overlap: before one begins, the
handlers of the other have ended, or were abandoned after `drain_seconds`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from popgate_client.assignments import SUPPORTS, Assignment
from popgate_client.counters import Counters
from popgate_client.errors import (
    GroupNotFound,
    NotSupported,
    PopgateError,
    RetryLater,
    ServerFault,
    TopicNotFound,
    WrongMode,
)
from popgate_client.facts import FactLogger, cause_of
from popgate_client.popping import Popper
from popgate_client.pulling import Puller
from popgate_client.retrying import Backoff

logger = FactLogger(__name__)

POP, PULL = SUPPORTS
LOOK_SECONDS_MAX = 1.0


class FollowerCalls(Protocol):
    """The calls of one consumer; each raises PopgateError."""

    def features(self) -> Awaitable[Collection[str]]: ...

    def assignment(self, supports: Sequence[str], generation: int | None) -> Awaitable[Assignment]: ...


class Follower:
    """Consumes in the group's current mode until it is cancelled or rejected. `mode` is the latest known one.

    `end_pops` lets the handlers of popped messages end within the drain time, and abandons the rest."""

    def __init__(
        self,
        calls: FollowerCalls,
        popper: Popper,
        end_pops: Callable[[], Awaitable[None]],
        *,
        may_pull: bool,
        client_id: str,
        counters: Counters,
        chance: random.Random,
    ) -> None:
        self._calls = calls
        self._popper = popper
        self._end_pops = end_pops
        self._may_pull = may_pull
        self._client_id = client_id
        self._counters = counters
        self._backoff = Backoff(chance)
        self.mode: str | None = None

    async def run(self, puller: Puller) -> PopgateError:
        """Consume; return the error with which the server rejects this consumer permanently."""
        clock = asyncio.get_running_loop().time
        pulls: bool | None = None
        while True:
            try:
                supports, told = await self._look()
            except PopgateError as refusal:
                return refusal
            if pulls not in (None, told is not None):
                self._counters.mode_changes += 1
            pulls, began_at = told is not None, clock()
            error = await (self._popper.run(self) if told is None else puller.run(told, supports))
            if error is not None and not self.is_elsewhere(error):
                logger.error(
                    "the server rejected the consumer", extra={"cause": cause_of(error), "client_id": self._client_id}
                )
                return error
            if isinstance(error, WrongMode):
                await self._end_pops()
            if clock() > began_at + LOOK_SECONDS_MAX:
                self._backoff.reset()
            else:
                await asyncio.sleep(self._pause_seconds(error))

    def noted(self, mode: str | None) -> None:
        """Note the group's mode, as reported by the server."""
        if mode is not None and mode != self.mode:
            logger.info("the group's consume mode has changed", extra={"mode": mode, "client_id": self._client_id})
            self.mode = mode

    def is_elsewhere(self, error: PopgateError) -> bool:
        """Whether the error means that the mode may have changed, so that the consumer must look again."""
        return isinstance(error, NotSupported) or (
            isinstance(error, WrongMode) and self._may_pull and error.mode in (PULL, None)
        )

    async def _look(self) -> tuple[Sequence[str], Assignment | None]:
        """Return the modes that this consumer and the server support, and the assignment; None: the consumer pops.

        Raises: PopgateError if the server supports neither mode, or rejects the consumer permanently.
        """
        while True:
            supports: Sequence[str] = ()
            try:
                features = await self._calls.features()
                supports = [mode for mode in SUPPORTS if mode in features and (mode == POP or self._may_pull)]
                if not supports:
                    raise _neither(features)
                if supports == [POP]:
                    return supports, None
                told = await self._calls.assignment(supports, None)
                self.noted(told.mode)
                if told.mode == PULL:
                    return supports, told
                if POP in supports:
                    return supports, None
                await asyncio.sleep(self._pause_seconds(None))
            except NotSupported as error:
                if error.code == _NEITHER:
                    raise
                if POP in supports:  # this proxy does not know the path of the assignment
                    return [POP], None
                await self._again(error)
            except PopgateError as error:
                if not isinstance(error, RetryLater | ServerFault | WrongMode | TopicNotFound | GroupNotFound):
                    raise
                await self._again(error)

    async def _again(self, error: PopgateError) -> None:
        if isinstance(error, WrongMode):
            self.noted(error.mode)
        else:
            self._counters.calls_failed += 1
            logger.warning("the consume mode could not be read", extra={"cause": cause_of(error)})
        await asyncio.sleep(self._pause_seconds(error))

    def _pause_seconds(self, error: PopgateError | None) -> float:
        asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
        return self._backoff.next_seconds(asked_for, lease_seconds=LOOK_SECONDS_MAX * 6)


_NEITHER = "no_consume_mode"


def _neither(features: Collection[str]) -> NotSupported:
    return NotSupported(_NEITHER, f"the server supports no consume mode that this consumer can use: {features}")
