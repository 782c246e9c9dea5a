"""Stores the assignments of pull clients in Redis.

One hash stores the version of each subscription's assignment, and another hash stores the assignment itself as JSON. If
Redis loses its data, the proxy that computed the assignments writes them back (``engine.pull.assigning``).
"""

from popgate.adapters.assignment_json import assignment_json, read_assignment
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.records import subscription_key
from popgate.domain.assignment import Assignment
from popgate.domain.names import Subscription
from popgate.ports.assignments import NOTHING_STORED, Assignments, StoredAssignment


class RedisAssignments:
    """Implements the state port's store of assignments on ``redis``. The caller closes ``redis``."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis

    async def read(self, subscription: Subscription) -> StoredAssignment:
        version, text = await self._redis.run("read_assignment", subscription_key(subscription))
        return StoredAssignment(version, read_assignment(text)) if version else NOTHING_STORED

    async def write(self, subscription: Subscription, assignment: Assignment, replaces: int) -> int | None:
        key = subscription_key(subscription)
        version: int = await self._redis.run("write_assignment", key, assignment_json(assignment), replaces)
        return version or None

    async def drop(self, subscription: Subscription) -> None:
        await self._redis.run("drop_assignment", subscription_key(subscription))


_conforms: type[Assignments] = RedisAssignments
