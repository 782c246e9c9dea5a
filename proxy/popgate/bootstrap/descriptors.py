"""Raises the limit on file descriptors of this process, and divides the descriptors among their uses.

If no descriptor is free, a new connection is lost, even a connection to the broker, the store or another proxy. So
clients may use at most three quarters of the descriptors, and waiting pops at most three quarters of the clients'
connections. Of the remaining quarter, half is for connections from other proxies, and half for all other uses.
"""

import resource
from dataclasses import replace

from popgate.config import ServeOptions

DESCRIPTORS_MAX = 1 << 20
"""Maximum number of descriptors that this process requests, because some systems allow billions."""


def raise_limit() -> int:
    """Raise this process's limit on descriptors to the highest value that the system allows. Return the new limit,
    which child processes inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS reports a higher limit than it allows
        return soft
    return wanted


def within(options: ServeOptions, limit: int) -> tuple[ServeOptions, int]:
    """Return ``options`` with limits that fit into ``limit`` descriptors, and the maximum number of connections from
    other proxies."""
    clients = limit * 3 // 4
    connections_max = min(options.connections_max, clients)
    parked_pops_max = min(options.parked_pops_max, max(1, connections_max * 3 // 4))
    return replace(options, connections_max=connections_max, parked_pops_max=parked_pops_max), (limit - clients) // 2
