"""`python -m support.collecting_proxy` is `popgate` with COLLECT_SECONDS taken from its environment.

With 0, no pop waits to collect more messages. For tests whose result must not depend on the broker's speed, and for the
benchmark.
"""

import os
import sys

from popgate.cli import main
from popgate.engine.subscription import collecting
from support.proxy import python_program

COLLECT_SECONDS = "COLLECT_SECONDS"


def collecting_program(seconds: float) -> tuple[str, ...]:
    """Return a program that takes the command line of `popgate` and whose pops collect for at most `seconds`."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = (f"PYTHONPATH={path}", f"{COLLECT_SECONDS}={seconds}")
    return ("env", *environment, *python_program("-m", "support.collecting_proxy"))


if __name__ == "__main__":
    setattr(collecting, COLLECT_SECONDS, float(os.environ[COLLECT_SECONDS]))
    sys.exit(main())
