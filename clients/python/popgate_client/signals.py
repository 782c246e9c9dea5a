"""Turns SIGTERM and SIGINT into a function call during one run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals_to(function: Callable[[], None]) -> Generator[None]:
    """Call `function` for each of these signals while the block runs. Outside the main thread this has no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda _number, _frame: function()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
