"""Creates the parts of a proxy that are traced if the settings request it."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

from popgate import __version__
from popgate.adapters.peers import HttpPeers
from popgate.bootstrap.endings import stop_in_time
from popgate.config import ServeOptions
from popgate.domain.errors import StartupError
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.engine import Engine
from popgate.locks.hosted import HostedLocks

TAIL_SECONDS = 0.5
"""Maximum seconds to send the last spans when the process exits."""
WithinTrace = Callable[[Iterable[tuple[bytes, bytes]]], AbstractContextManager[None]]


def made_engine(options: ServeOptions, context: EngineContext, stack: contextlib.AsyncExitStack) -> Engine:
    """Return the engine. Let ``stack`` stop the export of its spans. Raises: StartupError."""
    if not options.tracing:
        return Engine(context)
    try:
        # These modules need an optional extra.
        from popgate.adapters.tracing.exporting import Exporting
        from popgate.adapters.tracing.traced_engine import TracedEngine
    except ImportError as error:
        raise StartupError(
            f"--tracing needs packages that are not installed ({error}): install popgate[tracing] where popgate runs"
        ) from error
    exporting = Exporting(context.instance, __version__)
    stack.push_async_callback(stop_in_time, "tracing", exporting.stop, seconds=TAIL_SECONDS)
    return TracedEngine(context, exporting.tracer)


def peers_type(options: ServeOptions) -> type[HttpPeers]:
    """Return the type of what sends requests to the other proxies."""
    if not options.tracing:
        return HttpPeers
    from popgate.adapters.tracing.traced_peers import TracedPeers

    return TracedPeers


def lease_traces(options: ServeOptions, engine: Engine) -> Callable[[bytes], bytes] | None:
    """Return what tells other proxies the trace contexts of leases, or None if nothing is traced."""
    if not options.tracing:
        return None
    from popgate.adapters.tracing.traced_engine import TracedEngine

    return engine.other_leases.answer if isinstance(engine, TracedEngine) else None


def locks_type(options: ServeOptions, engine: Engine) -> Callable[..., HostedLocks]:
    """Return what creates the locks of a proxy with this ``engine``."""
    if not options.tracing:
        return HostedLocks
    from popgate.adapters.tracing.traced_engine import TracedEngine
    from popgate.adapters.tracing.traced_locks import TracedLocks

    return partial(TracedLocks, engine.spans) if isinstance(engine, TracedEngine) else HostedLocks


def within_trace(options: ServeOptions) -> WithinTrace | None:
    """Return the function that continues the trace of a request, or None if nothing is traced."""
    if not options.tracing:
        return None
    from popgate.adapters.tracing import contexts

    return contexts.within_trace
