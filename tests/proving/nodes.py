"""The harness's RabbitMQ nodes, for the prover to kill and to start again."""

import asyncio

from popgate.prover.nodes import Nodes
from support.rabbitmq import RabbitCluster


class ClusterNodes:
    def __init__(self, cluster: RabbitCluster) -> None:
        self._cluster = cluster

    @property
    def count(self) -> int:
        return len(self._cluster.nodes)

    async def kill(self, node: int) -> None:
        await asyncio.to_thread(self._cluster.nodes[node].sync)
        await asyncio.to_thread(self._cluster.nodes[node].kill)

    async def start(self, node: int) -> None:
        await asyncio.to_thread(self._cluster.nodes[node].start)
        await asyncio.to_thread(self._cluster.wait_whole)


_conforms: type[Nodes] = ClusterNodes
