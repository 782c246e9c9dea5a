"""Lets the processes of a test go first on the machine's cores, so that tests beside it add little to its times."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FIRST, USUAL = -10, 0
"""Nice values: a process with the first one gets ten times the share of one with the other."""


def is_allowed() -> bool:
    """Tell whether this process may go before others, as root may."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, USUAL)
    return True


@contextmanager
def precedence(pids: Sequence[int]) -> Generator[None]:
    """Give this process, and servers that head their sessions, the first place. Servers may end meanwhile."""
    _set(pids, FIRST)
    try:
        yield
    finally:
        _set(pids, USUAL)


def _set(pids: Sequence[int], nice: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.setpriority(os.PRIO_PGRP, pid, nice)
            # Linux shares the cores among sessions first, if it has been told to, and then among their processes.
            Path(f"/proc/{pid}/autogroup").write_text(f"{nice}")
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
