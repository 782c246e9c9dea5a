"""The `popgate` program as a user runs it: against one proxy, with what it prints and how it ends."""

import base64
import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from support.proxy import popgate_command

TIMEOUT_SECONDS = 60


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def bodies(self) -> list[bytes]:
        """The bodies that a pop has printed."""
        rows = self.rows
        return [row["body"].encode() if "body" in row else base64.b64decode(row["body_base64"]) for row in rows]


class CommandLine:
    """Runs `popgate` commands with POPGATE_URL set to `url`."""

    def __init__(self, url: str) -> None:
        own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
        self.environment = {**own, "POPGATE_URL": url}

    def __call__(self, *arguments: str, stdin: str | bytes = b"") -> Done:
        """Run one command to its end."""
        done = subprocess.run(
            popgate_command(*arguments),
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=self.environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def shell(self, script: str) -> Done:
        """Run a bash script that calls `popgate`; pipes fail with the first command that does."""
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
        """A command that runs meanwhile, with its three streams as pipes; killed at the end."""
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
    """Wait for the end of a command that runs, and read the rest of what it prints."""
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return Done(process.returncode, out.decode(), err.decode())
