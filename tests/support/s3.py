"""A private S3 by a third party (moto's server) on 127.0.0.1. Its data is deleted when it ends."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import httpx

from support.processes import PortBlock, Server, ServerMissingError

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
"""Environment with credentials for programs that write there; it accepts any."""


class S3Server(Server):
    """One server with one bucket, ``lake``."""

    ready_timeout_seconds = 30
    stop_timeout_seconds = 10

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("moto") is None:
            raise ServerMissingError("moto is not installed")
        self._block = PortBlock()
        (port,) = self._block.ports
        self.address = f"http://127.0.0.1:{port}"
        super().__init__(
            "s3", folder, arguments=[sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
        )

    def url(self, path: str) -> str:
        """Return the URL of an object or a folder of the bucket, in pyarrow's form."""
        return f"s3://{path}?endpoint_override={self.address}&region=us-east-1"

    def filesystem(self) -> Any:
        """Return pyarrow's own client of it."""
        s3: Any = importlib.import_module("pyarrow.fs").S3FileSystem
        return s3(access_key="key", secret_key="secret", endpoint_override=self.address, region="us-east-1")

    def _answers(self) -> bool:
        try:
            return httpx.put(f"{self.address}/lake", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False
