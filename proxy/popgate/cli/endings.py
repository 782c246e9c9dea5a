"""How a command ends: the exit codes, and the complaint that ends it.

Does not print: ``commands`` does, in one place. The words for what the client raised stand in ``client_errors``.
"""

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command returns to the shell. The last three follow the shells' 128 + signal."""

    OK = 0
    FAILED = 1
    """It failed, or a part of it did."""
    USAGE = 2
    UNREACHABLE = 3
    LOCK_NOT_ACQUIRED = 75
    """Others hold it; `sysexits.h` calls this number a temporary failure."""
    LOCK_LOST = 76
    COMMAND_NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class CommandFailed(Exception):
    """A command's own complaint: ``line`` is what the user reads after ``popgate: ``."""

    def __init__(self, line: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(line)
        self.line = line
        self.code = code


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, no handler of ordinary errors may take it."""


def without_credentials(url: str) -> str:
    """The URL as it may be shown: a password may stand in it, before the ``@``."""
    return re.sub(r"//[^/?#]*@", "//", url)
