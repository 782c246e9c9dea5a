"""Reads something in a thread, so that a live display answers keys while the server does not answer."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Read = TypeVar("Read")


class PendingRead(Generic[Read]):
    """A call of ``read`` in a thread of its own, which does not keep the process from ending.

    ``ended`` is called in that thread after the call.
    """

    def __init__(self, read: Callable[[], Read], ended: Callable[[], None]) -> None:
        self._read = read
        self._ended = ended
        self._found: list[Read] = []
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        threading.Thread(target=self._run, name="read", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Return whether the call has ended."""
        return self._is_done.is_set()

    def result(self) -> Read:
        """Return what the call has returned, or raise what it has raised. It must have ended."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._read())
        except BaseException as error:  # it is raised in the thread that asks for the result
            self._error = error
        self._is_done.set()
        self._ended()
