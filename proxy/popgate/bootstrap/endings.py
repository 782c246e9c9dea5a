"""Ends a process on a signal, within a time limit, even if a part of it hangs."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator

_log = logging.getLogger(__name__)

EXIT_SECONDS = 1.8
"""Maximum seconds from a signal to the end of the process. Work that is unfinished then is abandoned, as if the process
was killed."""
PART_SECONDS = 0.3
"""Maximum seconds to stop one part of the proxy, such as the engine or the broker's adapter."""


@contextlib.contextmanager
def ending_on_signals(stop: asyncio.Event) -> Generator[None]:
    """Set ``stop`` at the first SIGINT or SIGTERM, and end the process within ``EXIT_SECONDS``. A second signal ends
    the process immediately."""
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        end_in_time(stop)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def end_in_time(stop: asyncio.Event, code: int = 0) -> None:
    """Set ``stop``, and end the process after at most ``EXIT_SECONDS``. If the process has not ended by itself then,
    its exit code is ``code``.

    Further calls have no effect. The timer runs in a thread, and continues after the main task of the event loop has
    ended, because asyncio still waits for the remaining tasks, and one of them may wait for a broker that hangs.
    """
    stop.set()
    end = threading.Timer(EXIT_SECONDS, _give_up, [code])
    end.daemon = True
    end.start()


def _give_up(code: int) -> None:
    _log.warning("gave up waiting", extra={"part": "exit"})
    os._exit(code)


async def stop_in_time(part: str, stop: Callable[[], Awaitable[None]], *, seconds: float = PART_SECONDS) -> None:
    """Stop a part of the proxy by calling ``stop``. If it takes longer than ``seconds``, cancel it and log a
    warning."""
    try:
        async with asyncio.timeout(seconds):
            await stop()
    except TimeoutError:
        _log.warning("gave up waiting", extra={"part": part})
