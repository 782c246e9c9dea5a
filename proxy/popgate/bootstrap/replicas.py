"""Assembles a replica keeper, for ``popgate replicas`` and for proxies with --replica-keeper."""

import asyncio
import contextlib
import os
import random
import shutil
import socket
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import entry_points
from typing import Any, cast

from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.replicas.backend import RabbitReplicas
from popgate.adapters.replicas.management import Management
from popgate.adapters.replicas.proxy_groups import ProxyReplicaGroups
from popgate.adapters.replicas.tools import BrokerTools
from popgate.config import ServeOptions
from popgate.config.options import BUILT_IN_PLACEMENT
from popgate.domain.errors import StartupError
from popgate.domain.replica_placement import spread
from popgate.domain.replica_plan import ReplicaLimits
from popgate.domain.replica_wanted import ReplicaPolicies
from popgate.domain.replicas import Placement
from popgate.ports.replicas import ReplicaGroups
from popgate.replicas.keeper import ReplicaKeeper
from popgate.replicas.keeper_lock import BrokerKeeperLock
from popgate.replicas.options import KeeperOptions
from popgate.replicas.placing import GuardedPlacement
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock

PLACEMENT_GROUP = "popgate.placement"
LOCK_RENEWALS = 3
"""Minimum number of times that the keeper's lock is renewed at RabbitMQ within RabbitMQ's consumer_timeout."""
LOCK_RENEW_SECONDS_MAX = 20.0
"""Maximum number of seconds between two renewals of the keeper's lock.

A keeper whose node is cut off from the other nodes can make no changes. It notices only at a renewal that it has lost
the lock. Without Khepri (always before RabbitMQ 4.0, never from 4.3 on), RabbitMQ's ``pause_minority`` closes the
keeper's connection.
"""


@contextlib.asynccontextmanager
async def replica_keeper(
    options: ServeOptions, rabbit: RabbitOptions, groups: ReplicaGroups | None = None
) -> AsyncGenerator[ReplicaKeeper]:
    """Yield a keeper with a separate connection for its lock. The keeper is not running yet. Raises: StartupError."""
    # Slow to load, and not needed without a replica keeper.
    from popgate.adapters.rabbitmq.lock_connection import RabbitLockConnection

    clock, background = SystemClock(), Background()
    place = placement(options.replica_placement)
    broker = RabbitReplicas(
        rabbit.vhost,
        Management(options.management_urls, rabbit.vhost) if options.management_urls else None,
        broker_tools(options.replica_commands),
        dict(options.replica_zones),
        sees_owners=options.replica_move_leaders,
    )
    connection = RabbitLockConnection(rabbit)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(broker.stop)
        await connection.start()
        stack.push_async_callback(connection.stop)
        stack.push_async_callback(background.stop)
        lock = BrokerKeeperLock(
            connection,
            clock,
            background,
            holder=f"{socket.gethostname()}:{os.getpid()}",
            renew_seconds=min(LOCK_RENEW_SECONDS_MAX, options.consumer_timeout_seconds / LOCK_RENEWALS),
        )
        yield ReplicaKeeper(
            broker, lock, keeper_options(options), place=place, clock=clock, chance=random.Random(), groups=groups
        )


@contextlib.asynccontextmanager
async def proxy_groups(
    options: ServeOptions, rabbit: RabbitOptions, token: Callable[[], str] | None
) -> AsyncGenerator[ReplicaGroups | None]:
    """Yield a source that requests the groups' replica settings from the configured proxies, with the token that
    ``token`` returns. Yield None if no proxies are configured."""
    if not options.replica_groups_urls:
        yield None
        return
    groups = ProxyReplicaGroups(options.replica_groups_urls, rabbit.vhost, token)
    try:
        yield groups
    finally:
        await groups.close()


@contextlib.asynccontextmanager
async def at_work(options: ServeOptions, rabbit: RabbitOptions, groups: ReplicaGroups) -> AsyncGenerator[ReplicaKeeper]:
    """Run a keeper in the process of a proxy, on standby or active. Raises: StartupError."""
    async with replica_keeper(options, rabbit, groups) as keeper:
        running = asyncio.create_task(keeper.run(), name="popgate replica keeper")
        try:
            yield keeper
        finally:
            running.cancel()
            await asyncio.wait({running})


def keeper_options(options: ServeOptions) -> KeeperOptions:
    return KeeperOptions(
        policies=ReplicaPolicies(policies=options.replica_policies, default=options.min_replicas),
        limits=ReplicaLimits(
            changes_max=options.replica_changes_max,
            changes_per_node_max=options.replica_changes_per_node_max,
            recovery_interval_seconds=options.replica_recovery_interval_seconds,
            forget_after_seconds=options.replica_forget_after_seconds,
            stall_messages_max=options.replica_stall_messages_max,
            allow_stall=options.replica_allow_stall,
            move_leaders=options.replica_move_leaders,
        ),
        check_interval_seconds=options.replica_check_interval_seconds,
    )


def placement(name: str) -> Placement:
    """Return the placement function with this name: the built-in one, or a plug-in's. A plug-in that can't be loaded
    prevents the start; its errors after the start do not stop the keeper. Raises: StartupError."""
    if name == BUILT_IN_PLACEMENT:
        return spread
    found = entry_points(group=PLACEMENT_GROUP)
    known = ", ".join([BUILT_IN_PLACEMENT, *sorted(found.names)])
    if name not in found.names:
        raise StartupError(
            f"replica_placement: there is no entry point {name!r} in the group {PLACEMENT_GROUP}; choose one of {known}"
        )
    try:
        place: Any = found[name].load()
    except (Exception, SystemExit) as error:  # a plug-in's module may raise any exception
        raise StartupError(f"replica_placement: {name!r} can't be loaded ({error!r}); choose one of {known}") from error
    if not callable(place):
        raise StartupError(f"replica_placement: {name!r} is not a function (queue, members, nodes) -> names of nodes")
    return GuardedPlacement(cast("Placement", place), name)


def broker_tools(prefixes: tuple[str, ...] | None) -> BrokerTools | None:
    """Return the interface to RabbitMQ's command-line tools, with the prefixes of --replica-commands. Return None if
    there are no tools."""
    if prefixes is None:
        return BrokerTools([""]) if shutil.which("rabbitmqctl") is not None else None
    return BrokerTools(prefixes) if prefixes else None
