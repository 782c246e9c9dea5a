"""``make prove``: tests popgate's own locks for ten minutes, on three RabbitMQ nodes that are killed in turn.

Each way to a lock gets a third of the time: over AMQP, over HTTP through one proxy, and through two proxies in
alternation. The proxies are killed in turn with the nodes. The nodes also take tokens from holders that can't know, as
if the holder's node had hung (``support.lock_tokens``). Takes the flags of ``popgate prove locks``, and ``--way``
for one way alone.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lock_proof.nodes import ClusterNodes
from popgate.cli import prove
from popgate.cli.commands import parser
from popgate.cli.endings import CommandFailed
from popgate.cli.printing import complain
from support.proxy import ProxyProcess
from support.rabbitmq import RabbitCluster
from support.rabbitmq_releases import find_release
from support.redis import RedisServer

NODES = 3
DURATION_SECONDS = 600
WAYS = {"amqp": 0, "http": 1, "proxies": 2}
"""Number of proxies that each way needs."""


def main(flags: Sequence[str]) -> int:
    """Return the command's exit code for the first way that fails, or 0."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--way", action="append", choices=WAYS)
    arguments, others = own.parse_known_args(flags)
    ways = list(dict.fromkeys(arguments.way or WAYS))
    parser().parse_args(["prove", "locks", *others])  # flags that are wrong, or --help, end it before nodes start
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="popgate-prove-")))
        complain(f"starting {NODES} nodes of RabbitMQ {find_release()}")
        cluster = stack.enter_context(RabbitCluster(folder, size=NODES))
        duration = ["--duration-seconds", str(DURATION_SECONDS // len(ways))]
        codes = [prove_way(way, folder / way, cluster, [*duration, *others]) for way in ways]
    return next((code for code in codes if code), 0)


def prove_way(way: str, folder: Path, cluster: RabbitCluster, flags: Sequence[str]) -> int:
    """Return the command's exit code."""
    complain(f"locks by way of: {way}")
    amqp_urls = [node.amqp_url() for node in cluster.nodes]
    with contextlib.ExitStack() as stack:
        proxies: list[ProxyProcess] = []
        if WAYS[way]:
            redis = stack.enter_context(RedisServer(folder / "redis"))
            serve = ["--amqp-url", ",".join(amqp_urls), "--redis-url", redis.url()]
            proxies = [stack.enter_context(ProxyProcess(folder / str(one), *serve)) for one in range(WAYS[way])]
        urls = [word for proxy in proxies for word in ("--http-url", proxy.url)]
        urls = urls or [word for url in amqp_urls for word in ("--amqp-url", url)]
        try:
            arguments = parser().parse_args(["prove", "locks", *urls, *flags])
            return prove.prove_locks(arguments, ClusterNodes(cluster, proxies))
        except CommandFailed as error:
            complain(error.line)
            return error.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
