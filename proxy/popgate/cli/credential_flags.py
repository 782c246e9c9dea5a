"""Keeps credentials in flags out of the list of processes (``ps``).

A process can change the command line that others see. Until popgate has done so, for a fraction of a second at its
start, the flags are visible. Only a file or a variable hides a credential from the beginning.
"""

import os
import sys
from collections.abc import Sequence

from popgate.auth.keys import without_credentials
from popgate.config.options import SETTINGS

SHOWN = "***"
OF_CLIENTS = ("--url", "--http-url")
"""Flags of client commands whose URL may contain a password."""


def hidden_flags() -> frozenset[str]:
    """Return the flags whose values may contain credentials, in all commands.

    ``popgate replicas`` leaves out the prefix ``replica-`` of flags.
    """
    flags = [setting.flag for setting in SETTINGS if setting.hidden]
    return frozenset([*flags, *("--" + flag.removeprefix("--replica-") for flag in flags), *OF_CLIENTS])


def without_values(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with ``***`` in place of each value that may contain a credential, and with
    ``pg_...`` in place of each API key anywhere else."""
    hidden, shown = hidden_flags(), list[str]()
    follows = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if follows:
            shown.append(SHOWN)
        elif equals and flag in hidden:
            shown.append(f"{flag}={SHOWN}")
        else:
            shown.append(without_credentials(word))
        follows = not follows and word in hidden
    return shown


def hide_credentials() -> None:
    """Replace credentials in the command line of this process, as others see it. Processes that it forks inherit this.

    ``sys.argv`` stays as it is.
    """
    words = sys.argv[1:]
    shown = without_values(words)
    if shown == words:
        return
    from setproctitle import setproctitle  # not needed by most commands

    setproctitle(os.fsencode(" ".join(["popgate", *shown])).decode(errors="replace"))
