"""Provides the numbers of replicas for popgate's groups. While no proxy answers, the last known numbers are used.

A keeper must not stop its repairs because no proxy answers. But before the first answer it knows the number for none of
popgate's queues, and it must not guess.
"""

import logging
from collections.abc import Sequence

from popgate.domain.errors import PeerUnavailable
from popgate.domain.replica_wanted import GroupReplicas
from popgate.ports.replicas import ReplicaGroups

_log = logging.getLogger(__name__)


class RememberedGroups:
    """Holds the last answer of ``groups``, which is None if there are no proxies to ask."""

    def __init__(self, groups: ReplicaGroups | None) -> None:
        self._groups = groups
        self._latest: Sequence[GroupReplicas] | None = None
        self._is_old = False

    async def asking(self) -> Sequence[GroupReplicas]:
        """Return the current answer, or the last known one if no proxy answers.

        Raises: PeerUnavailable if no proxy has answered yet.
        """
        if self._groups is None:
            return ()
        try:
            self._latest = await self._groups.asking()
        except PeerUnavailable as error:
            if self._latest is None:
                raise
            if not self._is_old:
                _log.warning("the last known replica numbers of groups are used", extra={"reason": error.detail})
            self._is_old = True
        else:
            self._is_old = False
        return self._latest


_conforms: type[ReplicaGroups] = RememberedGroups
