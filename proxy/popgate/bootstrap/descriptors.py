"""File descriptors: as many as this process may have, and how they are shared out.

A connection that finds none is lost, and so are those to the broker, to the store and to other proxies. So clients get
three quarters at most, and pops that wait three quarters of these; the rest is for everything else, and half of it
for other proxies that come in.
"""

import resource
from dataclasses import replace

from popgate.config import ServeOptions

DESCRIPTORS_MAX = 1 << 20
"""More are not asked for, where a system allows billions."""


def raise_limit() -> int:
    """Raise the limit of this process, and of its children, as far as it may do so itself; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a limit below the one that it tells
        return soft
    return wanted


def within(options: ServeOptions, limit: int) -> tuple[ServeOptions, int]:
    """``options`` with what ``limit`` descriptors leave for clients, and the most connections of other proxies."""
    clients = limit * 3 // 4
    connections_max = min(options.connections_max, clients)
    parked_pops_max = min(options.parked_pops_max, max(1, connections_max * 3 // 4))
    return replace(options, connections_max=connections_max, parked_pops_max=parked_pops_max), (limit - clients) // 2
