"""Implements the claims port on Redis. Each call runs one script, and a pub/sub channel announces changes."""

import logging
import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from popgate.adapters.redis.change_signals import ChangeSignal, listen_for_changes
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.texts import read_pairs
from popgate.domain.errors import NotAMember
from popgate.domain.names import NAME_PATTERN, BrokerQueue, InstanceId
from popgate.ports.claims import GONE_SECONDS, Claims, ClusterView, Member
from popgate.runtime.logs import OnceLogger

_log = logging.getLogger(__name__)

ADDRESS_LENGTH_MAX = 300
"""Maximum length of a member's address. A host name has at most 253 characters."""
VERSION_MAX = 1_000_000
"""Maximum number of a protocol version in a member's entry."""
_NO_MEMBER, _THE_SAME = "no member", "the same"
_PackedView: TypeAlias = tuple[int, msgspec.Raw, msgspec.Raw]
"""The version of the view, the hash of the members, and the hash of the owners."""
_Version: TypeAlias = Annotated[int, Meta(ge=0, le=VERSION_MAX)]


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """What a member says about itself. A member of an older version says less, and one of a newer version may say
    more."""

    address: Annotated[str, Meta(max_length=ADDRESS_LENGTH_MAX)]
    protocols: tuple[_Version, _Version]
    owns: bool = True


_read_entry = msgspec.json.Decoder(_Entry).decode


class RedisClaims:
    """Implements the claims port on ``redis``, which the caller closes.

    ``changed`` detects changes only while ``listen`` runs, or while ``listen_for_changes`` runs with this object's
    ``signal``.
    """

    def __init__(self, redis: RedisConnection, *, gone_seconds: float = GONE_SECONDS) -> None:
        self._redis = redis
        self._gone_seconds = gone_seconds
        self._unreadable = OnceLogger(_log, "an entry of the cluster in Redis can't be read; it is ignored")
        self.signal = ChangeSignal("changes")

    async def listen(self) -> None:
        """Listen for announcements of changes. Never returns."""
        await listen_for_changes(self._redis, self.signal)

    async def join(self, member: Member, keeps: Sequence[BrokerQueue] = ()) -> ClusterView:
        says = orjson.dumps([member.address, member.protocols, member.owns]).decode()
        answer = await self._redis.run(
            "join", member.instance, self._gone_seconds, says, keeps, answer_type=_PackedView
        )
        return self._view(answer)

    async def beat(self, instance: InstanceId, known: int) -> ClusterView | None:
        answer: str | _PackedView = await self._redis.run(
            "beat", instance, self._gone_seconds, known, answer_type=str | _PackedView
        )
        if answer == _NO_MEMBER:
            raise _no_member(instance)
        if isinstance(answer, str):
            assert answer == _THE_SAME, "the script has no other answers"
            return None
        view = self._view(answer)
        if instance not in view.members:  # its entry was damaged: joining again replaces the entry
            raise _no_member(instance)
        return view

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

    def _view(self, answer: _PackedView) -> ClusterView:
        """Return the view without the members whose entries can't be read."""
        version, members, owners = answer
        by_instance: dict[InstanceId, Member] = {}
        for instance, says in sorted(read_pairs(members, self._unreadable)):
            try:
                by_instance[InstanceId(instance)] = _member(instance, says)
            except (ValueError, RecursionError) as error:
                self._unreadable.warn(f"member {instance}", str(error))
        pairs = read_pairs(owners, self._unreadable)
        return ClusterView(version, by_instance, {BrokerQueue(name): InstanceId(owner) for name, owner in pairs})


def _member(instance: str, says: str) -> Member:
    """Return a member from its entry. Raises: ValueError, RecursionError."""
    if re.fullmatch(NAME_PATTERN, instance) is None:
        raise ValueError("it is no name of an instance")
    entry = _read_entry(says)
    return Member(InstanceId(instance), entry.address, entry.protocols, entry.owns)


def _no_member(instance: InstanceId) -> NotAMember:
    return NotAMember(f"the cluster considers proxy {instance} dead, or has lost its data; the proxy joins again")


_conforms: type[Claims] = RedisClaims
