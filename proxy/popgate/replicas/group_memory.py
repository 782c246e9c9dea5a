"""Remembers the numbers of replicas that popgate's groups require, for times when no proxy answers.

If no proxy answers, a keeper uses the last known numbers, so that it can continue its repairs. Before the first answer
of a proxy, the keeper does not know these numbers, and must not guess them.
"""

import logging
from collections.abc import Sequence

from popgate.domain.errors import PeerUnavailable
from popgate.domain.replica_wanted import GroupReplicas
from popgate.ports.replicas import ReplicaGroups

_log = logging.getLogger(__name__)


class RememberedGroups:
    """Queries ``groups``, and remembers the latest answer.

    ``groups`` is None if there are no proxies to query.
    """

    def __init__(self, groups: ReplicaGroups | None) -> None:
        self._groups = groups
        self._latest: Sequence[GroupReplicas] | None = None
        self._is_old = False

    async def asking(self) -> Sequence[GroupReplicas]:
        """Return the replica settings of the groups: the current ones, or the last known ones if no proxy answers.

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
