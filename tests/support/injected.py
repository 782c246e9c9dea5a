"""An exception at any line of chosen modules, which represents any unforeseen fault there."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from types import FrameType, ModuleType, TracebackType
from typing import Any, Self
from zlib import crc32


class Tried(set[str]):
    """The lines at which a fault was tried. The seed chooses a third of the lines unless ``all_lines`` are to be
    tried.
    """

    def __init__(self, seed: int, *, all_lines: bool) -> None:
        super().__init__()
        self._seed = seed
        self._all_lines = all_lines

    def __contains__(self, place: object) -> bool:
        return super().__contains__(place) or not (self._all_lines or crc32(f"{self._seed} {place}".encode()) % 3 == 0)


class InjectedError(Exception):
    """Raised where a test injects a fault. No code handles this class by name."""


class FaultAtLine:
    """Raise InjectedError once inside the block: at a line of ``modules`` that is not in ``tried``, the
    ``repetition``th time that it runs.

    Watches all coroutines and callbacks of this thread, and of threads started while they are ``watched``.
    ``happened_in`` names the place; it stays empty if no such line runs that often.
    """

    def __init__(self, modules: Iterable[ModuleType], tried: Collection[str], repetition: int) -> None:
        self.happened_in = ""
        self._files = {module.__file__ for module in modules}
        self._tried = tried
        self._repetition = repetition
        self._runs: Counter[str] = Counter()
        self._before: Any = None
        self._armed = False

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watch the threads that start inside this block."""
        before = threading.gettrace()
        threading.settrace(self._entered)
        try:
            yield
        finally:
            threading.settrace(before)

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        self._armed = True
        sys.settrace(self._entered)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)
        self._armed = False

    def _entered(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return self._met if frame.f_code.co_filename in self._files else None

    def _met(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line" and self._armed and not self.happened_in:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._runs[place] += 1
            if self._runs[place] == self._repetition and place not in self._tried:
                self.happened_in = place
                raise InjectedError(place)
        return self._met
