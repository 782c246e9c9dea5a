"""The processes that the prover kills and restarts: the harness's RabbitMQ nodes, and the proxies over them."""

import asyncio
from collections.abc import Sequence

from popgate.prover.nodes import Nodes
from support.processes import Server
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

    def _process(self, node: int) -> Server:
        return [*self._cluster.nodes, *self._proxies][node]


_conforms: type[Nodes] = ClusterNodes
