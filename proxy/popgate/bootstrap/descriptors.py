"""File descriptors: the limit of this process, and how it is shared out.

A connection that finds no descriptor is lost, including those to the broker, the store and other proxies. So clients
get at most three quarters of the descriptors, and waiting pops at most three quarters of these. The rest is for
everything else, and half of it for connections from other proxies.
"""

import resource
from dataclasses import replace

from popgate.config import ServeOptions

DESCRIPTORS_MAX = 1 << 20
"""Maximum number of descriptors to ask for, on systems that allow billions."""


def raise_limit() -> int:
    """Raise this process's limit, which its children inherit, as far as it may; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a limit below the one that it reports
        return soft
    return wanted


def within(options: ServeOptions, limit: int) -> tuple[ServeOptions, int]:
    """Return ``options`` reduced to ``limit`` descriptors, and the maximum number of connections from other proxies."""
    clients = limit * 3 // 4
    connections_max = min(options.connections_max, clients)
    parked_pops_max = min(options.parked_pops_max, max(1, connections_max * 3 // 4))
    return replace(options, connections_max=connections_max, parked_pops_max=parked_pops_max), (limit - clients) // 2
