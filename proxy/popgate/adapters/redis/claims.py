"""Implements the claims port on Redis. Each call runs one script, and a pub/sub channel announces changes."""

from collections.abc import Sequence
from typing import Any

import orjson

from popgate.adapters.redis.change_signals import ChangeSignal, listen_for_changes
from popgate.adapters.redis.connection import RedisConnection
from popgate.domain.errors import NotAMember
from popgate.domain.names import BrokerQueue, InstanceId
from popgate.ports.claims import GONE_SECONDS, Claims, ClusterView, Member

_NO_MEMBER, _THE_SAME = "no member", "the same"


class RedisClaims:
    """Implements the claims port on ``redis``, which the caller closes.

    ``changed`` detects changes only while ``listen`` runs, or while ``listen_for_changes`` runs with this object's
    ``signal``.
    """

    def __init__(self, redis: RedisConnection, *, gone_seconds: float = GONE_SECONDS) -> None:
        self._redis = redis
        self._gone_seconds = gone_seconds
        self.signal = ChangeSignal("changes")

    async def listen(self) -> None:
        """Listen for announcements of changes. Never returns."""
        await listen_for_changes(self._redis, self.signal)

    async def join(self, member: Member, keeps: Sequence[BrokerQueue] = ()) -> ClusterView:
        says = orjson.dumps([member.address, member.protocols, member.owns]).decode()
        return _view(await self._redis.run("join", member.instance, self._gone_seconds, says, keeps))

    async def beat(self, instance: InstanceId, known: int) -> ClusterView | None:
        answer = await self._redis.run("beat", instance, self._gone_seconds, known)
        if answer == _NO_MEMBER:
            raise _no_member(instance)
        return None if answer == _THE_SAME else _view(answer)

    async def claim(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> tuple[list[BrokerQueue], int]:
        answer = await self._redis.run("own", instance, queues)
        if answer == _NO_MEMBER:
            raise _no_member(instance)
        mine, version = answer
        return [*mine], version

    async def release(self, instance: InstanceId, queues: Sequence[BrokerQueue]) -> int:
        version: int = await self._redis.run("disown", instance, queues)
        return version

    async def remove(self, instance: InstanceId) -> None:
        await self._redis.run("remove_member", instance)

    async def changed(self) -> None:
        await self.signal.wait()


def _view(answer: Sequence[Any]) -> ClusterView:
    version, members, owners = answer
    by_instance: dict[InstanceId, Member] = {}
    for instance, says in sorted(_pairs(members)):
        address, (lowest, highest), *owns = orjson.loads(says)  # a proxy of an older version sends only the first two
        by_instance[InstanceId(instance)] = Member(InstanceId(instance), address, (lowest, highest), *owns[:1])
    return ClusterView(version, by_instance, {BrokerQueue(name): InstanceId(owner) for name, owner in _pairs(owners)})


def _pairs(flat: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _no_member(instance: InstanceId) -> NotAMember:
    return NotAMember(f"the cluster considers proxy {instance} dead, or has lost its data; the proxy joins again")


_conforms: type[Claims] = RedisClaims
