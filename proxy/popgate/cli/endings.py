"""Defines the exit codes of a command, and the error that ends a command.

This module prints nothing. Only ``commands`` prints. ``client_errors`` defines the texts for the client's errors.
"""

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command. The last three follow the convention of shells: 128 + the number of the signal."""

    OK = 0
    FAILED = 1
    """The command failed completely or in part."""
    USAGE = 2
    UNREACHABLE = 3
    LOCK_NOT_ACQUIRED = 75
    """Other clients hold the lock. `sysexits.h` uses this number for a temporary failure."""
    LOCK_LOST = 76
    COMMAND_NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class CommandFailed(Exception):
    """Ends a command with an error. The user reads ``line`` after ``popgate: ``."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, this must not be caught by handlers of ordinary errors."""


def without_credentials(url: str) -> str:
    """Return the URL without the part before the ``@``, because that part may contain a password."""
    return re.sub(r"//[^/?#]*@", "//", url)
