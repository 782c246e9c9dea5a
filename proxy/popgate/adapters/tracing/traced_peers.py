"""Sends the present trace context with each client's request that is forwarded to another proxy."""

from popgate.adapters.peers import HttpPeers
from popgate.adapters.tracing.contexts import with_context
from popgate.domain.names import InstanceId
from popgate.ports.peers import ForwardedAnswer, ForwardedRequest


class TracedPeers(HttpPeers):
    """Peers that continue the trace of a forwarded request."""

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        request = request._replace(headers=with_context(request.headers))
        return await super().forward(to, request, wait_seconds=wait_seconds)
