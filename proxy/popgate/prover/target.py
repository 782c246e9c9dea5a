"""Defines the interface that a lock implementation must have for a proof: a function that creates clients, and their
protocol.

    async def connect(amqp_url: str, lock: str, kind: LockKind) -> LockTarget: ...

    popgate prove locks --implementation my_locks:connect

Several processes call the function, and each of them acts as one client. The URL is the URL of a relay, which counts
the traffic and may abort the connection at any moment.
"""

import importlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast, runtime_checkable

from popgate.domain.errors import StartupError
from popgate.domain.locks import LockKind


@dataclass(frozen=True, slots=True)
class Held:
    """A held lock. ``slot`` is at least 1. ``token`` is the fencing token, or None if the lock has no fencing tokens.

    ``grant`` is any object by which the implementation recognizes this held lock.
    """

    slot: int
    token: int | None
    grant: object = None


class LockTarget(Protocol):
    """A client that uses one lock, with its own connection.

    The prover calls only one method at a time. If a call raises, its outcome is unknown. The prover then closes the
    client and replaces it.
    """

    async def acquire(self, wait_seconds: float) -> Held | None:
        """Acquire the lock and return it. Return None if it was not available within ``wait_seconds``."""
        ...

    async def verify(self, held: Held) -> bool:
        """Return whether the lock is still held."""
        ...

    async def release(self, held: Held) -> None:
        """Release the lock. Do nothing if it has been lost."""
        ...

    async def set_slots(self, slots: int) -> None:
        """Set the number of slots of the lock. The prover never calls this method for a mutex."""
        ...

    async def count_held(self) -> int:
        """Return the number of slots that all clients together hold."""
        ...

    async def remove(self) -> None:
        """Remove the queues or records that the lock has left on the broker."""
        ...

    async def close(self) -> None:
        """Close the connection, which releases all locks of this client. The prover may cancel this call."""
        ...


@runtime_checkable
class Renewing(Protocol):
    """The additional interface of a target that can renew a held lock."""

    async def renew(self, held: Held) -> int | None:
        """Renew the lock, and return its present fencing token. Return None if the lock is lost, also if another client
        has held it since it was acquired, and has released it.
        """
        ...


@runtime_checkable
class Doubting(Protocol):
    """The additional interface of a target whose locks end after a time to live, and not with its connection."""

    on_doubt: Callable[[float], None]
    """The target must call this function when it no longer renews a lock.

    The argument is a monotonic time. If a renewal was refused, it is the time at which that renewal was sent. If no
    renewal was answered in time, it is the time at which the last successful renewal was sent.
    """


Connect: TypeAlias = Callable[[str, str, LockKind], Awaitable[LockTarget]]

BUILT_IN = "popgate.prover.own_locks:connect"
OVER_HTTP = "popgate.prover.http_locks:connect"
"""The implementation that uses popgate's own locks over HTTP. Proxies hold these locks, and the URLs are the URLs of
proxies."""


def load(implementation: str) -> Connect:
    """Import the function that ``module:function`` names, and return it. A module of the user may be in the current
    folder. popgate's own modules import nothing from there, where other users may have put files.
    Raises: StartupError."""
    module_name, colon, name = implementation.partition(":")
    if not module_name or not colon or not name:
        raise StartupError(f"--implementation: must be module:function, not {implementation!r}")
    here = str(Path.cwd())
    if implementation not in (BUILT_IN, OVER_HTTP) and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise StartupError(
            f"--implementation: {module_name} can't be imported: {type(error).__name__}: {error}"
        ) from error
    connect: object = getattr(module, name, None)
    if not callable(connect):
        raise StartupError(f"--implementation: {module_name} has no function {name}")
    return cast("Connect", connect)  # the proof shows whether the function is a `Connect`
