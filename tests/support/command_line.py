"""The `popgate` program as a user runs it against one proxy, with its output and exit status."""

import base64
import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from support import preloaded
from support.proxy import popgate_command

TIMEOUT_SECONDS = 60


class Done(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return standard output as decoded JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def bodies(self) -> list[bytes]:
        """Return the bodies that a pop printed."""
        rows = self.rows
        return [row["body"].encode() if "body" in row else base64.b64decode(row["body_base64"]) for row in rows]


class CommandLine:
    """Runs `popgate` commands with POPGATE_URL set to `url`. Those that run to their end may be forked from a process
    that has already imported popgate (`support.preloaded`).
    """

    def __init__(self, url: str, *, may_fork: bool = False) -> None:
        self._may_fork = may_fork
        own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
        self.environment = {**own, "POPGATE_URL": url, "NO_COLOR": "1"}

    def __call__(self, *arguments: str, stdin: str | bytes = b"") -> Done:
        """Run one command until it ends."""
        command, given = popgate_command(*arguments), stdin.encode() if isinstance(stdin, str) else stdin
        start = preloaded.Start.of(command, self.environment) if self._may_fork else None
        if start is not None:
            done = preloaded.run_to_end(start, given, TIMEOUT_SECONDS)
        else:
            done = subprocess.run(
                command,
                input=given,
                capture_output=True,
                env=self.environment,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def shell(self, script: str) -> Done:
        """Run a bash script that calls `popgate`; a pipeline fails if any of its commands fails."""
        popgate = subprocess.list2cmdline(popgate_command())
        program = f'set -o pipefail; popgate() {{ {popgate} "$@"; }}; {script}'
        done = subprocess.run(
            ["bash", "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    @contextmanager
    def running(self, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
        """Run a command inside the block with its three streams as pipes; kill it at the end."""
        with subprocess.Popen(
            popgate_command(*arguments),
            env=self.environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def ended(process: subprocess.Popen[bytes]) -> Done:
    """Wait until a running command ends, and return the rest of its output."""
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return Done(process.returncode, out.decode(), err.decode())
