"""`python -m cluster.dying_proxy` is `popgate` that kills itself at one step of a switch of consume modes.

`DIE_FILE` in the working directory names the step: "before" or "after" and the mode that is then written to the
shared state, such as "before draining" or "after pull". Without such a file the proxy runs on.
"""

import os
import signal
import sys
from pathlib import Path

from popgate.adapters.redis.catalog import RedisCatalog
from popgate.cli import main
from popgate.domain.topics import GroupSpec

DIE_FILE = Path("die")

_change_group = RedisCatalog.change_group


def _die(moment: str, after: GroupSpec) -> None:
    if DIE_FILE.is_file() and DIE_FILE.read_text() == f"{moment} {after.mode}":
        os.kill(os.getpid(), signal.SIGKILL)


async def _change_and_die(
    self: RedisCatalog, before: GroupSpec | None, after: GroupSpec, version: int | None = None
) -> int:
    is_step = before is not None and before.mode is not after.mode
    if is_step:
        _die("before", after)
    changed = await _change_group(self, before, after, version)
    if is_step and changed:
        _die("after", after)
    return changed


if __name__ == "__main__":
    setattr(RedisCatalog, "change_group", _change_and_die)  # noqa: B010  # mypy refuses to assign to a method
    sys.exit(main())
