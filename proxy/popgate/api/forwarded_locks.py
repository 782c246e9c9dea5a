"""Forwards requests that contain a lock's token to the proxy that holds the lock.

If that proxy is no longer a member of the cluster, it has lost its locks. This proxy then answers the request itself:
the token is not the token of a held lock.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Scope

from popgate.api.connection import Connection
from popgate.api.forwarding import forward_request, forwarded_request
from popgate.api.visit import visit_of
from popgate.domain.names import InstanceId
from popgate.locks.hosted_grants import holder_of
from popgate.ports.peers import ForwardedAnswer, Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class LockPeers:
    """Forwards requests about locks from the proxy ``me`` to the other proxies.

    ``is_member`` returns whether a proxy is a member of the cluster; in case of doubt, it asks the store. ``sent`` is
    called with the proxy to which a request is sent.
    """

    me: InstanceId
    peers: Peers
    is_member: Callable[[InstanceId], Awaitable[bool]]
    sent: Callable[[InstanceId], None]

    async def answer(
        self, token: str, scope: Scope, body: bytes, connection: Connection | None
    ) -> ForwardedAnswer | None:
        """Return the answer of the proxy that holds the lock of ``token``, or None if this proxy must answer.

        Raises: PeerUnavailable if the other proxy does not answer but may still hold the lock; StateUnavailable;
        ClientGone.
        """
        holder = holder_of(token)
        if holder is None or holder == self.me or not await self.is_member(holder):
            return None
        self.sent(holder)
        request = forwarded_request(scope, body, scope["headers"])
        return await forward_request(
            self.peers, holder, request, wait_seconds=0.0, connection=connection, visit=visit_of(scope)
        )
