"""SIGTERM and SIGINT as a function call, for the time of one run."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals_to(function: Callable[[], None]) -> Generator[None]:
    """Call `function` for each of them while the block runs. Outside of the main thread it leaves them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda _number, _frame: function()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
