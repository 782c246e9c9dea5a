"""Kills and restarts nodes of the broker, with the user's commands or a test harness."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from popgate.prover.errors import ProverFailed

COMMAND_SECONDS_MAX = 180.0


class Nodes(Protocol):
    """Kills and starts the broker's nodes. The first node has number 0."""

    @property
    def count(self) -> int: ...

    async def kill(self, node: int) -> None:
        """Kill a node. Return when its process has ended."""
        ...

    async def start(self, node: int) -> None:
        """Start a node. Return when it serves clients again, as a member of its cluster."""
        ...


@runtime_checkable
class Taking(Protocol):
    """The additional interface of nodes that can take the tokens of popgate's own locks from their holders."""

    async def take_tokens(self) -> None:
        """Take the token of each held lock from its holder as if the holder's node were lost for a moment. The holder's
        channel stays open, and the holder stays in the line. Does nothing if no node answers.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommandNodes:
    """Runs ``stop_command`` and ``start_command`` in the shell. ``{node}`` stands for the node's number, which is 1 for
    the first node."""

    count: int
    stop_command: str
    start_command: str

    async def kill(self, node: int) -> None:
        """Run ``stop_command``. Raises: ProverFailed."""
        await self._run(self.stop_command, node)

    async def start(self, node: int) -> None:
        """Run ``start_command``. Raises: ProverFailed."""
        await self._run(self.start_command, node)

    async def _run(self, command: str, node: int) -> None:
        command = command.replace("{node}", str(node + 1))
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        try:
            async with asyncio.timeout(COMMAND_SECONDS_MAX):
                output, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            raise ProverFailed(f"{command!r} did not end within {COMMAND_SECONDS_MAX:g} s") from error
        if process.returncode:
            last = _last_line(output.decode(errors="replace").splitlines())
            raise ProverFailed(f"{command!r} ended with {process.returncode}: {last}")


def _last_line(lines: Sequence[str]) -> str:
    return lines[-1] if lines else "it printed nothing"


_conforms: type[Nodes] = CommandNodes
