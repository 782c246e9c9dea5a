"""Checks whether this proxy can serve requests, and decides who may read the reason if it can't."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from popgate.api.problems import NotReady
from popgate.api.scope_keys import PROVE_CALLER
from popgate.domain.permissions import Action, Caller
from popgate.engine.engine import Engine

_log = logging.getLogger(__name__)

BARE_REASON = "popgate can't serve requests now; its log says why"
READERS = (Action.METRICS, Action.INSPECT, Action.ADMIN)
"""The actions of which one is enough to read the reason."""


class Readiness:
    """Whether this proxy can serve requests. ``outside`` returns why it is not a member of its cluster, or None."""

    def __init__(self, engine: Engine, outside: Callable[[], str | None] | None = None) -> None:
        self._engine = engine
        self._outside = outside
        self._logged: str | None = None

    async def check(self, scope: Mapping[str, Any]) -> None:
        """Raises: NotReady. It contains the reason if the caller of the request may read it.

        A reason names addresses of RabbitMQ and Redis, and RabbitMQ's user. If this proxy authenticates callers, a
        caller that it does not know gets only the bare answer.
        """
        reason = self._engine.unready_reason() or (None if self._outside is None else self._outside())
        if reason != self._logged:
            self._logged = reason
            if reason is not None:
                _log.warning("this proxy is not ready", extra={"reason": reason})
        if reason is not None:
            raise NotReady(reason if await _may_read(scope) else BARE_REASON)


async def _may_read(scope: Mapping[str, Any]) -> bool:
    prove: Callable[[Mapping[str, Any]], Awaitable[Caller | None]] | None = scope.get(PROVE_CALLER)
    if prove is None:
        return True
    caller = await prove(scope)
    return caller is not None and any(grant.allows(one) for grant in caller.principal.grants for one in READERS)
