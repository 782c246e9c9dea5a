"""The shared state's Redis: one namespace of keys in it, the scripts that are run there, and what is wrong with it.

Owns calls of scripts, the translation of errors, and the incarnation: a name that stands beside the data. Every script
is told the one its caller knows and changes nothing where another stands: Redis has lost what was written then.

What Redis answered is on its disk only with ``appendfsync always``; with ``everysec``, its default, a crash loses up to
two seconds, also one of Redis alone (it puts off its writes while a sync runs), and so does a failover to a replica.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import NoScriptError, RedisError, ResponseError

from popgate.adapters.redis.address import RedisAddress
from popgate.adapters.redis.failures import RETRY_AFTER_SECONDS, state_failure
from popgate.adapters.redis.lane import Lane
from popgate.adapters.redis.scripts import script
from popgate.domain.errors import StateUnavailable

_log = logging.getLogger(__name__)

SECRET_BYTES = 32
"""Written as twice as many hexadecimal digits."""
WATCH_SECONDS = 1.0
_ANEW = "POPGATE_ANEW"


class RedisConnection:
    """``namespace`` keeps the keys of one deployment apart from others in the same database.

    Nothing is connected before the first call. Each call makes good what was broken, where that is possible.
    """

    def __init__(self, address: RedisAddress, namespace: str = "default") -> None:
        self.address = address
        self.place = address.place
        self.prefix = f"popgate:{namespace}:"
        self._lane = Lane(address)
        self._incarnation: bytes | None = None
        self._kept: dict[str, bytes] = {}
        self._failure: str | None = None
        self._lost: list[Callable[[], None]] = []

    def failure(self) -> str | None:
        """Why the latest call failed, or None where it succeeded."""
        return self._failure

    def on_data_loss(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever the data turn out to be others than before: all records are gone."""
        self._lost.append(tell)

    async def run(self, name: str, *request: object) -> Any:
        """Run the script ``name`` on ``request`` and return what it answers, all or nothing of it done.

        Raises: StateUnavailable; then nothing was done as far as is known: what got no answer may have been.
        """
        if self._incarnation is None:
            for kept, value in [*self._kept.items()]:
                await self.command("SET", f"{self.prefix}{kept}", value, "NX")
            self._incarnation = await self._execute("incarnation", self.prefix, secrets.token_hex(8))
        known = self._incarnation
        try:
            answer = await self._execute(name, self.prefix, known, msgspec.msgpack.encode(request))
        except ResponseError as error:
            if _ANEW not in str(error):
                raise
            raise self._data_lost(known) from error
        return msgspec.msgpack.decode(answer)

    async def read_hash(self, name: str) -> list[tuple[str, str]]:
        """The fields and values of a small hash of text, by field. Raises: StateUnavailable."""
        flat: list[str] = await self.run("read", name)
        return sorted(zip(flat[::2], flat[1::2], strict=True))

    async def command(self, *words: str | bytes | int) -> Any:
        """One command of Redis. Raises: StateUnavailable, and ResponseError where Redis does not want it."""
        try:
            answer = await self._lane.call(*words)
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:  # a TimeoutError is an OSError
            failure = state_failure(error, self.place)
            if failure is None:
                raise
            if self._failure is None:
                _log.warning("Redis is unavailable", extra={"place": self.place, "error": failure.detail})
            self._failure = failure.detail
            raise failure from error
        if self._failure is not None:
            self._failure = None
            _log.info("Redis is back", extra={"place": self.place})
        return answer

    async def bound_broker(self) -> str | None:
        """What ``bind_broker`` was told; None before, and where Redis has lost its data. Raises: StateUnavailable."""
        mark: bytes | None = await self.command("GET", f"{self.prefix}broker")
        return None if mark is None else mark.decode()

    async def bind_broker(self, mark: str) -> None:
        """Remember which broker the records here speak of, once. Raises: StateUnavailable."""
        await self.command("SET", f"{self.prefix}broker", mark, "NX")

    async def shared_secret(self) -> bytes:
        """The secret of all that share this namespace, made by the first who asks. Raises: StateUnavailable."""
        return await self._keep("secret", secrets.token_hex(SECRET_BYTES).encode())

    async def cluster(self) -> str:
        """A name for all that share this namespace, made by the first who asks. Raises: StateUnavailable."""
        return (await self._keep("cluster", secrets.token_hex(8).encode())).decode()

    async def _keep(self, name: str, first: bytes) -> bytes:
        """What stands under ``name``: ``first`` where nothing did. It is put back where Redis loses it: who comes later
        must agree with those that are here."""
        key = f"{self.prefix}{name}"
        await self.command("SET", key, first, "NX")
        found: bytes = await self.command("GET", key)
        self._kept[name] = found
        return found

    async def look(self, *words: str) -> Any | None:
        """What a command of administrators answers; None where this user may not give it. Raises: StateUnavailable."""
        await self.command("PING")  # so that what is wrong with Redis itself is told as that
        with contextlib.suppress(RedisError, OSError):
            return await self._lane.call(*words)
        return None

    async def watch(self) -> None:
        """Look again and again whether Redis answers, so that ``failure`` is right also while nobody calls. Endless."""
        while True:
            with contextlib.suppress(StateUnavailable, ResponseError):  # it was noted and told
                await self.command("PING")
            await asyncio.sleep(WATCH_SECONDS)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._lane.close()

    async def _execute(self, name: str, *arguments: str | bytes) -> bytes:
        known = script(name)
        try:
            answer: bytes = await self.command("EVALSHA", known.sha, 0, *arguments)
        except NoScriptError:  # Redis is new, or was started again
            answer = await self.command("EVAL", known.text, 0, *arguments)
        return answer

    def _data_lost(self, known: bytes) -> StateUnavailable:
        """Forget the incarnation that was ``known``; the first to notice tells the others."""
        detail = f"Redis at {self.place} has lost its data: leases and settlements until now are forgotten"
        if self._incarnation == known:
            self._incarnation = None
            _log.error("Redis has lost its data", extra={"place": self.place, "prefix": self.prefix})
            for tell in self._lost:
                tell()
        return StateUnavailable(detail, retry_after_seconds=RETRY_AFTER_SECONDS)
