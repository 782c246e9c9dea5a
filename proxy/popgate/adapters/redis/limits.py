"""The limits port on Redis: scripts count leases when they write records; this starts and stops the counting."""

from collections.abc import Collection
from typing import Any

from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.grants import grant_answers, grant_call
from popgate.adapters.redis.records import microseconds, subscription_key
from popgate.domain.lease import GrantAnswer, GrantStatus
from popgate.domain.names import Subscription
from popgate.ports.leases import GrantRequest
from popgate.ports.limits import Limit, Limits, Vacancy

RECORDS_PER_STEP = 1_000
"""Maximum number of records counted in one step, so that other calls wait a millisecond or two at most."""
OWNERS_SECONDS_MAX = 10.0
"""Maximum number of seconds that counting waits for owners of all queues; longer than the detection of a lost owner."""

_FULL = GrantAnswer(GrantStatus.FULL, 0.0, None)
_UNCOUNTED = ["uncounted"]


class RedisLimits:
    """The limits port on ``redis``, which the caller closes. ``RedisLeaseStore`` owns the leases."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis

    async def grant(self, request: GrantRequest, limit: Limit) -> tuple[list[GrantAnswer], Vacancy]:
        answer = await self._ask(limit, *grant_call(request, _limit_arguments(limit)))
        if answer is None:
            return [_FULL] * len(request.entries), Vacancy(0, is_full=False)
        answers, (left, is_full) = grant_answers(request, answer)
        return answers, Vacancy(left, is_full)

    async def vacancy(self, limit: Limit, *, waits: bool) -> Vacancy:
        answer = await self._ask(limit, "vacancy", subscription_key(limit.subscription), _limit_arguments(limit), waits)
        return Vacancy(0, is_full=False) if answer is None else Vacancy(*answer)

    async def keep(self, subscriptions: Collection[Subscription]) -> None:
        await self._redis.run("keep_limits", [subscription_key(one) for one in subscriptions])

    async def _ask(self, limit: Limit, name: str, *words: object) -> list[Any] | None:
        """Return a script's answer; None while the number of leases in flight is unknown."""
        answer: list[Any] = await self._redis.run(name, *words)
        if answer != _UNCOUNTED:
            return answer
        if not await self._count(limit):
            return None
        answer = await self._redis.run(name, *words)
        return None if answer == _UNCOUNTED else answer

    async def _count(self, limit: Limit) -> bool:
        """Start to count, beginning with the present leases. Several proxies may do so at the same time."""
        name, queues = subscription_key(limit.subscription), list(limit.queues)
        if not await self._redis.run("begin_count", name, queues, microseconds(OWNERS_SECONDS_MAX)):
            return False
        for queue in queues:
            cursor = "0"
            while True:
                cursor = await self._redis.run("count_part", name, queue, cursor, RECORDS_PER_STEP)
                if cursor == "0":
                    break
        return bool(await self._redis.run("end_count", name, queues))


def _limit_arguments(limit: Limit) -> tuple[int, str, int]:
    return limit.in_flight_max, limit.member, len(limit.queues)


_conforms: type[Limits] = RedisLimits
