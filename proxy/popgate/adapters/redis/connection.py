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
_ANEW, _UNCLAIMED = "POPGATE_ANEW", "POPGATE_UNCLAIMED"


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
        self._kept: dict[str, str] = {}
        self._kept_hashes: dict[str, dict[str, str]] = {}
        """What is put back where Redis has lost it, with the first call that meets the new data."""
        self._failure: str | None = None
        self._lost: list[Callable[[], None]] = []

    def failure(self) -> str | None:
        """Why the latest call failed, or None where it succeeded."""
        return self._failure

    def on_data_loss(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever the data turn out to be others than before: all records are gone. No script has run on
        the new data then, from here."""
        self._lost.append(tell)

    @property
    def incarnation(self) -> bytes | None:
        """The data that are known; None where that has to be found out, by the next script."""
        return self._incarnation

    async def run(self, name: str, *request: object) -> Any:
        """Run the script ``name`` on ``request`` and return what it answers, all or nothing of it done.

        Raises: StateUnavailable; then nothing was done as far as is known: what got no answer may have been.
        """
        if self._incarnation is None:
            remembered = msgspec.msgpack.encode((self._kept, self._kept_hashes))
            self._incarnation = await self._execute("incarnation", self.prefix, secrets.token_hex(8), remembered)
        known = self._incarnation
        try:
            answer = await self._execute(name, self.prefix, known, msgspec.msgpack.encode(request))
        except ResponseError as error:
            if _ANEW in str(error):
                raise self._data_lost(known) from error
            if _UNCLAIMED in str(error):
                detail = f"Redis at {self.place} has lost its data, and the owner of a queue has yet to write them back"
                raise StateUnavailable(detail, retry_after_seconds=RETRY_AFTER_SECONDS) from error
            raise
        return msgspec.msgpack.decode(answer)

    async def read_hash(self, name: str) -> list[tuple[str, str]]:
        """The fields and values of a small hash of text, by field. Raises: StateUnavailable.

        They are remembered, and put back where Redis loses them, by all who have read them: who was away while one was
        deleted after that brings it back.
        """
        flat: list[str] = await self.run("read", name)
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        self._kept_hashes[name] = fields
        return sorted(fields.items())

    def remember_field(self, name: str, field: str, value: str) -> None:
        """It was written to a hash which ``read_hash`` reads: it is put back, too."""
        self._kept_hashes.setdefault(name, {})[field] = value

    def forget_field(self, name: str, field: str) -> None:
        """It was deleted: it is not put back."""
        self._kept_hashes.get(name, {}).pop(field, None)

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
        if mark is None:
            return None
        self._kept["broker"] = mark.decode()
        return self._kept["broker"]

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
        self._kept[name] = found.decode()
        return found

    async def look(self, *words: str) -> Any | None:
        """What a command of administrators answers; None where this user may not give it. Raises: StateUnavailable."""
        await self.command("PING")  # so that what is wrong with Redis itself is told as that
        with contextlib.suppress(RedisError, OSError):
            return await self._lane.call(*words)
        return None

    async def watch(self) -> None:
        """Look again and again whether Redis answers and has its data, so that ``failure`` is right and a loss is known
        also while nobody calls. Endless."""
        while True:
            with contextlib.suppress(StateUnavailable, ResponseError):  # it was noted and told
                known = self._incarnation
                stands = await self.command("GET", f"{self.prefix}incarnation")
                if known is not None and stands != known:
                    self._data_lost(known)
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
