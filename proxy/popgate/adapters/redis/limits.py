"""Implements the limits port on Redis. Scripts count leases when they write lease records of limited subscriptions.

This module starts and stops the counting for each subscription.
"""

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
"""Maximum number of records that one script counts, so that it delays other calls by at most 2 ms."""
OWNERS_SECONDS_MAX = 10.0
"""Maximum number of seconds that counting waits for every queue to have an owner. It is longer than popgate needs to
detect that an owner is lost."""

_FULL = GrantAnswer(GrantStatus.FULL, 0.0, None)
_UNCOUNTED = ["uncounted"]


class RedisLimits:
    """Implements the limits port on ``redis``, which the caller closes. ``RedisLeaseStore`` manages the leases."""

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
        """Run the script ``name`` and return its answer, or None if the number of leases in flight is still unknown.

        If the leases are not counted yet, count them first.
        """
        answer: list[Any] = await self._redis.run(name, *words)
        if answer != _UNCOUNTED:
            return answer
        if not await self._count(limit):
            return None
        answer = await self._redis.run(name, *words)
        return None if answer == _UNCOUNTED else answer

    async def _count(self, limit: Limit) -> bool:
        """Count the present leases, and make the scripts count new ones. Return whether the count is complete.

        Several proxies may do this for the same subscription at the same time.
        """
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
