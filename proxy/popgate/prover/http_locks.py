"""Offers locks over HTTP to the prover. A client uses one proxy, or several proxies in turn.

A held lock is renewed in the background. The client trusts the lock during its time to live, measured from the moment
when the client sent the last successful renewal. If this time passes without another successful renewal, or a renewal
is refused, the client reports the lock as doubtful. Except for renewals, the client never repeats a request whose
answer was lost, because the handling of lost answers is part of the proof.

A client sends the token of the environment (POPGATE_TOKEN or POPGATE_TOKEN_FILE), if there is one.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import orjson

from popgate.domain.locks import LockKind
from popgate.prover.target import Connect, Held, LockTarget, Renewing
from popgate_client.tokens import current_token, token_of_environment

TTL_SECONDS = 3.0
RENEW_SECONDS = 0.5
HOLDER = "prover"


class HttpError(Exception):
    """A proxy answered with an unexpected status, or closed the connection without an answer."""


class HttpLock:
    """A client that uses one lock through proxies.

    ``urls`` are the URLs of the proxies. ``on_doubt`` is called when a renewal is refused, or when the time to live
    passes without a successful renewal.
    """

    ttl_seconds = TTL_SECONDS

    def __init__(self, urls: list[str], lock: str, kind: LockKind) -> None:
        self.on_doubt: Callable[[float], None] = lambda _: None
        self._proxies = [_Proxy(url) for url in urls]
        self._turns = itertools.cycle(self._proxies)
        self._path = f"/v1/locks/{lock}"
        self._kind = kind
        self._renewing: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Create the lock if it is a mutex. For other kinds, only check that a proxy answers. Raises: OSError,
        HttpError."""
        if self._kind is LockKind.MUTEX:
            await self._ask("PUT", "", kind=self._kind)
        else:  # the prover creates the lock when it sets the slots
            await self._ask("GET", "", accept=HTTPStatus.NOT_FOUND)

    async def acquire(self, wait_seconds: float) -> Held | None:
        sent_at = time.monotonic()
        answer = await self._ask(
            "POST", "/acquire", holder=HOLDER, ttl_seconds=self.ttl_seconds, wait_seconds=wait_seconds
        )
        if not answer["acquired"]:
            return None
        token = str(answer["token"])
        self._renewing[token] = asyncio.create_task(self._keep(token, sent_at), name="renew lock")
        return Held(answer["slot"], answer["fencing_token"], token)

    async def verify(self, held: Held) -> bool:
        return bool((await self._ask("POST", "/verify", token=held.grant, accept=HTTPStatus.CONFLICT)).get("held"))

    async def renew(self, held: Held) -> int | None:
        answer = await self._ask("POST", "/renew", token=held.grant, accept=HTTPStatus.CONFLICT)
        return int(answer["fencing_token"]) if answer.get("held") else None

    async def release(self, held: Held) -> None:
        self._stop_renewing(str(held.grant))
        await self._ask("POST", "/release", token=held.grant)

    async def set_slots(self, slots: int) -> None:
        if self._kind is LockKind.SEMAPHORE:
            await self._ask("PUT", "", kind=self._kind, slots=slots)
        else:
            await self._ask("PUT", "", kind=self._kind, enabled=bool(slots))

    async def count_held(self) -> int:
        return len((await self._ask("GET", "", accept=HTTPStatus.NOT_FOUND)).get("holders", ()))

    async def remove(self) -> None:
        await self._ask("DELETE", "", accept=HTTPStatus.NOT_FOUND)

    async def close(self) -> None:
        """Release all held locks. If no proxy answers, the locks end after their time to live."""
        for token in list(self._renewing):
            self._stop_renewing(token)
            with contextlib.suppress(OSError, HttpError):
                await self._ask("POST", "/release", token=token)
        for proxy in self._proxies:
            proxy.close()

    async def _keep(self, token: str, believed_from: float) -> None:
        """Renew the lock until a renewal is refused, or until the lock's time to live passes without a successful
        renewal."""
        while True:
            if time.monotonic() < believed_from + RENEW_SECONDS:  # renew at once if the acquire took long
                await asyncio.sleep(RENEW_SECONDS)
            sent_at = time.monotonic()
            try:
                async with asyncio.timeout(self.ttl_seconds):
                    answer = await self._ask("POST", "/renew", token=token, accept=HTTPStatus.CONFLICT)
            except (OSError, HttpError):
                if time.monotonic() > believed_from + self.ttl_seconds:
                    self.on_doubt(believed_from)
                    return
                await asyncio.sleep(RENEW_SECONDS)
            else:
                if not answer.get("held"):
                    self.on_doubt(sent_at)
                    return
                believed_from = sent_at

    def _stop_renewing(self, token: str) -> None:
        renewing = self._renewing.pop(token, None)
        if renewing is not None:
            renewing.cancel()

    async def _ask(self, method: str, verb: str, *, accept: HTTPStatus = HTTPStatus.OK, **fields: object) -> Any:
        """Send a request to the next proxy in turn, and return the answer. Raises: OSError, HttpError."""
        body = orjson.dumps(fields) if fields else b""
        status, answer = await next(self._turns).ask(method, self._path + verb, body)
        if status not in (HTTPStatus.OK, HTTPStatus.CREATED, accept):
            raise HttpError(f"{status} {answer.get('code')}: {answer.get('detail')}")
        return answer


class _Proxy:
    """The connections to one proxy. Each connection is used by one request at a time."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._token = token_of_environment()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Send a request, and return the status and the decoded body of the answer. Raises: OSError, HttpError."""
        reader, writer = await self._connection()
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._parts.netloc}\r\ncontent-type: application/json\r\n"
        if self._token != "":
            head += f"authorization: Bearer {current_token(self._token)}\r\n"
        try:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await _answer(reader)
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append((reader, writer))
        return answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._parts.hostname, self._parts.port)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    try:
        first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        lengths = [int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:")]
        return int(first.split()[1]), orjson.loads(await reader.readexactly(lengths[0]))
    except (asyncio.IncompleteReadError, IndexError, ValueError) as error:
        raise HttpError("the proxy ended the connection without an answer") from error


async def connect(urls: str, lock: str, kind: LockKind) -> HttpLock:
    """Return a client of the proxies whose URLs are in ``urls``, separated by commas. Raises: OSError, HttpError."""
    made = HttpLock(urls.split(","), lock, kind)
    await made.start()
    return made


_conforms: type[LockTarget] = HttpLock
_renewing_conforms: type[Renewing] = HttpLock
_connect_conforms: Connect = connect
