"""How a process is told to end, and that it then ends in time, whatever hangs."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable

_log = logging.getLogger(__name__)

EXIT_SECONDS = 1.8
"""How long the whole exit may take after a signal; what is left undone then is what a kill would leave."""
PART_SECONDS = 0.3
"""How long the engine, and then the broker's adapter, may take to stop."""


@contextlib.contextmanager
def ending_on_signals(stop: asyncio.Event) -> Generator[None]:
    """Sets ``stop`` at the first SIGINT or SIGTERM; the process then ends in time, and at a second one at once."""

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        end_in_time(stop)

    with handling((signal.SIGINT, signal.SIGTERM), on_signal):
        yield


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], on_signal: Callable[[int], None]) -> Generator[None]:
    """Calls ``on_signal`` in the event loop, within this context."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def end_in_time(stop: asyncio.Event) -> None:
    """Set ``stop``, and end the process soon after. Once.

    The time runs on when the event loop has ended its work: asyncio still waits for the tasks that are left, and one of
    them may hang in a broker that does.
    """
    stop.set()
    end = threading.Timer(EXIT_SECONDS, _give_up)
    end.daemon = True
    end.start()


def _give_up() -> None:
    _log.warning("gave up waiting", extra={"part": "exit"})
    os._exit(0)


async def stop_in_time(part: str, stop: Callable[[], Awaitable[None]], *, seconds: float = PART_SECONDS) -> None:
    """Stop a part of the proxy, or give it up."""
    try:
        async with asyncio.timeout(seconds):
            await stop()
    except TimeoutError:
        _log.warning("gave up waiting", extra={"part": part})
