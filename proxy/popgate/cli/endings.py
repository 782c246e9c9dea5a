"""Defines the exit codes of a command, and the error that ends a command.

This module prints nothing: ``commands`` prints the errors. ``client_errors`` defines the texts for errors of the client
library.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a command. The last three values follow the convention of shells: 128 + the number of the signal."""

    OK = 0
    FAILED = 1
    """The command has failed completely or in part."""
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
    """Raised to end a command with an error. The command prints ``popgate: `` and ``line``."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Terminated(BaseException):
    """Raised when SIGTERM arrives. Like KeyboardInterrupt, it must not be caught by handlers of ordinary errors."""
