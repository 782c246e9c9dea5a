"""The processes that the prover kills and restarts: the harness's RabbitMQ nodes, and the proxies over them."""

import asyncio
import contextlib
from collections.abc import Sequence
from subprocess import TimeoutExpired

from popgate.prover.nodes import Nodes, Taking
from support.lock_tokens import take_tokens
from support.processes import Server, ServerFailedError
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitCluster


class ClusterNodes:
    """The nodes of ``cluster``, then the ``proxies``."""

    def __init__(self, cluster: RabbitCluster, proxies: Sequence[ProxyProcess] = ()) -> None:
        self._cluster = cluster
        self._proxies = proxies

    @property
    def count(self) -> int:
        return len(self._cluster.nodes) + len(self._proxies)

    async def kill(self, node: int) -> None:
        if node < len(self._cluster.nodes):
            await asyncio.to_thread(self._cluster.nodes[node].sync)
        await asyncio.to_thread(self._process(node).kill)

    async def start(self, node: int) -> None:
        await asyncio.to_thread(self._process(node).start)
        if node < len(self._cluster.nodes):
            await asyncio.to_thread(self._cluster.wait_whole)

    async def take_tokens(self) -> None:
        running = next(node for node in self._cluster.nodes if node.is_running())
        with contextlib.suppress(ServerFailedError, TimeoutExpired):  # it was just killed
            await asyncio.to_thread(take_tokens, running)

    def _process(self, node: int) -> Server:
        return [*self._cluster.nodes, *self._proxies][node]


_conforms: type[Nodes] = ClusterNodes
_taking_conforms: type[Taking] = ClusterNodes
