"""Keeps credentials in the flags of `popgate-pipeline` out of the list of processes (`ps`).

This repeats what the command line of the proxy does, because the pipeline works without the proxy's code, and because
an import of `popgate_client` takes as long as `ps` would show the flags.
"""

import os
import sys
from collections.abc import Sequence

SHOWN = "***"
UNHIDDEN = "popgate-pipeline: ps shows the flags, because setproctitle is not installed: pip install 'popgate[spark]'"
HIDDEN = frozenset({"--url", "--journal", "--out", "--state"})
"""Flags whose URLs may contain credentials."""


def without_values(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `***` in place of each value that may contain a credential."""
    shown = list[str]()
    follows = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if follows:
            shown.append(SHOWN)
        elif equals and flag in HIDDEN:
            shown.append(f"{flag}={SHOWN}")
        else:
            shown.append(word)
        follows = not follows and word in HIDDEN
    return shown


def hide_credentials() -> None:
    """Replace credentials in the command line of this process, as others see it. Processes that it forks inherit this.

    `sys.argv` stays as it is.
    """
    words = sys.argv[1:]
    shown = without_values(words)
    if shown == words:
        return
    try:
        from setproctitle import setproctitle
    except ModuleNotFoundError:  # spark-submit may use a Python with no more than pyspark
        sys.stderr.write(f"{UNHIDDEN}\n")
        return
    setproctitle(os.fsencode(" ".join(["popgate-pipeline", *shown])).decode(errors="replace"))
