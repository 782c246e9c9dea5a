"""What popgate's groups ask for, also while nobody can be asked: what was known last stands in.

A keeper must not stop repairing because no proxy answers, and must not begin by guessing: before the first answer it
knows of no number that a queue of popgate's is to have.
"""

import logging
from collections.abc import Sequence

from popgate.domain.errors import PeerUnavailable
from popgate.domain.replica_wanted import GroupReplicas
from popgate.ports.replicas import ReplicaGroups

_log = logging.getLogger(__name__)


class RememberedGroups:
    """``groups`` None: there are no proxies to be asked, and nothing is remembered."""

    def __init__(self, groups: ReplicaGroups | None) -> None:
        self._groups = groups
        self._latest: Sequence[GroupReplicas] | None = None
        self._is_old = False

    async def asking(self) -> Sequence[GroupReplicas]:
        """Raises: PeerUnavailable, where none has ever answered."""
        if self._groups is None:
            return ()
        try:
            self._latest = await self._groups.asking()
        except PeerUnavailable as error:
            if self._latest is None:
                raise
            if not self._is_old:
                _log.warning("what groups ask for is taken as it was known last", extra={"reason": error.detail})
            self._is_old = True
        else:
            self._is_old = False
        return self._latest


_conforms: type[ReplicaGroups] = RememberedGroups
