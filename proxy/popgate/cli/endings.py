"""The exit codes of a command, and the error that ends it.

This module does not print; only ``commands`` does. ``client_errors`` has the texts for the client's errors.
"""

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command. The last three follow the shells' 128 + signal."""

    OK = 0
    FAILED = 1
    """The command failed, fully or in part."""
    USAGE = 2
    UNREACHABLE = 3
    LOCK_NOT_ACQUIRED = 75
    """Others hold the lock; `sysexits.h` calls this number a temporary failure."""
    LOCK_LOST = 76
    COMMAND_NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class CommandFailed(Exception):
    """Ends a command with an error: ``line`` is what the user reads after ``popgate: ``."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, it must not be caught by handlers of ordinary errors."""


def without_credentials(url: str) -> str:
    """Return the URL without the part before the ``@``, which may contain a password."""
    return re.sub(r"//[^/?#]*@", "//", url)
