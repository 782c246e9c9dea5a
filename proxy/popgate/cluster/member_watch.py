"""Removes members of the cluster whose processes have died, long before their heartbeats time out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from popgate.domain.errors import PeerUnavailable, StateUnavailable
from popgate.domain.names import InstanceId
from popgate.ports.claims import Claims, Member
from popgate.runtime.background import Background

_log = logging.getLogger(__name__)


class MemberWatch:
    """Watches the processes of the other members, and removes a member from the cluster when its process has died.

    ``died`` waits until the process of the given member has certainly died. It does not detect a process that hangs:
    such a member is removed when its heartbeats time out.
    """

    def __init__(
        self, me: InstanceId, claims: Claims, background: Background, died: Callable[[Member], Awaitable[None]]
    ) -> None:
        self._me = me
        self._claims = claims
        self._background = background
        self._died = died
        self._watching: dict[InstanceId, asyncio.Task[None]] = {}

    def follow(self, members: Mapping[InstanceId, Member]) -> None:
        """Watch exactly ``members`` from now on, except this proxy itself."""
        for instance in [one for one in self._watching if one not in members]:
            self._watching.pop(instance).cancel()
        for instance, member in members.items():
            if instance != self._me and instance not in self._watching:
                task = self._background.spawn(self._watch(member), name=f"watch proxy {instance}")
                if task is not None:
                    self._watching[instance] = task

    async def _watch(self, member: Member) -> None:
        try:
            await self._died(member)
            _log.warning("a proxy has died", extra={"member": member.instance})
            await self._claims.remove(member.instance)
        except (PeerUnavailable, StateUnavailable) as error:  # if it dies, its heartbeats time out
            _log.info("a proxy can't be watched", extra={"member": member.instance, "reason": error.detail})
