"""Takes a backup of a running proxy over HTTP, and reads it."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import httpx

from popgate.cli.endings import CommandFailed
from popgate.cli.progress import Progress
from popgate_client import Client, RequestInvalid, ServerUnreachable
from popgate_client.exchange import Exchanges
from popgate_client.tokens import TokenSource
from popgate_client.transport import connection
from popgate_client.wire import JsonObject, Request, accepted

PATH = "/v1/admin/backup"
POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.02, 0.5
DELETE_SECONDS_MAX = 2.0
"""Maximum seconds of attempts to delete the backup. If they fail, the proxy deletes it later."""
OTHER_SECONDS_MAX = 10.0
"""Maximum seconds to wait while the proxy has another backup."""
SILENCE_SECONDS = 60.0
"""Maximum seconds without data while the archive is read."""


class PartReader:
    """Reads the parts of an answer as a file, for ``tarfile``. Raises: CommandFailed if the answer is interrupted."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        pieces = [self._rest]
        have = len(self._rest)
        while have < size:
            try:
                part = next(self._parts, None)
            except httpx.HTTPError as error:
                raise CommandFailed(f"the backup was interrupted ({error}); run the command again") from error
            if part is None:
                break
            pieces.append(part)
            have += len(part)
        content = b"".join(pieces)
        self._rest = content[size:]
        return content[:size]


class RunningProxy:
    """A running proxy, whose backup this command takes."""

    def __init__(self, client: Client, url: str, token: TokenSource | None) -> None:
        self._client = client
        self._exchanges = Exchanges()
        self._url = url
        self._token = token
        self._is_own = False

    def take(self, progress: Progress) -> None:
        """Begin a backup, and wait until it is ready. Raises: CommandFailed, PopgateError."""
        self._begin(progress)
        self._is_own = True
        pause = POLL_SECONDS_MIN
        while True:
            state: JsonObject = self._client.perform(self._exchanges.read(PATH))
            if state["phase"] == "ready":
                return
            if state["phase"] != "copying":
                raise CommandFailed(f"the backup failed: {state.get('failure') or 'another client deleted it'}")
            progress.say(f"copying the store: {_share(state)}")
            time.sleep(pause)
            pause = min(POLL_SECONDS_MAX, pause * 1.5)

    def _begin(self, progress: Progress) -> None:
        """Begin a backup. If there is one already, wait: the proxy gives it up if its client was killed."""
        until = time.monotonic() + OTHER_SECONDS_MAX
        while True:
            try:
                self._client.perform(self._exchanges.act(Request(method="POST", path=PATH)))
                return
            except RequestInvalid as error:
                if error.code != "conflict" or time.monotonic() > until or "there is a backup" not in error.detail:
                    raise
                progress.say("there is a backup already; waiting until its client has read it")
            time.sleep(POLL_SECONDS_MAX)

    @contextmanager
    def archive(self) -> Generator[PartReader]:
        """Yield the archive of the backup, to be read. Raises: PopgateError."""
        try:
            with (
                httpx.Client(**connection(self._url, self._token)) as http,
                http.stream("GET", f"{PATH}/archive", timeout=SILENCE_SECONDS) as answer,
            ):
                if not answer.is_success:
                    answer.read()
                    accepted(answer)
                yield PartReader(answer.iter_bytes())
        except httpx.RequestError as error:
            raise ServerUnreachable("unreachable", str(error)) from error

    def delete(self) -> None:
        """Delete the backup that ``take`` has begun. Raises: PopgateError."""
        if self._is_own:
            self._client.perform(Exchanges(retry_seconds_max=DELETE_SECONDS_MAX).delete(PATH))


def _share(state: JsonObject) -> str:
    copied, size = state["bytes_copied"], state["bytes"]
    return f"{copied >> 20:,} of {size >> 20:,} MiB"
