"""Tokens of locks that another proxy holds: what is asked with them is passed on to that one, whole.

A holder that is no member of the cluster any more has lost its locks with its life: then this proxy answers, as for any
token under which nothing is held.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Scope

from popgate.api.connection import Connection
from popgate.api.passing import pass_on_request, passed_answer
from popgate.domain.names import InstanceId
from popgate.locks.hosted_grants import holder_of
from popgate.ports.peers import PassedAnswer, Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPeers:
    """The way from the proxy ``me`` to the other ones. ``is_member`` answers by the store where it is in doubt;
    ``sent`` is told whom a request goes to."""

    me: InstanceId
    peers: Peers
    is_member: Callable[[InstanceId], Awaitable[bool]]
    sent: Callable[[InstanceId], None]

    async def answer(self, token: str, scope: Scope, body: bytes, connection: Connection | None) -> PassedAnswer | None:
        """What the proxy answers that holds the lock of ``token``; None: this one has to.

        Raises: PeerUnavailable, where it does not answer, and may still hold it; StateUnavailable; ClientGone.
        """
        holder = holder_of(token)
        if holder is None or holder == self.me or not await self.is_member(holder):
            return None
        self.sent(holder)
        request = pass_on_request(scope, body, scope["headers"])
        return await passed_answer(self.peers, holder, request, wait_seconds=0.0, connection=connection)
