"""A terminal of a README reader: one shell in one folder, into which blocks are pasted.

The installation is this checkout's, so `popgate`, `python` and `make run` are those under test. The README's two
addresses are replaced by those of the test's own servers; nothing else in a block is changed.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from acceptance.readme import PROJECT, Block
from support.processes import Server, accepts

README_HTTP = "127.0.0.1:8080"
README_AMQP = "amqp://guest:guest@127.0.0.1:5672/"
BLOCK_TIMEOUT_SECONDS = 60


class BlockFailedError(Exception):
    """A block ended with a nonzero exit code, or printed something other than the README says."""


def reader_environment(port: int, data_folder: Path) -> dict[str, str]:
    """Return this process' environment, with the checkout's programs first and popgate's own settings replaced."""
    # The settings that curl uses by itself if its output is a terminal.
    (data_folder.parent / ".curlrc").write_text("no-progress-meter\n")
    foreign = ("POPGATE_", "MAKE", "MFLAGS", "ARGS")  # make's own: the tests may have been started with it
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **own,
        "PATH": f"{Path(sys.executable).parent}:{own['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "CURL_HOME": str(data_folder.parent),
        "POPGATE_PORT": str(port),
        "POPGATE_DATA_DIR": str(data_folder),
        "POPGATE_URL": f"http://127.0.0.1:{port}",
    }


def checkout(folder: Path) -> Path:
    """Create what a reader has after `git clone`, as far as the blocks need it; return its root."""
    root = folder / "popgate"
    shutil.copytree(PROJECT / "docs", root / "docs")
    shutil.copy(PROJECT / "README.md", root)
    return root


class Substitution:
    """The README's addresses and counts, and their replacements here."""

    def __init__(self, *, port: int, amqp_url: str = "", counts: Mapping[str, str] | None = None) -> None:
        self._pairs = {README_HTTP: f"127.0.0.1:{port}", README_AMQP: amqp_url, **(counts or {})}

    def apply(self, text: str) -> str:
        for in_readme, here in self._pairs.items():
            text = text.replace(in_readme, here)
        return text


class Terminal:
    """One shell, as a context manager that finally ends it and everything that was started in it."""

    def __init__(self, folder: Path, substitution: Substitution, environment: Mapping[str, str]) -> None:
        self._substitution = substitution
        self._shell = subprocess.Popen(
            ["bash", "-e"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            text=True,
        )

    def paste(self, block: Block, *, timeout_seconds: float = BLOCK_TIMEOUT_SECONDS) -> str:
        """Run a block to its end and return what it printed. Raises: BlockFailedError."""
        watchdog = threading.Timer(timeout_seconds, self._kill)
        watchdog.start()
        try:
            return self._paste(block)
        finally:
            watchdog.cancel()

    def _paste(self, block: Block) -> str:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        end = f"end-of-block-{secrets.token_hex(8)}"
        self._shell.stdin.write(f"{self._substitution.apply(block.text)}\necho; echo {end}\n")
        self._shell.stdin.flush()
        printed: list[str] = []
        for line in self._shell.stdout:
            if line.rstrip() == end:
                break
            printed.append(line)
        else:
            raise BlockFailedError(f"exit code {self._shell.wait()} of:\n{block.text}\nIt printed:\n{''.join(printed)}")
        output = "".join(printed)
        if not block.prints(_without_addresses(output)):
            raise BlockFailedError(f"the README says that this prints\n{block.output}\nbut it printed\n{output}")
        return output

    def close(self) -> None:
        """End the shell and its background processes. A second call does nothing."""
        if self._shell.returncode is None:
            self._kill()
            self._shell.wait()
        for pipe in (self._shell.stdin, self._shell.stdout):
            if pipe is not None:
                pipe.close()

    def _kill(self) -> None:
        """Kill the shell and its children. Its process id can't be reused, because its exit status has not been
        read.
        """
        os.killpg(self._shell.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ServerBlock(Server):
    """A block that keeps running: the README's way to start popgate."""

    ready_timeout_seconds = 30
    stop_timeout_seconds = 10

    def __init__(
        self, folder: Path, block: Block, port: int, substitution: Substitution, environment: Mapping[str, str]
    ) -> None:
        assert block.keeps_running, "other blocks are pasted into a terminal"
        self._port = port
        self._block = block
        command = f"cd {PROJECT} && exec {substitution.apply(block.text).strip()}"
        super().__init__("the README's server", folder, arguments=["bash", "-c", command], environment=environment)

    def printed_as_promised(self) -> bool:
        """Tell whether it has printed the README's output."""
        return self._block.prints(_without_addresses(self.output))

    def _answers(self) -> bool:
        request = b"GET /readyz HTTP/1.0\r\n\r\n"
        return accepts(self._port, say=request, expect=b"HTTP/1.1 200")


def _without_addresses(printed: str) -> str:
    """Restore the README's address, so that outputs can be compared."""
    return re.sub(r"127\.0\.0\.1:\d+", README_HTTP, printed)
