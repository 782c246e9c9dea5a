"""``make prove``: popgate's own locks, ten minutes long, on three RabbitMQ nodes that are killed in turn.

Takes the flags of ``popgate prove locks``.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from popgate.cli import prove
from popgate.cli.commands import parser
from popgate.cli.endings import CommandFailed
from popgate.cli.printing import complain
from proving.nodes import ClusterNodes
from support.rabbitmq import RabbitCluster
from support.rabbitmq_releases import find_release

NODES = 3
DURATION_SECONDS = "600"


def main(flags: Sequence[str]) -> int:
    """The exit code of the command."""
    with tempfile.TemporaryDirectory(prefix="popgate-prove-") as folder:
        complain(f"starting {NODES} nodes of RabbitMQ {find_release()}")
        with RabbitCluster(Path(folder), size=NODES) as cluster:
            urls = [word for node in cluster.nodes for word in ("--amqp-url", node.amqp_url())]
            arguments = parser().parse_args(["prove", "locks", "--duration", DURATION_SECONDS, *urls, *flags])
            try:
                return prove.prove_locks(arguments, ClusterNodes(cluster))
            except CommandFailed as error:
                complain(error.line)
                return error.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
