"""The interface of a lock implementation to be proven: one small protocol, and a function that makes it.

    async def connect(amqp_url: str, lock: str, kind: LockKind) -> LockTarget: ...

    popgate prove locks --implementation my_locks:connect

Several processes call it at a time, and each acts as one client. The URL leads through a relay, which counts the
traffic, and may be cut at any moment.
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
    """A held lock. ``slot`` counts from 1. ``token`` is its fencing token, or None if the lock has none.

    ``grant`` is anything that the implementation needs to identify it again.
    """

    slot: int
    token: int | None
    grant: object = None


class LockTarget(Protocol):
    """One client of one lock, on its own connection.

    It gets one call at a time. A call that raises has an unknown outcome; the client is then closed and replaced.
    """

    async def acquire(self, wait_seconds: float) -> Held | None:
        """Return the lock, or None if it was not available within ``wait_seconds``."""
        ...

    async def verify(self, held: Held) -> bool:
        """Return whether the lock is still held."""
        ...

    async def release(self, held: Held) -> None:
        """Release the lock. Do nothing if it is lost."""
        ...

    async def set_slots(self, slots: int) -> None:
        """Set the number of slots. Never called for a mutex."""
        ...

    async def count_held(self) -> int:
        """Return how many slots are held by all clients together."""
        ...

    async def remove(self) -> None:
        """Remove what the lock has left on the broker."""
        ...

    async def close(self) -> None:
        """Close the connection, which releases all locks of this client. May be cancelled."""
        ...


@runtime_checkable
class Doubting(Protocol):
    """Also implemented by a target whose locks end after a time, and not with its connection."""

    on_doubt: Callable[[float], None]
    """Call this when a lock is no longer renewed, with the monotonic time at which the refused renewal was sent or,
    if no renewal was answered in time, that of the last successful one."""


Connect: TypeAlias = Callable[[str, str, LockKind], Awaitable[LockTarget]]

BUILT_IN = "popgate.prover.own_locks:connect"
OVER_HTTP = "popgate.prover.http_locks:connect"
"""popgate's own locks, as proxies hold them: the URLs are those of proxies."""


def load(implementation: str) -> Connect:
    """Import the function ``module:function``; modules are also looked up in the current folder. Raises:
    StartupError."""
    module_name, colon, name = implementation.partition(":")
    if not module_name or not colon or not name:
        raise StartupError(f"--implementation: must be module:function, not {implementation!r}")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
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
    return cast("Connect", connect)  # the proof shows whether it behaves as a `Connect` should
