"""What an implementation of locks offers to be proven: one small interface, and a function that makes it.

    async def connect(amqp_url: str, lock: str, kind: LockKind) -> LockTarget: ...

    popgate prove locks --implementation my_locks:connect

It is called in several processes at a time, each of which acts as one client. The URL leads through a relay, which
counts what goes by, and may be cut at any moment.
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
    """A lock that is held. ``slot`` counts from 1. ``token`` is its fencing token, None where the lock has none.

    ``grant`` is whatever the implementation needs to know it again.
    """

    slot: int
    token: int | None
    grant: object = None


class LockTarget(Protocol):
    """One client of one lock, on a connection of its own. One call at a time; whatever raises has an unknown outcome,
    and the client is then closed and made anew."""

    async def acquire(self, wait_seconds: float) -> Held | None:
        """The lock, or None where it could not be had for as long as ``wait_seconds``."""
        ...

    async def verify(self, held: Held) -> bool:
        """Whether it is still held."""
        ...

    async def release(self, held: Held) -> None:
        """Let go. Of a lock that is lost: does nothing."""
        ...

    async def set_slots(self, slots: int) -> None:
        """Let the lock have so many slots from now on. Never asked of a mutex."""
        ...

    async def count_held(self) -> int:
        """How many slots are held, by anybody."""
        ...

    async def remove(self) -> None:
        """Remove what the lock has left on the broker."""
        ...

    async def close(self) -> None:
        """Close the connection; what this client holds is free then. May be cancelled."""
        ...


@runtime_checkable
class Doubting(Protocol):
    """What a target has, too, whose locks end by time, and not with its connection."""

    on_doubt: Callable[[float], None]
    """To be called where a lock is not renewed any more, with the monotonic time at which the refused renewal was sent;
    where no renewal was answered in time, that of the last good one."""


Connect: TypeAlias = Callable[[str, str, LockKind], Awaitable[LockTarget]]

BUILT_IN = "popgate.prover.own_locks:connect"
OVER_HTTP = "popgate.prover.http_locks:connect"
"""Popgate's own locks, as proxies hold them: the URLs are those of proxies."""


def load(implementation: str) -> Connect:
    """What ``module:function`` names; modules are also looked for in the current folder. Raises: StartupError."""
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
    return cast("Connect", connect)  # whether it does what it should is what is to be proven
