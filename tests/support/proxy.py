"""A real `popgate serve` process on a free port of 127.0.0.1."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from support.processes import PortBlock, Server

REQUEST_TIMEOUT_SECONDS = 40  # longer than the longest pop waits
CLUSTER_SECRET = "a secret that the proxies of these tests share"


def python_program(*arguments: str) -> tuple[str, ...]:
    """Return the command line of a program under this interpreter."""
    return (sys.executable, *arguments)


POPGATE = python_program("-m", "popgate.cli")


def popgate_command(*arguments: str) -> list[str]:
    """Return the command line of `popgate` under this interpreter, for `subprocess.run` and the like."""
    return [*POPGATE, *arguments]


def plain_client(url: str, *, timeout_seconds: float) -> httpx.Client:
    """Return a client for http only: it does not read the machine's certificates, which takes longer than most
    requests.
    """
    return httpx.Client(base_url=url, timeout=timeout_seconds, trust_env=False, verify=False)


class ProxyProcess(Server):
    """One proxy. It keeps its data folder and port over `stop`, `kill` and `restart`.

    `arguments` follow `popgate serve`; `environment` is added to this process' own without its `POPGATE_*`.
    `data_folder` (in `folder` if not given) lets two proxies, one after the other, share their data. `program` replaces
    `popgate` by one that takes the same command line. With `--redis-url`, a proxy has `CLUSTER_SECRET`, unless flags or
    `environment` give secrets.
    """

    ready_timeout_seconds = 20
    stop_timeout_seconds = 10

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        data_folder: Path | None = None,
        name: str = "popgate",
        program: Sequence[str] = POPGATE,
    ) -> None:
        self._block = PortBlock()
        (self.port,) = self._block.ports
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_folder = data_folder or folder / "data"
        serve = ["serve", "--host", "127.0.0.1", "--port", str(self.port), "--data-dir", str(self.data_folder)]
        own = {key: value for key, value in os.environ.items() if not key.startswith("POPGATE_")}
        environment = {**own, "PYTHONUNBUFFERED": "1", **(environment or {})}
        has_secret = any(word.startswith(("--secret", "POPGATE_SECRET")) for word in (*arguments, *environment))
        if "--redis-url" in arguments and not has_secret:
            environment["POPGATE_SECRET"] = CLUSTER_SECRET
        super().__init__(
            name,
            folder,
            arguments=[*program, *serve, *arguments],
            environment=environment,
        )
        self.client = plain_client(self.url, timeout_seconds=REQUEST_TIMEOUT_SECONDS)

    def _answers(self) -> bool:
        try:
            return self.client.get("/readyz").is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        super().close()
        self.client.close()
