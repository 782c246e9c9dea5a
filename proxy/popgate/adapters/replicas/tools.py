"""Runs RabbitMQ's command line tools on this machine or on another machine.

Another machine is reached through a prefix, such as ``ssh rabbit-1`` or ``kubectl exec rabbit-0 --``.

The prefix and the tool with its arguments are executed as a list of words, without a local shell. But ``ssh`` joins its
words, and passes them to a remote shell. Because a queue may have any name, the tool and its arguments must be quoted
for this shell. If the prefix contains several ``ssh``, as in ``ssh bastion ssh rabbit-1``, they are quoted once for
each.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import orjson

from popgate.domain.errors import BrokerUnavailable
from popgate.ports.replicas import Proof, ReplicaRefused

_log = logging.getLogger(__name__)

TOOLS_AT_ONCE_MAX = 2
"""Maximum number of tools that run at the same time. Each tool starts an Erlang virtual machine, which takes a third of
a second of one CPU core."""
TIMEOUT_SECONDS = 60.0
WORDS_LENGTH_MAX = 300
REMOTE_SHELLS = frozenset({"ssh", "autossh"})
"""Commands that pass the words after them to a remote shell. They may occur anywhere in a prefix, as in ``sudo ssh`` or
``timeout 10 ssh``."""
REFUSALS = frozenset({64, 65, 69, 70})
"""Exit codes (``sysexits.h``) with which a tool ends if the node refused the command. Some of them can also mean that
the node did not answer. The output of the tool then shows the difference (``_UNREACHABLE``)."""
UTF_8 = {"LC_ALL": "C.UTF-8"}
"""Environment variables of the tools. With another locale, the tools decode names in their arguments as Latin-1, and
since RabbitMQ 4.0 also encode their output as Latin-1. ``ssh`` passes this variable to the remote machine if it is
configured to do so, as it is on Debian."""
_UNREACHABLE = ("unable to perform an operation on node", "nodedown", "TCP connection", "epmd", "timed out", "timeout")


class BrokerTools:
    """Runs the tools through one of ``prefixes``, each of which reaches a node of the same cluster.

    An empty prefix means this machine. If the prefix that worked last fails, the next one is tried.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = [shlex.split(prefix) for prefix in prefixes]
        self._at = 0
        self._turns = asyncio.Semaphore(TOOLS_AT_ONCE_MAX)

    async def run_json(self, tool: str, *arguments: str) -> Any:
        """Run a tool and return its JSON output, decoded. Raises: BrokerUnavailable, ReplicaRefused."""
        said = await self.run(tool, "--formatter", "json", *arguments)
        try:
            return orjson.loads(said)
        except orjson.JSONDecodeError as error:  # also if not UTF-8: never guess the name of a queue
            raise BrokerUnavailable(
                f"{tool} {arguments[0]} did not answer in JSON and UTF-8 (set LC_ALL=C.UTF-8 where it runs): "
                f"{_words(said)}"
            ) from error

    async def run(self, tool: str, *arguments: str, prove: Proof | None = None) -> bytes:
        """Run a tool and return its standard output. ``prove`` is called right before each attempt to start the tool.

        Raises: BrokerUnavailable, ReplicaRefused, and the errors of ``prove``.
        """
        reasons: list[str] = []
        for step in range(len(self._prefixes)):
            at = (self._at + step) % len(self._prefixes)
            try:
                said = await self._run(self._prefixes[at], tool, *arguments, prove=prove)
            except BrokerUnavailable as error:
                reasons.append(error.detail)
                continue
            self._at = at
            return said
        raise BrokerUnavailable("; ".join(reasons) or f"there is no way to run {tool}")

    async def _run(self, prefix: Sequence[str], tool: str, *arguments: str, prove: Proof | None) -> bytes:
        words = [tool, "--quiet", *arguments]
        for _ in range(sum(PurePath(word).name in REMOTE_SHELLS for word in prefix)):
            words = [shlex.quote(word) for word in words]
        words = [*prefix, *words]
        async with self._turns:
            if prove is not None:
                await prove()
            try:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=_environment(),
                    start_new_session=True,  # a Ctrl-C then reaches only popgate, which kills the tool
                )
            except OSError as error:
                raise BrokerUnavailable(f"can't run {words[0]}: {error.strerror or error}") from error
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    out, complaint = await process.communicate()
            except TimeoutError as error:
                raise BrokerUnavailable(f"{tool} did not end within {TIMEOUT_SECONDS:g} s") from error
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # the tools have child processes
                    await asyncio.shield(process.wait())
        if process.returncode == 0:
            return out
        said = _words(complaint or out)
        if process.returncode in REFUSALS and not any(sign in said for sign in _UNREACHABLE):
            raise ReplicaRefused(f"{tool} {arguments[0]}: {said}")
        # The prefix may contain a credential, and callers with a key read this error.
        raise BrokerUnavailable(f"{tool} ended with {process.returncode}: {said}")


def _environment() -> dict[str, str]:
    """Return the environment of a tool. It contains no settings of popgate, because they may contain credentials, and
    ``ssh`` may pass variables on to another machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith("POPGATE_")} | UTF_8


def _words(text: bytes) -> str:
    """Return the beginning of ``text`` as one line, for an error message."""
    words = " ".join(text.decode(errors="replace").split()).removeprefix("Error: ")
    return words if len(words) <= WORDS_LENGTH_MAX else words[: WORDS_LENGTH_MAX - 3] + "..."
